"""A trace: the arrival times and lengths of requests, and the prefixes that they share.

A prompt is stored as a list of runs.  A run is (content number, number of tokens).  Equal content numbers at the same
place mean equal text.  The answer of a request has a content number too, so that the next turn of a conversation can
repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minivllm.core.interfaces.session import Session
from minivllm.errors import ConfigError

COLUMNS = ("arrival", "prompt", "output", "answer", "session", "next_s")
# 2**64 divided by the golden ratio, an odd factor of the hashes ``mix_bits`` and ``tokens_within``
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Trace:
    """n requests in order of arrival.

    A run is (content number, number of tokens).  Equal content numbers stand for equal tokens.  Content numbers of runs
    and of answers are below 2**31, so that they can serve as token ids.
    The prompt of request i is the first ``prompt[i]`` tokens of ``runs[first[i]:first[i + 1]]``.
    ``unit`` is the number of tokens of a run if every run is a block of the traced system's cache, else 0.  The last
    run of a prompt may then be shorter.
    """

    name: str
    arrival: np.ndarray  # f64 [n] seconds since the first arrival
    prompt: np.ndarray  # i32 [n] tokens
    output: np.ndarray  # i32 [n] tokens
    answer: np.ndarray  # i32 [n] content number of the answer
    first: np.ndarray  # i64 [n + 1] index in ``runs`` of the first run of each request, and the number of runs
    runs: np.ndarray  # i32 [total, 2] content number and number of tokens of each run
    unit: int = 0
    # Both columns are empty for a trace without sessions.
    # i32 [n] number of the session, -1 means none
    session: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    # f64 [n] seconds to the next request of the session that a client expects
    next_s: np.ndarray = field(default_factory=lambda: np.empty(0))

    def __len__(self) -> int:
        return len(self.arrival)

    def part(self, start: int, stop: int) -> Trace:
        """Return requests [start, stop) as a trace that begins at time 0 and shares ``runs`` with this one."""
        columns = {name: getattr(self, name)[start:stop] for name in COLUMNS}
        if stop > start:
            columns["arrival"] = columns["arrival"] - columns["arrival"][0]
        return replace(self, **columns, first=self.first[start : stop + 1])

    def session_of(self, i: int) -> Session | None:
        """Return the id of request i's session and the time that the client expects to its next request, or None."""
        if not len(self.session):
            return None
        number = int(self.session[i])
        if number < 0:
            return None
        expected = float(self.next_s[i])
        return Session(str(number), next_s=expected)

    def tokens(self, i: int) -> np.ndarray:
        """Return the content number of each token of request i's prompt, i32 [tokens]."""
        runs = self._runs_of(i)
        return np.repeat(runs[:, 0], runs[:, 1])[: self.prompt[i]]

    def _runs_of(self, i: int) -> np.ndarray:
        """Return the runs of request i's prompt, i32 [runs, 2]: the content number and the number of tokens of each."""
        return self.runs[self.first[i] : self.first[i + 1]]

    def keys(self, i: int, block: int, root: int = 1) -> list[int]:
        """Return the keys of the full blocks of request i's prompt; ``block`` is the number of tokens of a block.

        Equal keys mean equal prefixes.  With the root key of an engine's cache as ``root`` (``BlockPool.root``) they
        are the keys that this engine computes.
        """
        from minivllm.core.engine.blocks import chain_key

        raw = self.tokens(i).tobytes()
        width = 4 * block  # bytes of a block of i32
        keys = []
        key = root
        for start in range(0, len(raw) - width + 1, width):
            key = chain_key(key, raw[start : start + width])
            keys.append(key)
        return keys

    def chain(self, i: int, block: int) -> list[int]:
        """Return the keys of request i's prompt in the blocks of the traced system.

        If ``block`` is the trace's unit, the keys come from the content numbers and the last block may be partial.
        Otherwise they are ``keys``.
        """
        if block != self.unit:
            return self.keys(i, block)
        return [mix_bits(number) for number in self._runs_of(i)[:, 0].tolist()]


def mix_bits(number: int) -> int:
    """Return a 64-bit key, never 0, that looks random (Steele et al., "Fast splittable pseudorandom number generators",
    2014)."""
    x = (number + 1) * GOLDEN % (1 << 64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return (x ^ x >> 31) or 1


def tokens_within(tokens: np.ndarray, width: int) -> np.ndarray:
    """Return i32 token ids below ``width`` for the content numbers of a prompt.

    Equal prefixes stay equal.  Within a run the ids vary with their position, as the ids of a text do.
    """
    place = np.arange(len(tokens), dtype=np.uint64)
    x = (tokens.astype(np.uint64) << np.uint64(20)) + place + np.uint64(1)
    x = x * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((x >> np.uint64(33)) % np.uint64(width)).astype(np.int32)


def build(
    name: str,
    arrival: Any,
    prompt: Any,
    output: Any,
    answer: Any,
    runs: Sequence[Any],
    session: Any = (),
    next_s: Any = (),
    *,
    unit: int = 0,
) -> Trace:
    """Return a trace, sorted by arrival, from one list per column.

    ``runs`` holds a list of (content number, tokens) per request; ``session`` and ``next_s`` are empty without
    sessions.  The first request arrives at time 0.  Raise
    ConfigError for a trace without requests, or a request without a prompt token or an output token.
    """
    seconds = np.asarray(arrival, np.float64)
    if not len(seconds):
        raise ConfigError(f"{name}: the trace has no request")
    order = np.argsort(seconds, kind="stable")
    prompts, outputs, answers = (np.asarray(column, np.int32)[order] for column in (prompt, output, answer))
    short = np.flatnonzero((prompts < 1) | (outputs < 1))
    if len(short):
        i = int(short[0])
        lengths = f"{prompts[i]} prompt and {outputs[i]} output tokens"
        raise ConfigError(f"{name}: request {i} (by arrival) has {lengths}; expected at least one of each")
    ordered = [runs[i] for i in order.tolist()]
    first = np.cumsum([0, *map(len, ordered)], dtype=np.int64)
    flat = np.array([run for prompt_runs in ordered for run in prompt_runs], np.int32)
    seconds = seconds[order]
    seconds -= seconds[0]
    sessions = np.asarray(session, np.int32)
    pauses = np.asarray(next_s, np.float64)
    if len(sessions):
        sessions = sessions[order]
        pauses = pauses[order]
    return Trace(name, seconds, prompts, outputs, answers, first, flat.reshape(-1, 2), unit, sessions, pauses)
