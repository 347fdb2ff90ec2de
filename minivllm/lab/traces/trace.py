"""A trace: when requests come, how long they are, and which prefixes they share.

Content is kept as runs: a prompt is a list of (content number, tokens), and equal numbers at equal places are equal
text.  What the answers hold is a run too, so that the next turn of a conversation can repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minivllm.errors import ConfigError

MIX = 0x9E3779B97F4A7C15  # of ``tokens_within``


@dataclass(frozen=True)
class Trace:
    """n requests in order of arrival.  Content numbers are below 2**31, so they serve as token ids.

    The prompt of request i is ``runs[first[i]:first[i + 1]]``; its tokens are as many as ``prompt[i]`` says.
    ``unit``: tokens of a run if every run is one block of the trace's own cache (the last may be shorter), else 0.
    """

    name: str
    arrival: np.ndarray  # f64 [n] seconds since the first
    prompt: np.ndarray  # i32 [n] tokens
    output: np.ndarray  # i32 [n] tokens
    answer: np.ndarray  # i32 [n] content number of the answer
    first: np.ndarray  # i64 [n + 1]
    runs: np.ndarray  # i32 [total, 2] content number, tokens
    unit: int = 0

    def __len__(self) -> int:
        return len(self.arrival)

    def part(self, start: int, stop: int) -> Trace:
        """Requests [start, stop); the runs are shared."""
        columns = {name: getattr(self, name)[start:stop] for name in ("arrival", "prompt", "output", "answer")}
        columns["arrival"] = columns["arrival"] - (columns["arrival"][0] if stop > start else 0.0)
        return replace(self, **columns, first=self.first[start : stop + 1])

    def tokens(self, i: int) -> np.ndarray:
        """The prompt's token ids i32."""
        runs = self.runs[self.first[i] : self.first[i + 1]]
        return np.repeat(runs[:, 0], runs[:, 1])[: self.prompt[i]]

    def keys(self, i: int, block: int, root: int = 1) -> list[int]:
        """The keys of the prompt's full blocks: equal keys are equal prefixes.  With the key of an engine's root as
        ``root`` (see ``BlockPool.root``) they are the engine's."""
        from minivllm.core.engine.blocks import chain_key

        raw, step, key, keys = self.tokens(i).tobytes(), 4 * block, root, []
        for at in range(0, len(raw) - step + 1, step):
            key = chain_key(key, raw[at : at + step])
            keys.append(key)
        return keys

    def chain(self, i: int, block: int) -> list[int]:
        """The prompt's blocks as the trace itself counts them: if its unit is ``block`` its own ids, and the last block
        may be partial; otherwise ``keys``."""
        if block != self.unit:
            return self.keys(i, block)
        return [spread(x) for x in self.runs[self.first[i] : self.first[i + 1], 0].tolist()]


def spread(number: int) -> int:
    """A key that looks like a hash, never 0 (Steele et al., "Fast splittable pseudorandom number generators", 2014)."""
    x = (number + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return (x ^ x >> 31) or 1


def tokens_within(tokens: np.ndarray, width: int) -> np.ndarray:
    """Return i32 token ids below ``width`` for the content numbers of a prompt.

    Equal beginnings stay equal.  Within a run of one content the ids vary with their position, as those of a text do.
    """
    place = np.arange(len(tokens), dtype=np.uint64)
    x = (tokens.astype(np.uint64) << np.uint64(20)) + place + np.uint64(1)
    x = x * np.uint64(MIX)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((x >> np.uint64(33)) % np.uint64(width)).astype(np.int32)


def build(name: str, arrival: Any, prompt: Any, output: Any, answer: Any, runs: Sequence[Any], unit: int = 0) -> Trace:
    """Columns from lists; ``runs`` has one list of (content, tokens) a request.  Sorted by arrival, which is counted
    from the first; ConfigError for lengths that no request can have."""
    order = np.argsort(np.asarray(arrival, np.float64), kind="stable")
    flat = [run for i in order.tolist() for run in runs[i]]
    counts = np.array([len(runs[i]) for i in order.tolist()], np.int64)
    arrival = np.asarray(arrival, np.float64)[order]
    trace = Trace(
        name,
        arrival - (arrival[0] if len(arrival) else 0.0),
        np.asarray(prompt, np.int32)[order],
        np.asarray(output, np.int32)[order],
        np.asarray(answer, np.int32)[order],
        np.concatenate(([0], np.cumsum(counts))),
        np.array(flat, np.int32).reshape(-1, 2),
        unit,
    )
    if not len(trace):
        raise ConfigError(f"{name}: no request in it")
    short = np.flatnonzero((trace.prompt < 1) | (trace.output < 1))
    if len(short):
        i = int(short[0])
        what = f"{trace.prompt[i]} prompt and {trace.output[i]} output tokens"
        raise ConfigError(f"{name}: request {i} (by arrival) has {what}; want at least one of each")
    return trace
