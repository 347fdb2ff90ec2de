"""Measure what steps of a configuration cost on this machine.

prefill   prompts of many lengths, alone and several in a step
decode    1, 2, 4 ... rows with short and long contexts
mixed     prompts of few and of many tokens beside any number of rows that decode, and decodes right behind them
wake      prompts behind pauses, in which caches become cold and threads sleep
traffic   requests that come and go at random: what a server sees, at several loads
check     traffic and mixed with other lengths from another seed, which the fit does not see

The time of a step is that from turn to turn of the real engine, and so has the host's share in it.
"""

from __future__ import annotations

import datetime
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np

from minivllm.core.engine.engine import Engine
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import StepPlan
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.plugins.executor.costs import PAUSE, CostTable, StepCounter

from .fit import MeasuredStep, errors, fit

SHARES = {"prefill": 0.1, "decode": 0.2, "mixed": 0.25, "wake": 0.15, "traffic": 0.2, "check": 0.1}  # of the time
WARM = 0.1  # of the time, before anything counts
PAUSES = (2 * PAUSE, 0.1)  # seconds
DECODES = 24  # steps of each point
LOADS = (0.1, 0.3, 0.6, 1.0)  # of the rows
LEAST_STEPS = 4  # of each load that are measured
BURSTS, BEHIND = 4, 5  # of prompts beside the same rows; decodes behind each, fewer than so many
REFILL = 0.15  # chance in a step that a free row gets a request: what ended together is not replaced together


@dataclass
class Point:
    """Requests that enter together."""

    prompts: list[int]  # tokens
    outputs: list[int]


