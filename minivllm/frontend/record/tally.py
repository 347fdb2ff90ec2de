"""Results of a run: tokens, seconds, and hashes that show whether two runs had the same prompts and outputs.

A hash of a run is the sum of one hash for each request.  So it does not depend on the order in which requests end, and
a run of a million requests needs no more memory than a run of two.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core import declared_params
from minivllm.core.interfaces.routes import RouteParams, count_routes, encode_routes

from . import Entries

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.taps import Tap
    from minivllm.frontend.requests import Tracked

MOST_DIGESTS = 10_000  # largest number of requests with stored digests, by which ``diff`` names differing requests
MOST_REQUESTS = 10_000  # largest number of requests that are kept whole, so that the run can be repeated
_MODULUS = 2**256


class ResultTally:
    """Counts the requests of one LLM, AsyncLLM or server.  Only one thread at a time may call it.

    ``keep`` stores whole requests in ``requests``, in the order of their arrival, for ``replay``.
    """

    def __init__(self, keep: bool = False) -> None:
        self.requests: list[Entries] | None = [] if keep else None
        self.too_many = False
        self.count = self.prompt_tokens = self.cached = self.output_tokens = 0
        self.ends: Counter[str] = Counter()
        self.first_error: str | None = None
        self._digests: list[str | None] = []
        self._joules: list[float | None] = []  # joules of each request; empty unless an energy counter is read
        self._prompts = self._sampling = self._outputs = 0
        # number of sequences whose routes were read, and the sum of the hashes of these routes
        self._routed = self._routes = 0
        # number of tokens that used each expert, over the sequences whose routes were read
        self._route_counts: np.ndarray | None = None
        self._active = 0  # requests that have not ended
        self._busy = 0.0  # seconds with active requests, up to the last time without one
        self._since = 0.0  # time at which the present period with active requests began
        self._batch = 0
        # the last sampling parameters with their JSON and hash, because requests of a call mostly have the same
        # parameters
        self._params: tuple[Any, Entries, int] = (None, {}, 0)
        # requests whose prompt and parameters are not yet part of the hashes, by number
        self._unread: dict[int, Any] = {}

    def next_batch(self) -> None:
        """Begin a new batch.  The requests recorded from now on belong to the next call of the user."""
        self._batch += 1
        self._params = (None, {}, 0)

    def watch(self, tracked: Tracked) -> None:
        """Count a request that the engine has accepted, and its results when it ends.

        A record has generated tokens, so requests for embeddings are left out."""
        if tracked.request.pooling is not None:
            return
        number = self.count
        notify = tracked.done
        self.count += 1
        self._active += 1
        if self._active == 1:
            self._since = time.monotonic()
        if number < MOST_DIGESTS:
            self._digests.append(None)
        request = tracked.request
        self._unread[number] = request
        if self.requests is not None:
            self._read(number)

        def done(ended: Tracked) -> None:
            self._ended(ended, number)
            if notify is not None:
                notify(ended)

        tracked.done = done
        if request.finished is not None:
            self._ended(tracked, number)

    def _read(self, number: int) -> None:
        """Add the prompt and the parameters of request ``number`` to the hashes, unless they are part of them.

        This is done when the request ends, while the device runs other requests, so the first step begins earlier."""
        request = self._unread.pop(number, None)
        if request is None:
            return
        if self._params[0] is not request.params:
            params = without_routes(plain_params(request.params))
            self._params = (request.params, params, _number(repr(sorted(params.items())).encode()))
        self._prompts += _number(_prompt_bytes(request))
        self._sampling += self._params[2]
        taps = plain_taps(request.taps)
        if taps:
            self._sampling += _number(repr(taps).encode())
        self._keep(request, self._params[1], taps)

    def _keep(self, request: Any, params: Entries, taps: list[Entries]) -> None:
        """Add a request to ``requests``.  Beyond ``MOST_REQUESTS`` drop all of them."""
        if self.requests is None:
            return
        if len(self.requests) >= MOST_REQUESTS:
            self.requests = None
            self.too_many = True
            return
        kept: Entries = {"batch": self._batch}
        if request.text is not None:
            kept["prompt"] = request.text
        kept["prompt_token_ids"] = request.prompt.tolist()
        kept["params"] = params
        if taps:
            kept["taps"] = taps
        self.requests.append(kept)

    def _ended(self, tracked: Tracked, number: int) -> None:
        """Add the results of request ``number``, which has ended: a digest and counts of its tokens, its energy, its
        routes, and the first error."""
        self._read(number)
        request = tracked.request
        digest = hashlib.sha256(request.prompt.tobytes())
        for text in tracked.texts:
            ids = np.asarray(text.token_ids, np.int32)
            digest.update(b"|" + ids.tobytes())
            self.output_tokens += len(ids)
            self.ends[text.finish_reason or "abort"] += 1
        if number < MOST_DIGESTS:
            self._digests[number] = digest.hexdigest()[:16]
        self._outputs += int.from_bytes(digest.digest(), "little")
        self._add_routes(tracked)
        if request.energy is not None and number < MOST_DIGESTS:
            self._joules += [None] * (number + 1 - len(self._joules))
            self._joules[number] = request.energy.joules
        self.prompt_tokens += len(request.prompt)
        self.cached += request.cached_tokens
        if self.first_error is None:
            self.first_error = next((sequence.error for sequence in tracked.sequences if sequence.error), None)
        self._active -= 1
        if not self._active:
            self._busy += time.monotonic() - self._since

    def _add_routes(self, tracked: Tracked) -> None:
        """Add the routes of a request that reads or counts them to the results."""
        for routes, experts in tracked.routes():
            self._routed += 1
            self._routes += _number(encode_routes(routes)["data"].encode())
            counts = count_routes(routes, experts)
            self._route_counts = counts if self._route_counts is None else self._route_counts + counts

    def results(self, stats: Mapping[str, Any]) -> Entries:
        """Return the results so far; ``stats`` is ``LLM.stats()`` of the engine.

        ``seconds`` is the time during which at least one request was active.  ``tokens_hash`` covers the token ids of
        all prompts and outputs that have ended.  ``outputs`` has a digest of each request in the order of arrival.
        ``routes``, which is there if requests read expert routes, has the number of their sequences, a hash of all
        routes and the number of tokens that used each expert, by layer.  ``joules``, which is there if an energy
        counter is read, has the share of each request, None if it is unknown.
        """
        for number in list(self._unread):
            self._read(number)
        seconds = self._busy
        if self._active:
            seconds += time.monotonic() - self._since
        whole = self.count <= MOST_DIGESTS
        found: Entries = {
            "requests": self.count,
            "unfinished": self._active,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached,
            "prefix_hit_rate": round(self.cached / self.prompt_tokens, 4) if self.prompt_tokens else 0.0,
            "output_tokens": self.output_tokens,
            "seconds": round(seconds, 4),
            "output_tokens_per_second": round(self.output_tokens / seconds, 2) if seconds else 0.0,
            "finish_reasons": dict(sorted(self.ends.items())),
            "error": self.first_error,
            "prompts_hash": _hex(self._prompts),
            "sampling_hash": _hex(self._sampling),
            "tokens_hash": _hex(self._outputs),
            "outputs": list(self._digests) if whole else None,
        }
        if self._route_counts is not None:
            counts = self._route_counts.tolist()
            found["routes"] = {"sequences": self._routed, "hash": _hex(self._routes), "counts": counts}
        if self._joules:
            found["joules"] = list(self._joules) if whole else None
        found["stats"] = dict(stats)
        return found


def plain_taps(taps: Sequence[Tap]) -> list[Entries]:
    """Return taps as JSON.  A vector is replaced by its hash, because it can be as large as a model's weights."""
    found = []
    for tap in taps:
        plain: Entries = {"point": tap.point, "read": tap.read}
        if tap.add is not None:
            plain["add_sha256"] = hashlib.sha256(tap.vector.tobytes()).hexdigest()
        found.append(plain)
    return found


