"""The part of a request for generated tokens that does not depend on its protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from minivllm.server.errors import ApiError
from minivllm.server.http.sse import EventStream

from . import fields
from .bodies import sent_names
from .expert_routes import check_routes
from .generate import Answer, Service
from .limits import check_branches, check_counts, reports_energy, stream_options, width_name
from .logprobs import Speller
from .params import limited, make_params, requested_tokens
from .taps import check_reads, read_taps

if TYPE_CHECKING:
    from minivllm.server.http.connection import Direct
    from minivllm.server.link.client import Stream


class Work:
    """One request: its checked fields, parameters and taps.

    ``state`` has the ids, the tenant and the log line of the request.  A protocol's class calls ``_set_length`` and
    ``_set_params`` once each, after this constructor.  ``events`` and ``written`` write the answer in the form of
    OpenAI's API; the class of another protocol overrides them.

    ``one_choice`` means that an answer of the protocol has one choice.  ``unserved`` names the fields whose results
    have no place in an answer of the protocol."""

    stream_type: type[EventStream] = EventStream
    media_type = "application/json"
    one_choice = False
    unserved: tuple[str, ...] = ()

    def __init__(self, service: Service, body: Any, state: dict[str, Any], best_of: int | None = None) -> None:
        self.service, self.body, self.state = service, body, state
        self.passed, self.warnings = fields.check(body, service.client.info.reads)
        self._check_served()
        self.model = service.check_model(body.model)
        self.include_usage, self.continuous = stream_options(body)
        self.energy = reports_energy(service, body)
        self.n = 1 if body.n is None else body.n
        self.best_of = best_of
        check_counts(service, body.n, best_of)

    def _check_served(self) -> None:
        """Raise ApiError (400) for a field whose result has no place in an answer of the protocol.

        The body is translated already, so no alias and no object such as ``options`` can hide a field."""
        for name in self.unserved:
            if getattr(self.body, name, None) not in (None, False):
                sent = sent_names(self.body).get(name, name)
                text = f"{sent} is not supported: an answer has no place for it here; use /v1/chat/completions"
                raise ApiError(400, text, sent)

    def events(self, answer: Answer, direct: Direct | None = None) -> AsyncIterator[bytes]:
        """Yield the answer as the events of a stream (``Answer.events``)."""
        work: Any = self  # typed Any, because the class of a protocol has the other members of ``ProtocolWork``
        return answer.events(work, direct)

    def written(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the answer without a stream, in pieces (``Answer.whole``)."""
        work: Any = self
        return answer.whole(work, self.state["owner"])

    def _set_length(self, default: int | None, least: int = 1) -> None:
        """Set the requested length of the answer and the ``default`` length, each None for no limit."""
        requested = requested_tokens(self.body, least)
        self.requested = limited(requested, self.service.most_tokens, self.warnings, sent_names(self.body))
        self.default = default

    def _set_params(self, prompts: int, logprobs: int | None, form: Mapping[str, Any] | None) -> None:
        """Set the sampling parameters, the taps and the speller of log-probabilities, and check limits for the prompts.

        ``prompts`` is the number of prompts.  ``logprobs`` and ``form`` are passed to ``make_params``."""
        service, body = self.service, self.body
        info = service.client.info
        more = self.passed if self.best_of is None else {**self.passed, "best_of": self.best_of}
        self.params = make_params(body, more, logprobs, form, self.state, info, service.server, service.defaults)
        self.taps = read_taps(body.taps, self.state, service.server, self.params)
        self.routes = check_routes(self.params, self.state)
        branches = self.params.width if self.params.beam_width is None else self.params.n
        if self.one_choice and branches > 1:
            name = width_name(self.params)
            raise ApiError(400, f"{name}={branches}: expected 1, because an answer has one choice here", name)
        check_branches(service, prompts, self.params)
        check_reads(self.taps, info.tap_points, prompts, self.params)
        as_ids = bool(body.return_tokens_as_token_ids)
        self.speller = Speller(service.tokens.tokenizer, as_ids, self.params.detokenize)

    def _answer(self, prefix: str, kind: str, streams: list[Stream], **more: Any) -> Answer:
        """Return the answer of the opened streams.  ``prefix`` begins its id, and ``kind`` is its ``object``."""
        return Answer(
            self.service,
            f"{prefix}-{self.state['request_id']}",
            kind,
            self.model,
            streams,
            self.n,
            self.include_usage,
            self.continuous,
            self.warnings,
            reads=self.taps.reads,
            routes=self.routes if self.routes is not None and self.routes.reads else None,
            energy=self.energy,
            timed=bool(self.body.timings_per_token),
            **more,
        )