class Calibrator:
    """Drives an engine and keeps the time of each step, by ``timer`` (seconds)."""

    def __init__(self, engine: Engine, seed: int = 0, timer: Callable[[], float] = perf_counter) -> None:
        self.engine, self.rng, self.timer = engine, np.random.default_rng(seed), timer
        self.steps: list[MeasuredStep] = []
        self.adds: list[float] = []
        self._plans: deque[StepPlan] = deque()
        self._paused = False  # before the next step
        self._woken: StepPlan | None = None  # the last that came behind a pause
        self._counter = StepCounter()  # of steps that came back
        # rows that entered, prompt tokens that were planned, and seconds, since a step came back
        self._joins, self._planned, self._carried = 0, 0, 0.0
        self._submit = engine.executor.submit
        self._number = self._ended = 0
        w = engine.wiring
        self.rows, self.most = w.max_num_seqs, w.max_num_batched_tokens
        # a row that grows must not be preempted here: what it is charged would be another's
        self.room = (engine.capacity.blocks[0] - 1) * w.block * 9 // 10
        self.longest = min(w.max_model_len - DECODES - 2, self.room)
        if self.longest < 16:
            raise ConfigError(
                f"max_model_len={w.max_model_len}: too short to calibrate; want at least {16 + DECODES + 2}"
            )

    def __enter__(self) -> Calibrator:
        def submit(plan: StepPlan) -> None:
            self._plans.append(plan)
            self._joins += 0 if plan.delta.join is None else len(plan.delta.join.slot)
            self._planned += int(plan.q_len[plan.q_len > 1].sum())
            if self._paused:
                self._paused, self._woken = False, plan
            self._submit(plan)

        self.engine.executor.submit = submit  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine.executor.submit

    def add(self, prompt: int, output: int) -> None:
        self._number += 1
        engine = self.engine
        tokens = self.rng.integers(0, engine.capacity.vocab_size, prompt).astype(np.int32)
        params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False)
        begun = self.timer()
        engine.add(Request(f"calibrate-{self._number}", tokens, params, monotonic(), on_done=self._done))
        self.adds.append(self.timer() - begun)

    def _done(self, request: Request) -> None:
        self._ended += 1

    def turn(self, phase: str) -> None:
        """One turn of the engine's loop.  With several steps in flight it begins one and waits for the oldest, whose
        time it takes: that of turns in which none came back is the next one's, and so is what the host had to do in
        them for rows that entered and prompts that it planned."""
        begun, self._ended = self.timer(), 0
        if not self.engine.step():
            if self.engine.dead:
                raise EngineDeadError(self.engine.dead)
            return
        self._carried += self.timer() - begun
        back = [self._plans.popleft() for _ in range(len(self._plans) - len(self.engine.in_flight))]
        counts = [self._counter.count(plan, self._ended, plan is self._woken) for plan in back]
        if len(back) == 1 and phase:  # of several nobody knows whose time it was
            counted = counts[0]._replace(joins=self._joins, planned=self._planned)
            self.steps.append(MeasuredStep(counted, self._carried, phase))
        if back:
            self._joins, self._planned, self._carried = 0, 0, 0.0

    def drain(self, phase: str) -> None:
        while self.engine.busy:
            self.turn(phase)

    # ---- phases --------------------------------------------------------------------------------------------------

    def run(self, phase: str, seconds: float, points: Iterator[Point]) -> None:
        """Points until the time is over; one that has begun is ended."""
        until = self.timer() + seconds
        for point in points:
            for prompt, output in zip(point.prompts, point.outputs, strict=True):
                self.add(prompt, output)
            self.drain(phase)
            if self.timer() > until:
                return

    def prefills(self) -> Iterator[Point]:
        """One token is drawn, so nothing but prompts is computed."""
        while True:
            for _ in range(8):
                length = self._length(2, self.longest)
                yield Point([length], [1])
                several = min(self.rows, 4, max(1, self.room // length))
                yield Point([max(2, length // several)] * several, [1] * several)

    def decodes(self) -> Iterator[Point]:
        while True:
            for rows in (*_powers(1, self.rows),):
                for context in (16, 256, self.longest):
                    length = min(context, self.longest, max(16, self.room // rows - DECODES))
                    if rows * length <= self.room and rows * length <= 16 * self.most:
                        yield Point([length] * rows, [DECODES] * rows)

    def mixed(self, phase: str, seconds: float) -> None:
        """Prompts beside rows that decode; what has begun is ended."""
        until = self.timer() + seconds
        while True:
            rows = int(self.rng.integers(0, self.rows))
            share = self.room // (rows + 1)
            self._fill(phase, rows, share)
            for _ in range(BURSTS):
                self._burst(phase, self.rows - rows, min(share, self.most * 5 // 4))
                for _ in range(int(self.rng.integers(0, BEHIND))):
                    self.turn(phase)
            self._clear()
            if self.timer() > until:
                return

    def _fill(self, phase: str, rows: int, share: int) -> None:
        """Rows that decode; each may hold ``share`` tokens, and none ends before all have begun and been measured."""
        top = max(8, min(self.longest, share - DECODES - self.room // self.most))
        low = int(self.rng.choice([4, top // 2]))  # a cache that is full counts as much as one that is not
        prompts = [self._length(low, top) for _ in range(rows)]
        output = DECODES + sum(prompts) // self.most + 1
        for prompt in prompts:
            self.add(prompt, min(output, self.longest + DECODES - prompt))
        self._begin_all(phase)

    def _burst(self, phase: str, free: int, most: int) -> None:
        """Up to three prompts at once, of ``most`` tokens together."""
        several, tokens = int(self.rng.integers(1, min(3, free) + 1)), self._length(4, max(5, most))
        for _ in range(several):
            self.add(min(self.longest, max(2, tokens // several)), 1)
        self._begin_all(phase)

    def _begin_all(self, phase: str) -> None:
        while self.engine.planner.n_waiting:
            self.turn(phase)

    def _clear(self) -> None:
        for name in list(self.engine.requests):
            self.engine.abort(name)
        self.drain("")

    def wake(self, phase: str, seconds: float) -> None:
        """One prompt behind each pause, and two decodes behind the prompt."""
        until, top = self.timer() + seconds, min(self.longest, self.most)
        while self.timer() < until:
            sleep(float(self.rng.uniform(*PAUSES)))
            self._paused = True
            self.add(self._length(4, top), 3)
            self.drain(phase)

    def traffic(self, phase: str, seconds: float) -> None:
        """So many rows are kept busy, for some steps however short the time is; lengths are log-uniform, where
        there is room for all."""
        share = seconds / len(LOADS)
        top = min(self.longest // 2, self.room // 2)
        for load in LOADS:
            until, rows = self.timer() + share, max(1, round(self.rows * load))
            least = len(self.steps) + (LEAST_STEPS if phase else 0)
            while self.timer() < until or len(self.steps) < least:
                if len(self.engine.requests) < rows and self.rng.random() < REFILL:
                    prompt, output = self._length(4, top), self._length(2, max(4, top // 2))
                    if self._promised() + prompt + output <= self.room:
                        self.add(prompt, output)
                self.turn(phase)
            self._clear()

    def _promised(self) -> int:
        """Tokens that the requests there will have at their ends."""
        return sum(len(r.prompt) + (r.params.max_tokens or 0) for r in self.engine.requests.values())

    def _length(self, low: int, high: int) -> int:
        return int(np.exp(self.rng.uniform(np.log(low), np.log(max(high, low + 1)))))


def _powers(low: int, high: int) -> list[int]:
    found = [low]
    while found[-1] * 2 < high:
        found.append(found[-1] * 2)
    return [*found, high] if high > found[-1] else found


def _halves(low: int, high: int) -> list[int]:
    """Powers of two, and what is halfway between them."""
    powers = _powers(low, high)
    return sorted({*powers, *((a + b) // 2 for a, b in itertools.pairwise(powers))})


def calibrate(
    engine: Engine,
    about: dict[str, Any],
    seconds: float = 60.0,
    told: Callable[[str], None] = lambda _: None,
    timer: Callable[[], float] = perf_counter,
) -> CostTable:
    """``about``: what the table says of itself; ``timer``: by what steps are measured, and ``seconds``.  ConfigError
    where there is nothing to measure by."""
    if engine.speculation is not None:
        raise ConfigError("steps with drafts have no table of costs; set drafter=none")
    with Calibrator(engine, timer=timer) as c:
        told("warming up")
        c.run("", WARM * seconds / 2, c.decodes())
        c.traffic("", WARM * seconds / 2)
        c.adds.clear()
        for phase in SHARES:
            spend = SHARES[phase] * seconds * (1 - WARM)
            told(f"{phase}, {spend:.0f} s")
            c.rng = np.random.default_rng(list(SHARES).index(phase))
            _measure(c, phase, spend)
        seen = [s for s in c.steps if s.phase != "check"]
        empty = [name for name in SHARES if not any(s.phase == name for s in c.steps)]
        if empty or not c.adds:
            raise ConfigError(f"--seconds {seconds:g}: no step of {', '.join(empty) or 'any request'}; raise --seconds")
        table = fit(seen, _halves(1, c.rows), [1, *_halves(8, c.most)])
        adds = float(np.median(c.adds))
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    about, found = {"measured": when, **about}, errors(table, c.steps)
    return replace(table, add=adds, engine=_sizes(engine), about=about, fit=found)


def _measure(c: Calibrator, phase: str, seconds: float) -> None:
    if phase in ("prefill", "decode"):
        c.run(phase, seconds, c.prefills() if phase == "prefill" else c.decodes())
    elif phase == "check":
        c.mixed(phase, seconds / 2)
        c.traffic(phase, seconds / 2)
    else:
        {"mixed": c.mixed, "wake": c.wake, "traffic": c.traffic}[phase](phase, seconds)


def _sizes(engine: Engine) -> dict[str, Any]:
    w, cap = engine.wiring, engine.capacity
    return {
        "kvcache_block_size": w.block,
        "num_kvcache_blocks": cap.blocks[0] - 1,
        "max_model_len": w.max_model_len,
        "max_num_seqs": w.max_num_seqs,
        "max_num_batched_tokens": w.max_num_batched_tokens,
        "depth": cap.depth,
        "windows": list(engine.cache.windows),
    }
