"""The answers of requests alone, and comparisons with them."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import pictures
from .adapters import lora_of, method_of
from .configs import PLAIN, VOCAB, plain_of
from .drive import Answer, Output, engine_options
from .functions import sampling_params, taps_of

KEPT = {"cpu": 8, "cuda": 4}  # largest number of plain engines of a process and dtype
NEAR = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}  # allowed errors of log-probabilities for equal tokens
# allowed errors of values that are read at points, relative to the largest
READ = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
NEAR_TIES = 5e-3  # the same if the last bits of logits depend on the batch, which is compared in float32 only
STEPPED = ("wrong token", "logprob", "taps", "ties")  # kinds of faults that rounding may explain
TIES = "of equal ones"  # beginning of the message of a fault of the kind "ties"
SERVICE = ("priority", "tenant", "cache_salt", "ttft_ms", "tpot_ms", "expected_tokens")


@dataclass(frozen=True)
class Fault:
    """A fault.  ``kind`` is one of ``cases.KINDS``; the parent process detects hung and died."""

    kind: str
    message: str
    ask: int | None = None


class Oracle:
    """The answers of requests alone in plain engines.

    Answers are stored, and shared with other processes by files in ``shared``.  A few engines are kept.
    """

    def __init__(self, device: str, dtype: str, folder: Path, shared: Path | None = None) -> None:
        self.device, self.dtype, self.folder, self.shared = device, dtype, folder, shared
        self.engines: OrderedDict[str, Any] = OrderedDict()
        self.answers: dict[str, Answer] = {}
        self.computed = self.requested = 0

    def close(self) -> None:
        while self.engines:
            self.engines.popitem()[1].close()

    def engine(self, options: dict[str, Any], other: bool = False) -> Any:
        """Return the plain engine for requests of an engine with these options."""
        from minivllm import LLM

        plain = plain_of(options, self.device, other)
        key = json.dumps(plain, sort_keys=True)
        if key in self.engines and self.engines[key].engine.dead:
            self.engines.pop(key).close()
        if key not in self.engines:
            while len(self.engines) >= KEPT[self.device]:
                self.engines.popitem(last=False)[1].close()
            self.engines[key] = LLM(**engine_options(plain, self.device, self.dtype, self.folder))
        self.engines.move_to_end(key)
        return self.engines[key]

    def answer(
        self,
        options: dict[str, Any],
        prompt: list[int],
        params: dict[str, Any],
        anew: bool = False,
        other: bool = False,
    ) -> Answer:
        """Return the answer to the request alone.

        ``anew`` computes it even if it is stored.  ``other`` is described at ``plain_of``.
        """
        self.requested += 1
        params = {k: v for k, v in params.items() if k not in SERVICE}
        options = with_method(options, params)
        if "kv_budget" not in params:
            options = {name: value for name, value in options.items() if name not in ("compressor", "compress_every")}
        if "images" not in params:
            options = {name: value for name, value in options.items() if name != "encoder"}
        # where the length limit ends the answer, it matters
        if len(prompt) + params["max_tokens"] <= options["max_model_len"]:
            options = {**options, "max_model_len": PLAIN["max_model_len"]}
        plain = plain_of(options, self.device, other)
        what = json.dumps([plain, self.device, self.dtype, prompt, params], sort_keys=True)
        key = hashlib.sha256(what.encode()).hexdigest()
        if not anew and key not in self.answers:
            self._read(key)
        if anew or key not in self.answers:
            self.computed += 1
            answer = Answer()
            made = sampling_params(params, VOCAB[options["model"]])
            llm = self.engine(options, other)
            taps = taps_of(params, llm.tap_points())
            lora = lora_of(params, self.folder, options["model"])
            answer.take(llm.generate([pictures.prompt_of(prompt, params, options)], made, False, taps, lora)[0])
            if anew:
                return answer
            self.answers[key] = answer
            self._write(key, answer)
        return self.answers[key]

    def _read(self, key: str) -> None:
        file = self.shared / key if self.shared else None
        if file is not None and file.exists():
            self.answers[key] = pickle.loads(file.read_bytes())

    def _write(self, key: str, answer: Answer) -> None:
        if self.shared is not None:
            part = self.shared / f"{key}.{os.getpid()}"
            part.write_bytes(pickle.dumps(answer))
            part.rename(self.shared / key)


def with_method(options: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """Return the options with only the method of the request's adapter, without methods if it has none."""
    own = {"adapters": [method_of(params["adapter"])]} if "adapter" in params else {}
    return {**{name: value for name, value in options.items() if name not in ("adapters", "enable_lora")}, **own}


Tie = Callable[[Output, Output, int], bool]


