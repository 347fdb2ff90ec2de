"""What went through an engine: tokens, seconds, and hashes that say whether two runs asked and answered the same.

The hashes are sums of one hash a request, so they do not depend on the order in which requests end, and a run of a
million requests needs no more memory than one of two.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core import declared_params

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams
    from minivllm.core.interfaces.taps import Tap
    from minivllm.frontend.requests import Tracked

MOST_DIGESTS = 10_000  # requests whose digests are kept one by one, so that a diff can say which of them differ
MOST_REQUESTS = 10_000  # requests that are kept whole, so that the run can be started again
_MODULUS = 2**256


class ResultTally:
    """Counts the requests of one front door; one thread at a time calls it.

    ``keep``: whole requests are kept in ``requests``, in the order in which they came, for ``replay``.
    """

    def __init__(self, keep: bool = False) -> None:
        self.requests: list[dict[str, Any]] | None = [] if keep else None
        self.too_many = False
        self.count = self.prompt_tokens = self.cached = self.output_tokens = 0
        self.ends: Counter[str] = Counter()
        self.first_error: str | None = None
        self._digests: list[str | None] = []
        self._joules: list[float | None] = []  # of each request, where a counter is read
        self._prompts = self._sampling = self._outputs = 0
        self._active, self._busy, self._since = 0, 0.0, 0.0
        self._batch = 0
        self._params: tuple[Any, dict[str, Any], int] = (None, {}, 0)  # the last seen: mostly a whole call's

    def next_batch(self) -> None:
        """What is watched from here on was handed over in one call."""
        self._batch += 1
        self._params = (None, {}, 0)

    def watch(self, tracked: Tracked) -> None:
        """Count a request that the engine has taken."""
        number, before = self.count, tracked.done
        self.count += 1
        self._active += 1
        if self._active == 1:
            self._since = time.monotonic()
        if number < MOST_DIGESTS:
            self._digests.append(None)
        request = tracked.request
        if self._params[0] is not request.params:
            params = plain_params(request.params)
            self._params = (request.params, params, _number(repr(sorted(params.items())).encode()))
        self._prompts += _number(_prompt_bytes(request))
        taps = plain_taps(request.taps)
        self._sampling += self._params[2] + (_number(repr(taps).encode()) if taps else 0)
        self._keep(request, self._params[1])

        def done(ended: Tracked) -> None:
            self._ended(ended, number)
            if before is not None:
                before(ended)

        tracked.done = done
        if request.finished is not None:
            self._ended(tracked, number)

    def _keep(self, request: Any, params: dict[str, Any]) -> None:
        if self.requests is None:
            return
        if len(self.requests) >= MOST_REQUESTS:
            self.requests, self.too_many = None, True
            return
        prompt = {"prompt": request.text} if request.text is not None else {}
        ids = {"prompt_token_ids": request.prompt.tolist()}
        taps = {"taps": plain_taps(request.taps)} if request.taps else {}
        self.requests.append({"batch": self._batch, **prompt, **ids, "params": params, **taps})

    def _ended(self, tracked: Tracked, number: int) -> None:
        found = hashlib.sha256(tracked.request.prompt.tobytes())
        for text in tracked.texts:
            ids = np.asarray(text.token_ids, np.int32)
            found.update(b"|" + ids.tobytes())
            self.output_tokens += len(ids)
            self.ends[text.finish_reason or "abort"] += 1
        if number < MOST_DIGESTS:
            self._digests[number] = found.hexdigest()[:16]
        self._outputs += int.from_bytes(found.digest(), "little")
        if tracked.request.energy is not None and number < MOST_DIGESTS:
            self._joules += [None] * (number + 1 - len(self._joules))
            self._joules[number] = tracked.request.energy.joules
        self.prompt_tokens += len(tracked.request.prompt)
        self.cached += tracked.request.cached_tokens
        if self.first_error is None:
            self.first_error = next((s.error for s in tracked.request.sequences if s.error), None)
        self._active -= 1
        if not self._active:
            self._busy += time.monotonic() - self._since

    def results(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """``seconds`` are those in which at least one request was there; ``tokens_hash`` covers the token ids of all
        prompts and outputs that have ended, ``outputs`` has one digest a request in the order in which they came, and
        ``joules``, where a counter is read, its share (None: not known)."""
        seconds = self._busy + (time.monotonic() - self._since if self._active else 0.0)
        whole = self.count <= MOST_DIGESTS
        return {
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
            **({"joules": list(self._joules) if whole else None} if self._joules else {}),
            "stats": dict(stats),
        }


def plain_taps(taps: Sequence[Tap]) -> list[dict[str, Any]]:
    """JSON; of a vector its hash, as it can be as large as a model's weights."""
    return [
        {
            "point": tap.point,
            "read": tap.read,
            **({} if tap.add is None else {"add_sha256": hashlib.sha256(tap.vector.tobytes()).hexdigest()}),
        }
        for tap in taps
    ]


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that are not at their defaults, as JSON; a function becomes ``{"function": name}``."""
    found: dict[str, Any] = {}
    for f in fields(params):
        value = getattr(params, f.name)
        default = f.default if f.default is not MISSING else f.default_factory()  # type: ignore[misc, operator]
        if value == default or (f.name in ("stop", "stop_token_ids") and not value):
            continue
        if isinstance(value, (list, tuple)) and any(map(callable, value)):
            value = value[0]  # a record says that a function was there, which is all that it can do
        if callable(value):
            name = getattr(value, "__qualname__", type(value).__qualname__)
            found[f.name] = {"function": f"{getattr(value, '__module__', '?')}:{name}"}
        elif is_dataclass(value):
            found[f.name] = _given(value)
        elif isinstance(value, Mapping):
            found[f.name] = {str(k): _plain(v) for k, v in value.items()}
        else:
            found[f.name] = list(map(_plain, value)) if isinstance(value, (list, tuple)) else _plain(value)
    extra = found.pop("extra", {})  # what this package declares is a keyword wherever it is read
    own = {name: value for name, value in extra.items() if name in declared_params.builtin()}
    others = {name: value for name, value in extra.items() if name not in own}
    return {**found, **own, **({"extra": others} if others else {})}


def _given(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults."""
    own = [f for f in fields(value) if getattr(value, f.name) != f.default]
    return json.loads(json.dumps({f.name: getattr(value, f.name) for f in own}, default=dict))


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return list(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _prompt_bytes(request: Any) -> bytes:
    """The text where there is one: another tokenizer does not make it another prompt."""
    return b"t" + request.text.encode() if request.text is not None else b"i" + request.prompt.tobytes()


def _number(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest(), "little")


def _hex(total: int) -> str:
    return f"{total % _MODULUS:064x}"