@cache
def _defaults(cls: Any) -> list[tuple[str, Any]]:
    """Return the names and default values of the fields of a dataclass."""
    defaults = [(f.name, f.default, f.default_factory) for f in fields(cls)]
    return [(name, factory() if callable(factory) else value) for name, value, factory in defaults]


def plain_params(params: SamplingParams) -> Entries:
    """Return the sampling parameters that are not at their defaults, as JSON.

    A function becomes ``{"function": name}``.  Parameters that minivllm declares are at the top, those that other
    packages declare are under ``extra``.
    """
    found: Entries = {}
    kind: Any = type(params)
    for name, default in _defaults(kind):
        value = getattr(params, name)
        if value is default or value == default or (name in ("stop", "stop_token_ids") and not value):
            continue
        if isinstance(value, (list, tuple)) and any(map(callable, value)):
            value = value[0]  # the record only notes that there was a function
        if callable(value):
            function = getattr(value, "__qualname__", type(value).__qualname__)
            found[name] = {"function": f"{getattr(value, '__module__', '?')}:{function}"}
        elif is_dataclass(value):
            found[name] = _changed_fields(value)
        elif isinstance(value, Mapping):
            found[name] = {str(key): _plain(item) for key, item in value.items()}
        else:
            found[name] = _plain(value)
    builtin = declared_params.builtin()
    others: Entries = {}
    for name, value in found.pop("extra", {}).items():
        (found if name in builtin else others)[name] = value
    if others:
        found["extra"] = others
    return found


def without_routes(params: Entries) -> Entries:
    """Return parameters with a hash in place of given expert routes, which can be as large as a model's weights."""
    routes = params.get("routes")
    if not isinstance(routes, Mapping) or "given" not in routes:
        return params
    digest = RouteParams(given=routes["given"]).given_digest
    kept = {name: value for name, value in routes.items() if name != "given"}
    return {**params, "routes": {**kept, "given_sha256": digest}}


def _changed_fields(value: Any) -> Entries:
    """Return the fields of a dataclass that are not at their defaults, as JSON."""
    changed = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}
    return json.loads(json.dumps(changed, default=dict))


def _plain(value: Any) -> Any:
    """Return a value with tuples as lists and numpy scalars as Python numbers."""
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _prompt_bytes(request: Any) -> bytes:
    """Return the bytes that identify a prompt.  The text is used if it is known, so that the tokenizer does not
    matter."""
    return b"t" + request.text.encode() if request.text is not None else b"i" + request.prompt.tobytes()


def _number(data: bytes) -> int:
    """Return the SHA-256 of some bytes as a number."""
    return int.from_bytes(hashlib.sha256(data).digest(), "little")


def _hex(total: int) -> str:
    """Return a sum of hashes, modulo 2**256, as hexadecimal digits."""
    return f"{total % _MODULUS:064x}"