def differences(
    got: Answer, want: Answer, dtype: str, left: bool = False, tie: Tie | None = None, times: float = 1
) -> list[tuple[str, str]]:
    """Return (kind, message) for each difference.

    ``left`` means that the client left, so ``got`` is the beginning of the answer, in pieces.  ``tie(got, want, i)``
    returns whether token i may differ, and then all later ones.  ``times`` multiplies the allowed errors.
    """
    if left:
        return _beginnings(got, want, tie)
    if len(got.outputs) != len(want.outputs):
        return [("count", f"{len(got.outputs)} outputs, alone {len(want.outputs)}")]
    found: list[tuple[str, str]] = []
    split, near = False, times * (NEAR[dtype] if tie is None else NEAR_TIES)
    for a, b in zip(got.outputs, want.outputs, strict=True):
        at = _first(a.tokens, b.tokens)
        if at is not None:
            if tie is not None and at < min(len(a.tokens), len(b.tokens)) and tie(a, b, at):
                split = True
                continue
            here = f"output {a.index}, token {at} of {len(a.tokens)}"
            same_length = at < min(len(a.tokens), len(b.tokens))
            kind = "wrong token" if same_length else "count"
            found.append((kind, f"{here}: {a.tokens[at : at + 4]}, alone {b.tokens[at : at + 4]} ({len(b.tokens)})"))
            continue
        for name in ("finish", "stop", "text"):
            x, y = getattr(a, name), getattr(b, name)
            if x != y:
                found.append(("text" if name == "text" else "finish", f"output {a.index}: {name} {x!r}, alone {y!r}"))
        found += _scores(a, b, near, tie is None)
        for point, x in (a.taps or {}).items():
            if reported := _values(x, (b.taps or {}).get(point), times * READ[dtype]):
                found.append(("taps", f"output {a.index}: {point} {reported}"))
    if not split and (got.prompt_logprobs is None) == (want.prompt_logprobs is None):
        for i, (x, y) in enumerate(zip(got.prompt_logprobs or (), want.prompt_logprobs or (), strict=False)):
            if x is not None and y is not None and (reported := _entry(x, y, near, tie is None)):
                found.append((scores_kind(reported), f"prompt token {i}: {reported}"))
                break
    return found


def differs(got: Answer, want: Answer, length: int | None, dtype: str, tie: Tie | None, times: float) -> bool:
    """Return whether two answers differ in a way that rounding may explain, in ``length`` tokens if given."""
    if length is None:
        return any(kind in STEPPED for kind, _ in differences(got, want, dtype, False, tie, times))
    pairs = zip(got.outputs, want.outputs, strict=False)
    return any(a.tokens[:length] != b.tokens[:length] for a, b in pairs)


def _values(x: np.ndarray, y: np.ndarray | None, near: float) -> str:
    """Describe the differences between values [positions, width] that were read."""
    if y is None or x.shape != y.shape:
        return f"has the shape {x.shape}, alone {None if y is None else y.shape}"
    off = ~(np.abs(x - y).max(1, initial=0) <= near * np.abs(y).max(initial=1))
    if not off.any():
        return ""
    rows, first = np.flatnonzero(off).tolist(), int(off.argmax())
    error = float(np.abs(x - y).max())
    return f"is {x[first][:6].tolist()} in row {first}, alone {y[first][:6].tolist()}; rows {rows} of {len(x)}: {error}"


def _first(a: list[int], b: list[int]) -> int | None:
    """Return the first index at which two lists differ."""
    if a == b:
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _beginnings(got: Answer, want: Answer, tie: Tie | None) -> list[tuple[str, str]]:
    found = []
    by_index = {o.index: o for o in want.outputs}
    for index, tokens in got.pieces.items():
        alone = by_index.get(index)
        if alone is None or tokens == alone.tokens[: len(tokens)]:
            continue
        at = _first(tokens, alone.tokens[: len(tokens)]) or 0
        if tie is not None and at < len(alone.tokens):
            continue  # the answer was not read to its end, so there are no logits to compare
        kind = "wrong token" if at < len(alone.tokens) else "count"
        found.append(
            (
                kind,
                f"left after {len(tokens)} tokens of output {index}: token {at} is "
                f"{tokens[at : at + 1]}, alone {alone.tokens[at : at + 1]}",
            )
        )
    return found


def _scores(a: Output, b: Output, near: float, same_ids: bool) -> list[tuple[str, str]]:
    for i, (x, y) in enumerate(zip(a.logprobs or (), b.logprobs or (), strict=False)):
        if reported := _entry(x, y, near, same_ids):
            return [(scores_kind(reported), f"output {a.index}, token {i}: {reported}")]
    for name in ("cumulative", "score"):
        x, y = getattr(a, name), getattr(b, name)
        if (x is None) != (y is None) or (x is not None and abs(x - y) > near * max(1, len(a.tokens))):
            return [("logprob", f"output {a.index}: {name} {x}, alone {y}")]
    return []


def scores_kind(reported: str) -> str:
    """Return the kind of a fault in log-probabilities; a different choice of equal ones is a kind of its own."""
    return "ties" if reported.startswith(TIES) else "logprob"


def _entry(x: list[Any], y: list[Any], near: float, same_ids: bool) -> str:
    """Describe the differences between two entries of log-probabilities."""
    a, b = {t: (v, r) for t, v, r in x}, {t: (v, r) for t, v, r in y}
    if same_ids and [t for t, *_ in x] != [t for t, *_ in y]:
        reported = f"best {[(t, round(v, 4)) for t, v, _ in x]}, alone {[(t, round(v, 4)) for t, v, _ in y]}"
        equal = {v for _, v, _ in x} == {v for _, v, _ in y} and all(a[t][0] == b[t][0] for t in a.keys() & b.keys())
        return f"{TIES} others: {reported}" if equal else reported
    for t in a.keys() & b.keys():
        (v, r), (w, s) = a[t], b[t]
        if v != w and not abs(v - w) <= near * max(1.0, abs(w)):
            return f"log-probability of {t} is {v}, alone {w}"
        if same_ids and r != s:
            return f"rank of {t} is {r}, alone {s}"
    return ""
