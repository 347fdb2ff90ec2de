"""A trace through an engine: each request when it comes, turn after turn.  The same for a real engine and a real clock
and for a simulated one, so that both are asked the same and measured alike."""

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
from minivllm.lab.traces.trace import Trace
from minivllm.runtime.hooks.figures import flat

HELD = 1e-3  # seconds to wait where a policy holds requests back and does not say until when
IDLE_TURNS = 100_000


class TraceClock(Protocol):
    def now(self) -> float: ...

    def until(self, when: float) -> None: ...


@dataclass(frozen=True)
class TraceOutcome:
    """Columns are [n], seconds from the first arrival; nan where a request was refused."""

    arrival: np.ndarray  # f64, when it was due
    first: np.ndarray  # f64, its first token
    finished: np.ndarray  # f64
    prompt: np.ndarray  # i32 tokens
    output: np.ndarray  # i32 tokens
    cached: np.ndarray  # i32 prompt tokens found in the cache
    steps: int
    preemptions: int
    evictions: int
    busy: float  # seconds of the device, where it is simulated
    took: float  # seconds of this run on this machine
    cpu: float  # and of its CPU time
    figures: Mapping[str, float] = field(default_factory=dict)  # of plug-ins, by "evictor.NAME"

    @property
    def served(self) -> np.ndarray:
        return np.isfinite(self.finished)


def drive(
    engine: Engine,
    trace: Trace,
    clock: TraceClock,
    tokens: Callable[[int], np.ndarray],
    told: Callable[[int], None] = lambda sent: None,
    known_lengths: bool = False,
    add_seconds: float = 0.0,
    leap: Callable[[float | None], int] = lambda until: 0,
    turn: Callable[[], bool] | None = None,
) -> TraceOutcome:
    """Until all are served.  ``tokens(i)``: the prompt of request i; ``told`` hears how many have come;
    ``known_lengths``: the scheduler may know how long each answer will be; ``add_seconds``: what a request costs the
    host when it comes, on a clock that does not run by itself; ``leap(until)`` may take several steps at once before
    each turn, up to the time of the next arrival; ``turn``: in place of the engine's own."""
    n = len(trace)
    first, finished = np.full(n, np.nan), np.full(n, np.nan)
    output, cached = np.zeros(n, np.int32), np.zeros(n, np.int32)
    base = clock.now()

    def ended(r: Request) -> None:
        i = int(r.id)
        if r.first_token is not None and r.finished is not None and r.sequences[0].finish_reason == "length":
            first[i], finished[i], cached[i] = r.first_token - base, r.finished - base, r.cached_tokens
            output[i] = outputs[i]

    plain = SamplingParams(ignore_eos=True, detokenize=False)
    due, outputs = (base + trace.arrival).tolist(), trace.output.tolist()
    start, start_cpu, before, sent, idle = perf_counter(), process_time(), _counted(engine), 0, 0
    while sent < n or engine.busy:
        while sent < n and due[sent] <= clock.now():
            expected = outputs[sent] if known_lengths else None
            params = plain.ending_after(outputs[sent])  # in a fifth of the time that all checks take
            params.seed, params.expected_tokens = sent, expected
            with suppress(RequestError):  # longer than the model, or the cache: nan
                engine.add(Request(str(sent), tokens(sent), params, due[sent], on_done=ended))
            sent += 1
            told(sent)
            if add_seconds:
                clock.until(clock.now() + add_seconds)
        if leap(due[sent] if sent < n else None):
            continue  # a request may have come meanwhile
        worked = engine.step() if turn is None else turn()
        if engine.dead:
            raise EngineDeadError(engine.dead)
        idle = 0 if worked else idle + 1
        if not worked:
            _wait(engine, clock, due[sent] if sent < n else None)
        if idle > IDLE_TURNS:
            what = f"{engine.planner.n_waiting} requests wait and nothing was planned in {IDLE_TURNS} turns"
            raise EngineDeadError(f"{what}: the scheduler {type(engine.planner.policy).__name__} holds them back")
    took, cpu = perf_counter() - start, process_time() - start_cpu
    columns = (trace.arrival, first, finished, trace.prompt, output, cached)
    steps, preemptions, evictions = (now - then for now, then in zip(_counted(engine), before, strict=True))
    return TraceOutcome(*columns, steps, preemptions, evictions, 0.0, took, cpu, flat(engine.stats()))


def _counted(engine: Engine) -> tuple[int, int, int]:
    """Steps, preemptions and evictions since the engine began: an engine may have served others before."""
    return engine.clock.count, engine.planner.preemptions, sum(p.evictions for p in engine.cache.pools)


def _wait(engine: Engine, clock: TraceClock, arrival: float | None) -> None:
    """Until a request comes or the policy lets go of those that it holds."""
    until = arrival
    if engine.busy:
        held = max(engine.planner.wake_at, clock.now() + HELD)
        until = held if arrival is None else min(held, arrival)
    if until is not None:
        clock.until(until)
