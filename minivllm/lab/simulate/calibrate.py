"""Measure the time of steps of a configuration on this machine, in these phases::

    prefill   prompts of many lengths, alone and several in a step
    decode    1, 2, 4 ... rows with short and long contexts
    mixed     short and long prompts in a step with any number of decoding rows, and decode steps right after them
    wake      prompts after pauses, during which caches become cold and threads sleep
    traffic   requests that arrive and end at random, as on a server, at several loads
    check     traffic and mixed with another seed, and so other lengths; the fit does not use these steps

The time of a step is measured from one turn of the real engine to the next, so it includes the host's work.  A phase
ends when its time is over: the running step is finished and the remaining requests are aborted.  Only a phase without a
measured step continues, until it has one.
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
from minivllm.core.engine.request import WAITING, Request
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import StepPlan
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.frontend.llm import uninterrupted
from minivllm.plugins.executor.costs import PAUSE, CostTable, StepCounter

from .fit import MeasuredStep, errors, fit

SHARES = {"prefill": 0.1, "decode": 0.2, "mixed": 0.25, "wake": 0.15, "traffic": 0.2, "check": 0.1}  # of the time
WARM = 0.1  # share of the time for warming up, which is not measured
PAUSES = (2 * PAUSE, 0.1)  # shortest and longest pause, in seconds
DECODES = 24  # number of decode steps that are measured for each ``Point``
LOADS = (0.1, 0.3, 0.6, 1.0)  # busy share of the rows
BURSTS = 4  # number of bursts of prompts that are added to the same decoding rows
BEHIND = 5  # fewer decode steps than this follow each burst
REFILL = 0.15  # probability per step that a free row gets a new request, so that rows do not start together


@dataclass
class Point:
    """Requests that are added together: the lengths in tokens of their prompts and of their answers."""

    prompts: list[int]  # tokens
    outputs: list[int]


class Calibrator:
    """Runs an engine and measures each step with ``timer`` (seconds).

    As a context it intercepts the plans that the engine submits.  Raise ConfigError if the engine's context is too
    short.
    """

    def __init__(self, engine: Engine, seed: int = 0, timer: Callable[[], float] = perf_counter) -> None:
        self.engine = engine
        self.rng = np.random.default_rng(seed)
        self.timer = timer
        self.steps: list[MeasuredStep] = []
        self.adds: list[float] = []  # seconds of each call that adds a request
        self._plans: deque[StepPlan] = deque()  # submitted steps without a result
        self._paused = False  # whether the next step follows a pause
        self._woken: StepPlan | None = None  # the latest plan after a pause
        self._counter = StepCounter()
        # rows that joined, planned prompt tokens and seconds of turns since the latest result
        self._joins = 0
        self._planned = 0
        self._carried = 0.0
        self._submit = engine.executor.submit
        self._number = 0  # number of the latest request
        self._ended = 0  # requests that ended in the current turn
        self._until = np.inf  # end of the current phase, on ``timer``
        self._least = 0  # number of measured steps before which the phase does not end
        w = engine.wiring
        self.rows = w.max_num_seqs
        self.most = w.max_num_batched_tokens
        # KV tokens that requests may use; a tenth stays free, because the time of a preemption would be attributed to
        # another step
        blocks = engine.capacity.blocks[0] - 1
        self.room = blocks * w.block * 9 // 10
        self.longest = min(w.max_model_len - DECODES - 2, self.room)
        if self.longest < 16:
            shortest = 16 + DECODES + 2
            raise ConfigError(f"max_model_len={w.max_model_len}: too short to calibrate; expected at least {shortest}")

    def __enter__(self) -> Calibrator:
        def submit(plan: StepPlan) -> None:
            self._plans.append(plan)
            join = plan.delta.join
            if join is not None:
                self._joins += len(join.slot)
            self._planned += int(plan.q_len[plan.q_len > 1].sum())
            if self._paused:
                self._paused = False
                self._woken = plan
            self._submit(plan)

        self.engine.executor.submit = submit  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine.executor.submit

    def add(self, prompt: int, output: int) -> None:
        """Add a request with a random prompt and measure the call; both arguments are tokens."""
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
        """Run a turn of the engine's loop, and record the step whose result arrives, unless ``phase`` is "".

        With several steps in flight a turn submits a step and waits for the oldest one.  The time of all turns since
        the latest result, with their joins and planned prompt tokens, is attributed to this step.  Raise
        EngineDeadError if the engine has failed.
        """
        self._ended = 0
        with uninterrupted():  # an interrupted step would end the engine
            begun = self.timer()
            worked = self.engine.step()
            took = self.timer() - begun
        if not worked:
            if self.engine.dead:
                raise EngineDeadError(self.engine.dead)
            return
        self._carried += took
        arrived = len(self._plans) - len(self.engine.in_flight)
        back = [self._plans.popleft() for _ in range(arrived)]
        counts = [self._counter.count(plan, self._ended, plan is self._woken) for plan in back]
        if len(back) == 1 and phase:  # the time of several steps cannot be divided
            counted = counts[0]._replace(joins=self._joins, planned=self._planned)
            self.steps.append(MeasuredStep(counted, self._carried, phase))
        if back:
            self._joins = 0
            self._planned = 0
            self._carried = 0.0

    def drain(self, phase: str) -> None:
        """Run turns until no request is left, or until the current phase is over."""
        while self.engine.busy and not self.over:
            self.turn(phase)

    def begin(self, phase: str, seconds: float) -> None:
        """Begin a phase that lasts some seconds.  A phase that measures steps has at least one."""
        self._until = self.timer() + seconds
        self._least = len(self.steps) + (1 if phase else 0)

    @property
    def over(self) -> bool:
        """Return whether the current phase is over."""
        if len(self.steps) < self._least:
            return False
        return self.timer() > self._until

    # ---- phases --------------------------------------------------------------------------------------------------

    def run(self, phase: str, seconds: float, points: Iterator[Point]) -> None:
        """Run the groups of requests ``points``, one after another, until some seconds have passed."""
        self.begin(phase, seconds)
        for point in points:
            sizes = zip(point.prompts, point.outputs, strict=True)
            for prompt, output in sizes:
                self.add(prompt, output)
            self.drain(phase)
            if self.over:
                return self._clear()

    def prefills(self) -> Iterator[Point]:
        """Yield prompts whose requests generate a single token, so that all computed tokens are prompt tokens."""
        while True:
            for _ in range(8):
                length = self._length(2, self.longest)
                yield Point([length], [1])
                several = min(self.rows, 4, max(1, self.room // length))
                yield Point([max(2, length // several)] * several, [1] * several)

    def decodes(self) -> Iterator[Point]:
        """Yield numbers of rows that decode, with short and long contexts."""
        while True:
            for rows in _powers(1, self.rows):
                for context in (16, 256, self.longest):
                    length = min(context, self.longest, max(16, self.room // rows - DECODES))
                    if rows * length <= self.room and rows * length <= 16 * self.most:
                        yield Point([length] * rows, [DECODES] * rows)

    def mixed(self, phase: str, seconds: float) -> None:
        """Measure prompts in steps with decoding rows for some seconds."""
        self.begin(phase, seconds)
        while not self.over:
            rows = int(self.rng.integers(0, self.rows))
            share = self.room // (rows + 1)
            self._fill(phase, rows, share)
            most = min(share, self.most * 5 // 4)
            for _ in range(BURSTS):
                self._burst(phase, self.rows - rows, most)
                behind = int(self.rng.integers(0, BEHIND))
                for _ in range(behind):
                    if self.over:
                        break
                    self.turn(phase)
            self._clear()

    def _fill(self, phase: str, rows: int, share: int) -> None:
        """Start rows that decode, each with at most ``share`` tokens, and run until all prompts are computed.

        Their outputs are long enough for the measurements that follow.  Rows that have not started after half of the
        phase's remaining time are aborted, so that time is left for bursts.
        """
        steps = DECODES + self.room // self.most
        top = max(8, min(self.longest, share - steps))
        low = int(self.rng.choice([4, top // 2]))  # so that a full cache is measured as often as one with short rows
        prompts = [self._length(low, top) for _ in range(rows)]
        output = DECODES + sum(prompts) // self.most + 1
        for prompt in prompts:
            self.add(prompt, min(output, self.longest + DECODES - prompt))
        now = self.timer()
        remaining = self._until - now
        self._begin_all(phase, now + remaining / 2)
        for name, request in list(self.engine.requests.items()):
            if request.sequences[0].status == WAITING:
                self.engine.abort(name)

    def _burst(self, phase: str, free: int, most: int) -> None:
        """Add up to three prompts, at most ``free``, with at most about ``most`` tokens together, and compute them."""
        several = int(self.rng.integers(1, min(3, free) + 1))
        tokens = self._length(4, max(5, most))
        for _ in range(several):
            self.add(min(self.longest, max(2, tokens // several)), 1)
        self._begin_all(phase)

    def _begin_all(self, phase: str, until: float = np.inf) -> None:
        """Run turns of the engine's loop until no request waits to be admitted, or until a time."""
        while self.engine.planner.n_waiting:
            if self.over or self.timer() > until:
                return
            self.turn(phase)

    def _clear(self) -> None:
        """Abort all requests, and wait for the steps in flight."""
        for name in list(self.engine.requests):
            self.engine.abort(name)
        while self.engine.busy:
            self.turn("")

    def wake(self, phase: str, seconds: float) -> None:
        """Measure a prompt after each pause, and two decode steps after the prompt."""
        self.begin(phase, seconds)
        top = min(self.longest, self.most)
        while not self.over:
            sleep(float(self.rng.uniform(*PAUSES)))
            self._paused = True
            self.add(self._length(4, top), 3)
            self.drain(phase)
        self._clear()

    def traffic(self, phase: str, seconds: float) -> None:
        """Measure requests that arrive and end at random, at each load in ``LOADS``.

        Lengths are log-uniform.  A request is added only if the cache has room for all requests at their ends.
        """
        self.begin(phase, seconds)
        begun = self.timer()
        top = min(self.longest // 2, self.room // 2)
        for number, load in enumerate(LOADS, 1):
            until = begun + seconds * number / len(LOADS)
            rows = max(1, round(self.rows * load))
            last = number == len(LOADS)
            while self.timer() < until or (last and not self.over):
                if len(self.engine.requests) < rows and self.rng.random() < REFILL:
                    prompt = self._length(4, top)
                    output = self._length(2, max(4, top // 2))
                    if self._promised() + prompt + output <= self.room:
                        self.add(prompt, output)
                self.turn(phase)
            self._clear()

    def _promised(self) -> int:
        """Return the tokens that the current requests will have at their ends."""
        return sum(len(r.prompt) + (r.params.max_tokens or 0) for r in self.engine.requests.values())

    def _length(self, low: int, high: int) -> int:
        """Draw a log-uniform length."""
        high = max(high, low + 1)
        exponent = self.rng.uniform(np.log(low), np.log(high))
        return int(np.exp(exponent))


def _powers(low: int, high: int) -> list[int]:
    """Return ``low`` times the powers of two below ``high``, and ``high``."""
    found = [low]
    while found[-1] * 2 < high:
        found.append(found[-1] * 2)
    return [*found, high] if high > found[-1] else found


def _halves(low: int, high: int) -> list[int]:
    """Return the numbers of ``_powers``, and the mean of each two neighbours."""
    powers = _powers(low, high)
    middles = [(a + b) // 2 for a, b in itertools.pairwise(powers)]
    return sorted({*powers, *middles})


def calibrate(
    engine: Engine,
    about: dict[str, Any],
    seconds: float = 60.0,
    report: Callable[[str], None] = lambda _: None,
    timer: Callable[[], float] = perf_counter,
) -> CostTable:
    """Measure an engine for some seconds, and return its costs.

    ``about`` is stored in the table as its description.  ``report`` is called with the name of each phase.  ``timer``
    returns seconds, for steps and for the time of the phases.  Raise ConfigError for an engine with drafts, or if a
    phase measured no step in its time.
    """
    if engine.speculation is not None:
        raise ConfigError("steps with drafts have no table of costs; set drafter=none")
    with Calibrator(engine, timer=timer) as c:
        report("warming up")
        c.run("", WARM * seconds / 2, c.decodes())
        c.traffic("", WARM * seconds / 2)
        c.adds.clear()
        for seed, (phase, share) in enumerate(SHARES.items()):
            phase_seconds = share * seconds * (1 - WARM)
            report(f"{phase}, {phase_seconds:.2g} s")
            c.rng = np.random.default_rng(seed)
            _measure(c, phase, phase_seconds)
        measured = {s.phase for s in c.steps}
        empty = [name for name in SHARES if name not in measured]
        if empty or not c.adds:
            raise ConfigError(f"--seconds {seconds:g}: no step of {', '.join(empty) or 'any request'}; raise --seconds")
        fitted = [s for s in c.steps if s.phase != "check"]
        table = fit(fitted, _halves(1, c.rows), [1, *_halves(8, c.most)])
        add_seconds = float(np.median(c.adds))
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    about = {"measured": when, **about}
    return replace(table, add=add_seconds, engine=_sizes(engine), about=about, fit=errors(table, c.steps))


def _measure(c: Calibrator, phase: str, seconds: float) -> None:
    """Measure the steps of a phase for some seconds."""
    if phase == "check":
        c.mixed(phase, seconds / 2)
        c.traffic(phase, seconds / 2)
    elif phase == "prefill":
        c.run(phase, seconds, c.prefills())
    elif phase == "decode":
        c.run(phase, seconds, c.decodes())
    else:
        getattr(c, phase)(phase, seconds)


def _sizes(engine: Engine) -> dict[str, Any]:
    """Return the sizes of an engine (rows, tokens, KV blocks), which are stored in its table of costs."""
    w = engine.wiring
    cap = engine.capacity
    sizes: dict[str, Any] = {}
    if cap.checkpoints is not None:
        sizes["state_checkpoints"] = cap.checkpoints
    sizes["kvcache_block_size"] = w.block
    sizes["num_kvcache_blocks"] = cap.blocks[0] - 1
    sizes["max_model_len"] = w.max_model_len
    sizes["max_num_seqs"] = w.max_num_seqs
    sizes["max_num_batched_tokens"] = w.max_num_batched_tokens
    sizes["depth"] = cap.depth
    sizes["windows"] = list(engine.cache.windows)
    return sizes
