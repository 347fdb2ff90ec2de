"""Outputs, which are objects and dicts at once, and the text of a running sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

from minivllm.core.engine.scores import Scores, TokenLogprobs
from minivllm.core.interfaces.finish import FinishReason
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError, shown

from .detokenize import IncrementalDetokenizer, StopStrings
from .marks import MarkedDetokenizer, MarkedStops
from .tokenizer import Tokenizer

_T = TypeVar("_T")


class Logprob(NamedTuple):
    """The natural log-probability of a token, from the raw logits unless ``logprobs_mode`` selects others.

    ``rank`` is 1 + the number of tokens that are strictly more likely.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class KeptTokens(NamedTuple):
    """The tokens that stayed in the KV cache at one compression of a sequence.

    ``computed`` is the number of computed tokens at the compression.  ``positions`` has i32 [kv_heads, kept] for each
    compressed attention layer: the positions of its kept tokens, ascending in each head."""

    computed: int
    positions: dict[int, Any]


class _OutputRecord(dict[str, Any]):
    """A dataclass that is also a dict of its fields and of the properties named in ``_also``.

    It is a dict because ``json`` accepts no other mapping.  Invariant: the fields are stored only as entries of the
    dict.  An entry may be a function, which is called when the entry is first read, because a hundred thousand dicts
    of log-probabilities take a second to make.
    """

    _also: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self._also:
            dict.__setitem__(self, name, None)  # an entry, whose value each read computes

    def __getattr__(self, name: str) -> Any:
        if dict.__contains__(self, name):
            return self[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._also:
            raise AttributeError(f"{name} is computed from other fields of the output: set those")
        self[name] = value

    def __getitem__(self, key: str) -> Any:
        if key in self._also:
            return getattr(self, key)
        try:
            value = dict.__getitem__(self, key)
        except KeyError:
            raise KeyError(f"{shown(key)}: an output has {', '.join(self._names())}") from None
        if callable(value):
            value = self[key] = value()
        return value

    # methods of dict that would not use __getitem__

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def items(self) -> Any:
        return {name: self[name] for name in self}.items()

    def values(self) -> Any:
        return {name: self[name] for name in self}.values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.copy() | other

    def __ror__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return other | self.copy()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self.copy() == dict(other.items())

    def __ne__(self, other: object) -> bool:
        return not self == other

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        names = cls.__dict__.get("_all_names")
        if names is None:
            names = (*(f.name for f in fields(cls)), *cls._also)  # type: ignore[arg-type]
            cls._all_names = names  # type: ignore[attr-defined]
        return names


def _entries(cls: type[_T]) -> type[_T]:
    """Return the class without the defaults that ``dataclass`` leaves on it, because they would hide the entries."""
    for f in fields(cls):  # type: ignore[arg-type]
        if f.name in vars(cls):
            delattr(cls, f.name)
    return cls


@_entries
@dataclass(eq=False)
class CompletionOutput(_OutputRecord):
    """One sequence of a request.

    ``finish_reason`` is "stop" (end-of-sequence, stop token or stop string), "length", "abort", "error", or None while
    the sequence runs.  ``stop_reason`` is the stop string or stop token id that ended it, or None for end-of-sequence.
    ``logprobs`` has one dict per token, {token id: Logprob}: the chosen token first, then the most likely tokens, the
    lower id first among equals.  They are made when they are first read.  A token with probability 0 is listed only if
    it was chosen, so a dict may have fewer tokens than requested.  ``score`` orders the outputs of beam search:
    ``cumulative_logprob`` / tokens ** length_penalty.  ``taps`` has a numpy array float32 [positions, width] for each
    point that was read, or is None.  It has a row for each input token of the model: the prompt and all generated
    tokens but the last.  For "logits" it has a row for each generated token, unless the prompt is scored.
    ``routes`` has the experts of these input tokens, integers [positions, layers, k], and ``route_counts`` the number
    of tokens that used each expert, int64 [layers, experts]; each is None unless ``SamplingParams.routes`` has it.
    ``weights_versions`` has, for each token, the version of the weights that drew it (``LLM.update_weights``), and
    ``weights_version`` is the version at the last token.
    """

    _also = ("tokens", "finished")

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    taps: dict[str, Any] | None = field(default=None, compare=False)  # == of arrays is an array
    routes: Any = field(default=None, compare=False)
    route_counts: Any = field(default=None, compare=False)
    weights_version: int = 0
    weights_versions: list[int] = field(default_factory=list)

    def set_versions(self, spans: Sequence[tuple[int, int]]) -> None:
        """Set the versions of the weights from pairs (version, number of its first token), the oldest first."""
        n = len(self.token_ids)
        used = [span for span in spans if span[1] < n] or list(spans[:1])
        if not used:
            return
        self.weights_version = used[-1][0]
        ends = [first for _, first in used[1:]] + [n]
        dict.__setitem__(self, "weights_versions", partial(_repeated, used, ends))

    @property
    def tokens(self) -> list[int]:
        """Return the token ids of the sequence."""
        return self.token_ids

    @property
    def finished(self) -> bool:
        """Return whether the sequence has ended."""
        return self.finish_reason is not None


def _repeated(spans: Sequence[tuple[int, int]], ends: Sequence[int]) -> list[int]:
    """Return the version of each token, for spans (version, first token) and their ends."""
    versions: list[int] = []
    for (version, _), end in zip(spans, ends, strict=True):
        versions += [version] * (end - len(versions))
    return versions


@_entries
@dataclass(eq=False)
class RequestMetrics(_OutputRecord):
    """Times and counts of a request.  Times are seconds of ``time.monotonic``.

    ``scheduled_time`` is the time at which the request left the queue.  ``cached_tokens`` is the number of prompt
    tokens found in the prefix cache.  ``drafted_tokens`` were guessed by speculative decoding, and ``accepted_tokens``
    of them were right.  ``joules`` is the request's share of the counted energy, or None without the option
    ``energy``."""

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    scheduled_time: float | None = None
    joules: float | None = None


@_entries
@dataclass(eq=False)
class RequestOutput(_OutputRecord):
    """A request's answer so far.

    ``text``, ``tokens``, ``finish_reason``, ``stop_reason``, ``taps``, ``routes`` and ``route_counts`` are those of the
    first output."""

    _also = (
        "text", "tokens", "finish_reason", "stop_reason", "num_cached_tokens", "taps", "routes", "route_counts",
    )  # fmt: skip

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text if self.outputs else ""

    @property
    def tokens(self) -> list[int]:
        return self.outputs[0].token_ids if self.outputs else []

    @property
    def finish_reason(self) -> FinishReason | None:
        if self.outputs:
            return self.outputs[0].finish_reason
        return None if self.error is None else "error"

    @property
    def stop_reason(self) -> int | str | None:
        return self.outputs[0].stop_reason if self.outputs else None

    @property
    def taps(self) -> dict[str, Any] | None:
        return self.outputs[0].taps if self.outputs else None

    @property
    def routes(self) -> Any:
        return self.outputs[0].routes if self.outputs else None

    @property
    def route_counts(self) -> Any:
        return self.outputs[0].route_counts if self.outputs else None

    @property
    def num_cached_tokens(self) -> int:
        return self.metrics.cached_tokens


class TextDelta(NamedTuple):
    """The result of one ``feed``: new text, the stop string that ended the sequence or None, and the number of fed ids
    that belong to the sequence."""

    text: str
    stopped: str | None
    used: int


def entry_of(
    token_id: int, scores: TokenLogprobs, most: int | None, spell: Callable[[int], str | None]
) -> dict[int, Logprob]:
    """Return the log-probabilities of a token: its own first, then the ``most`` most likely tokens (None means all).

    Tokens with probability 0 are omitted.  Tokens of equal probability have the same rank."""
    entry = {token_id: Logprob(float(scores.chosen), int(scores.rank), spell(token_id))}
    rank = 0
    previous = math.nan
    for place, (other, value) in enumerate(zip(scores.top_ids[:most], scores.top, strict=False), 1):
        if not value > -math.inf:  # NaN or minus infinity; the tokens after it have no probability either
            break
        if value != previous:
            rank = place
            previous = value
        other = int(other)
        if other not in entry:
            entry[other] = Logprob(float(value), rank, spell(other))
    return entry


class SequenceText:
    """The text, tokens and log-probabilities of one sequence, which grow with the accepted tokens.

    With ``detokenize=False``, or without a tokenizer, the text is empty.  ``scored=False`` means that the
    log-probabilities are kept elsewhere.  ``marks`` maps token ids to the characters that stand for them in ``marked``
    (``marks.Marks``).  Invariant: the joined deltas equal ``marked``, which is complete after a final ``feed``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        index: int = 0,
        scored: bool = True,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        if params.stop and tokenizer is None:
            raise RequestError("stop: stop strings need a tokenizer; use stop_token_ids", "stop")
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        scored = scored and params.logprobs is not None
        self._scores: Scores | None = Scores() if scored else None
        self._entries: list[dict[int, Logprob]] = []  # dictionaries of the first tokens, as far as they have been read
        self.cumulative_logprob: float | None = 0.0 if scored else None
        self._most = None if params.logprobs == -1 else params.logprobs
        self._tokenizer, self._params = tokenizer, params
        self._pieces: list[str] = []
        self._detokenizer: IncrementalDetokenizer | MarkedDetokenizer | None = None
        self._stops: StopStrings | None = None
        self._marks: Mapping[int, str] = {}
        self._end_mark = ""  # the mark of the token that ended the sequence
        if tokenizer is not None and params.detokenize:
            self._marks = marks or {}
            self._set_decoders(tokenizer, params)
        # tokens only add text, so ``extend`` is enough in the middle of an answer
        self.plain = self._stops is None and self._scores is None

    def _set_decoders(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        """Set the conversion of ids to text and the search for stop strings."""
        include = params.include_stop_str_in_output
        if not self._marks:
            self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
            self._stops = StopStrings(params.stop, include) if params.stop else None
            return
        self._detokenizer = MarkedDetokenizer(tokenizer, params.skip_special_tokens, self._marks)
        if params.stop:
            tags = {mark: tokenizer.token(token_id) or "" for token_id, mark in self._marks.items()}
            self._stops = MarkedStops(params.stop, include, tags)

    def feed(
        self,
        ids: Sequence[int],
        final: bool = False,
        stop_token: bool = False,
        logprobs: Sequence[TokenLogprobs] | None = None,
    ) -> TextDelta:
        """Add accepted token ids, with one element of ``logprobs`` for each, and return the new text.  ``final`` ends
        the sequence.

        ``stop_token`` (only with ``final``) means that the last id ended the sequence.  It is added to ``token_ids``,
        but to the text only with ``include_stop_str_in_output``.  If a stop string is found, ``finish_reason`` is set,
        and the ids after it and all later ids are ignored, because the device may have run ahead."""
        if self.finish_reason is not None:
            return TextDelta("", None, 0)
        ids = list(ids)
        shown = ids[:-1] if stop_token and not self._params.include_stop_str_in_output else ids
        text = ""
        stopped: str | None = None
        used = len(ids)
        if self._stops is not None:
            text, stopped, used = self._scan(self._stops, ids, shown, final)
        elif self._detokenizer is not None:
            text = self._detokenizer.add(shown)
            if final:
                text += self._detokenizer.finish()
        if len(shown) < len(ids) and stopped is None:  # the token that ends the answer may be a tag that a parser reads
            self._end_mark = self._marks.get(ids[-1], "")
            text += self._end_mark
        self.token_ids += ids if used == len(ids) else ids[:used]
        if self._scores is not None:
            self._take(ids[:used], logprobs)
        if text:
            self._pieces.append(text)
        if stopped is not None:
            self.finish("stop", stopped)
        return TextDelta(text, stopped, used)

    def extend(self, ids: Sequence[int]) -> str:
        """Add ids and return the new text, as ``feed`` does, for a ``plain`` sequence that has not ended."""
        self.token_ids += ids
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.add(ids)
        if text:
            self._pieces.append(text)
        return text

    def _scan(self, stops: StopStrings, ids: list[int], shown: list[int], final: bool) -> tuple[str, str | None, int]:
        """Return new text, the stop string or None, and the number of used ids.

        The ids are decoded one by one, to find the id that completes a stop string."""
        pieces: list[str] = []
        before = len(self.token_ids)
        wanted = self._params.min_tokens
        assert self._detokenizer is not None
        for used, token_id in enumerate(shown, 1):
            text, stopped = stops.push(self._detokenizer.add((token_id,)), before + used > wanted)
            pieces.append(text)
            if stopped is not None:
                return "".join(pieces), stopped, used
        if final:
            text, stopped = stops.push(self._detokenizer.finish(), before + len(ids) > wanted)
            pieces.append(text)
            if stopped is not None:
                return "".join(pieces), stopped, len(ids)
            pieces.append(stops.finish())
        return "".join(pieces), None, len(ids)

    def _take(self, ids: list[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Store the log-probabilities of new token ids, one element for each.  ValueError if there are fewer
        log-probabilities than ids."""
        if not ids:
            return
        assert self._scores is not None and self.cumulative_logprob is not None
        if logprobs is None or len(logprobs) < len(ids):
            raise ValueError(f"{len(ids)} tokens with {len(logprobs or ())} log-probabilities: expected one each")
        before = len(self._scores)
        self._scores.extend(logprobs if len(logprobs) == len(ids) else logprobs[: len(ids)])
        self.cumulative_logprob = sum(self._scores.chosen[before:], self.cumulative_logprob)

    @property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        """Return a dict {token id: Logprob} for each token so far, or None if they are not requested."""
        return self.logprobs_from(0)

    def logprobs_from(self, start: int) -> list[dict[int, Logprob]] | None:
        """Return ``logprobs[start:]``."""
        return None if self._scores is None else self._shown(len(self._scores), start)

    def _shown(self, count: int, start: int = 0) -> list[dict[int, Logprob]]:
        """Return a new list with the dicts of the tokens from ``start`` to ``count`` - 1."""
        assert self._scores is not None
        for i in range(len(self._entries), count):
            self._entries.append(entry_of(self.token_ids[i], self._scores[i], self._most, self._spell))
        return self._entries[start:count]

    def prompt_logprobs(self, prompt: Sequence[int], parts: Sequence[tuple[int, Any]]) -> list[Any]:
        """Return a dict for each prompt token, None for the first one.

        ``parts`` has pairs of a position and plan.LogProbs; later parts replace earlier ones.  Tokens without a part
        are None, if the request ended early."""
        out: list[dict[int, Logprob] | None] = [None] * len(prompt)
        for first, lp in parts:
            for j in range(len(lp.chosen)):
                ids, values = lp.top_ids[j].tolist(), lp.top[j].tolist()
                scores = TokenLogprobs(float(lp.chosen[j]), int(lp.rank[j]), ids, values)
                out[first + j] = entry_of(int(prompt[first + j]), scores, None, self._spell)
        return out

    def _spell(self, token_id: int) -> str | None:
        """Return the text of a token, or None without detokenization."""
        if self._tokenizer is None or not self._params.detokenize:
            return None
        return self._tokenizer.decode((token_id,), skip_special_tokens=False)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Set the reason of the end, unless a stop string has set it."""
        if self.finish_reason is None:
            self.finish_reason = reason
            self.stop_reason = stop_reason

    @property
    def marked(self) -> str:
        """Return the text with marks, which only a parser may read.  Without marks it is ``text``."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def text(self) -> str:
        """Return the text without marks.  A marked token has its own text, or none if it ended the answer."""
        marked = self.marked
        if not self._marks or self._tokenizer is None or marked.isascii():
            return marked
        skip = self._params.skip_special_tokens
        spelled = {ord(mark): self._tokenizer.decode((i,), skip) for i, mark in self._marks.items()}
        return marked.removesuffix(self._end_mark).translate(spelled)

    def output(self) -> CompletionOutput:
        """Return a snapshot, which later tokens do not change."""
        scores: Any = None if self._scores is None else partial(self._shown, len(self._scores))
        return CompletionOutput(
            self.index,
            self.text,
            list(self.token_ids),
            self.cumulative_logprob,
            scores,
            self.finish_reason,
            self.stop_reason,
        )


class StopProbe:
    """A stateless search for a stop string that the last of some generated ids completes.

    Beam search uses it, because its branches share no state.  Only the last ids that a stop string can span are
    decoded."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self._tokenizer, self._params = tokenizer, params
        self._span = 4 * max(map(len, params.stop or ("",))) + 8  # a character has at most four tokens

    def __call__(self, ids: Sequence[int]) -> str | None:
        if len(ids) <= self._params.min_tokens or self._tokenizer is None:
            return None
        text = IncrementalDetokenizer(self._tokenizer, self._params.skip_special_tokens)
        stops = StopStrings(self._params.stop or ())
        *before, last = ids[-self._span :]
        stops.push(text.add(before), armed=False)
        return stops.push(text.add((last,)))[1]
