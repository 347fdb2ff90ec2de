"""Run a trace on an engine: add each request at its arrival, and run turn after turn.

The same loop runs a real engine with a real clock and a simulated one, so that both are measured alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Protocol

import numpy as np

from minivllm.core.engine.engine import Engine
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import EngineDeadError, RequestError
from minivllm.lab.replay.serve import IDLE_TURNS, describe_stall
from minivllm.lab.traces.trace import Trace
from minivllm.runtime.hooks.figures import flat

HELD = 1e-3  # seconds to wait if the scheduler holds requests back without a wake-up time


class TraceClock(Protocol):
    """A real or virtual clock."""

    def now(self) -> float:
        """Return the time in seconds."""

    def until(self, when: float) -> None:
        """Wait until a time, or advance to it."""


@dataclass(frozen=True)
class TraceOutcome:
    """The results of a trace.  Columns are [n requests]; times are seconds from the first arrival, nan if refused."""

    arrival: np.ndarray  # f64 arrival times in the trace, in seconds
    first: np.ndarray  # f64 times of the first token, in seconds
    finished: np.ndarray  # f64
    prompt: np.ndarray  # i32 tokens
    output: np.ndarray  # i32 tokens
    cached: np.ndarray  # i32 prompt tokens found in the cache
    steps: int
    preemptions: int
    evictions: int
    busy: float  # seconds of computation on the simulated device; 0 for a real engine
    took: float  # seconds of this run on this machine
    cpu: float  # CPU seconds of this run
    figures: Mapping[str, float] = field(default_factory=dict)  # counters of plug-ins, by "evictor.NAME"

    @property
    def served(self) -> np.ndarray:
        """Return which requests have finished, bool [n]."""
        return np.isfinite(self.finished)


def drive(
    engine: Engine,
    trace: Trace,
    clock: TraceClock,
    tokens: Callable[[int], np.ndarray],
    on_sent: Callable[[int], None] = lambda sent: None,
    known_lengths: bool = False,
    add_seconds: float = 0.0,
    leap: Callable[[float | None], int] = lambda until: 0,
    turn: Callable[[], bool] | None = None,
) -> TraceOutcome:
    """Run a trace until all requests are served, and return its results.

    ``tokens(i)`` returns the prompt of request i.  ``on_sent`` receives the number of requests that have arrived.
    ``known_lengths`` gives the scheduler the length of each answer.  With a predictor, policies receive its predictions
    and the limit of the model, and only the predictor may read the length of the trace.  ``add_seconds`` is the host's
    time to add a request, by which a virtual clock is advanced.  ``leap(until)`` runs before each turn.  It may take
    several steps up to the time of the next arrival, and returns their number.  ``turn`` replaces the engine's own
    turn.  Raise EngineDeadError if the engine fails, or the scheduler plans nothing for too long.
    """
    n = len(trace)
    base = clock.now()
    record = _Record(trace, base)
    due = (base + trace.arrival).tolist()
    before = _counts(engine)
    sent = 0
    idle = 0
    start = perf_counter()
    start_cpu = process_time()
    while sent < n or engine.busy:
        while sent < n and due[sent] <= clock.now():
            request = record.request(sent, tokens(sent), due[sent], known_lengths)
            if engine.predictions is not None:
                request.truth = record.lengths[sent]
                request.shown_out = max(engine.wiring.max_model_len - len(request.prompt), 1)
            with suppress(RequestError):  # a request too long for the model or the cache keeps nan
                engine.add(request)
            sent += 1
            on_sent(sent)
            if add_seconds:
                clock.until(clock.now() + add_seconds)
        next_arrival = due[sent] if sent < n else None
        if leap(next_arrival):
            continue  # the clock has moved, so a request may have arrived
        worked = engine.step() if turn is None else turn()
        if engine.dead:
            raise EngineDeadError(engine.dead)
        idle = 0 if worked else idle + 1
        if not worked:
            _wait(engine, clock, next_arrival)
        if idle > IDLE_TURNS:
            raise EngineDeadError(describe_stall(engine))
    took = perf_counter() - start
    cpu = process_time() - start_cpu
    columns = (trace.arrival, record.first, record.finished, trace.prompt, record.output, record.cached)
    steps, preemptions, evictions = (now - then for now, then in zip(_counts(engine), before, strict=True))
    return TraceOutcome(*columns, steps, preemptions, evictions, 0.0, took, cpu, flat(engine.stats()))


class _Record:
    """The requests of a trace and the columns of their results; ``base`` is the time of the first arrival."""

    def __init__(self, trace: Trace, base: float) -> None:
        n = len(trace)
        self.trace = trace
        self.base = base
        self.lengths = trace.output.tolist()
        self.first = np.full(n, np.nan)
        self.finished = np.full(n, np.nan)
        self.output = np.zeros(n, np.int32)
        self.cached = np.zeros(n, np.int32)
        self.params = SamplingParams(ignore_eos=True, detokenize=False)

    def request(self, i: int, prompt: np.ndarray, due: float, known_length: bool) -> Request:
        """Return request i of the trace, with the length of its answer for the scheduler if ``known_length``."""
        # copies checked parameters, which takes a fifth of the time of making and checking new ones
        params = self.params.ending_after(self.lengths[i])
        params.seed = i
        params.session = self.trace.session_of(i)
        params.expected_tokens = self.lengths[i] if known_length else None
        return Request(str(i), prompt, params, due, on_done=self.end)

    def end(self, r: Request) -> None:
        """Store the results of a request that has generated its whole answer."""
        if r.first_token is None or r.finished is None or r.sequences[0].finish_reason != "length":
            return
        i = int(r.id)
        self.first[i] = r.first_token - self.base
        self.finished[i] = r.finished - self.base
        self.cached[i] = r.cached_tokens
        self.output[i] = self.lengths[i]


def _counts(engine: Engine) -> tuple[int, int, int]:
    """Return the numbers of steps, preemptions and evictions of the engine since its start."""
    return engine.clock.count, engine.planner.preemptions, sum(p.evictions for p in engine.cache.pools)


def _wait(engine: Engine, clock: TraceClock, arrival: float | None) -> None:
    """Wait until the next arrival, or until the scheduler releases the requests that it holds back."""
    until = arrival
    if engine.busy:
        held = max(engine.planner.wake_at, clock.now() + HELD)
        until = held if arrival is None else min(held, arrival)
    if until is not None:
        clock.until(until)
