"""Run the engine on a trace with its own planner, block pools, scheduler and evictor, and a device that only counts.

No model is computed, so a step costs only the host's work.  The lengths and tokens of answers come from the trace.
The next turn of a conversation therefore finds the answer before it in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time
from typing import Any, cast

import numpy as np

from minivllm.core.engine.engine import Engine
from minivllm.core.engine.parts import CacheOptions, EngineParts
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.evictor import Evictor, EvictorContext
from minivllm.core.interfaces.executor import CacheWiring, Capacity, Part, StepWiring, Wiring
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import LENGTH, Join, StepPlan
from minivllm.core.interfaces.predictor import Predictor, PredictorContext
from minivllm.core.interfaces.sampling import Processor, Row
from minivllm.core.interfaces.scheduler import SchedulerContext, SchedulerPolicy
from minivllm.core.timing import PARTS, StepClock
from minivllm.errors import ConfigError, EngineDeadError, RequestError
from minivllm.lab.traces.trace import Trace
from minivllm.plugins.executor.made_up import Histories
from minivllm.plugins.executor.options import SimOptions
from minivllm.plugins.executor.sim import Sim
from minivllm.plugins.strategy.single import Single
from minivllm.runtime.hooks.figures import PluginFigures, flat

from .optimum import Optimum, uses_of

VOCAB = 2**31 - 1
IDLE_TURNS = 100_000  # turns without a planned step after which the scheduler counts as stuck

Column = np.ndarray  # [rows] or [requests]
MakePredictor = Callable[[PredictorContext], Predictor]
MakePolicy = Callable[[SchedulerContext], SchedulerPolicy]
MakeEvictor = Callable[[EvictorContext], Evictor]


@dataclass(frozen=True)
class ServeSizes:
    """The engine's options that a replay uses."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block: int  # tokens
    blocks: int  # blocks that requests can use
    prefix: bool = True
    partial: bool = True  # whether a prefix hit may end inside a block of the KV cache
    depth: int = 0  # number of steps in flight without the newest one, the engine's ``run_ahead``
    windows: tuple[int | None, ...] = (None,)  # attention window of each KV group, in tokens; None means no window
    checkpoints: int | None = None  # checkpoints of recurrent states; None for a model without such states
    # the value of the engine's option ``tpot_target_ms``: a limit of the time per output token, or "off"
    tpot_target_ms: float | str = "off"


@dataclass(frozen=True)
class ServeRun:
    """The results of a replay.  Columns are [n requests]; -1 marks a refused request."""

    steps: int  # steps with work
    queued: np.ndarray  # i64 steps from arrival to a place in a batch
    first: np.ndarray  # i64 steps from arrival to the first token
    done: np.ndarray  # i64 steps from arrival to the last token
    cached: np.ndarray  # i32 prompt tokens found in the cache at the first admission
    prompt: np.ndarray  # i32
    computed: int  # tokens that the device computed
    evictions: int
    preemptions: int
    part_s: Mapping[str, float]  # host seconds by part of a turn (an iteration of the engine's loop)
    seam_s: Mapping[str, float]  # host seconds by seam (kind of plug-in)
    seconds: float  # duration of the whole replay in seconds
    cpu_s: float  # CPU seconds of this process; other processes do not count
    refused: int
    figures: Mapping[str, float] = field(default_factory=dict)  # counters of plug-ins, by "evictor.NAME"

    @property
    def hit_rate(self) -> float:
        """Return the share of prompt tokens that were found in the cache."""
        served = self.queued >= 0
        return float(self.cached[served].sum() / max(1, self.prompt[served].sum()))


@dataclass
class Steps:
    """The clock of a replay: step k begins ``seconds`` * k after the first arrival.

    With 0 seconds all requests arrive at the beginning.  A clock with the real duration of steps can replace it,
    because ``tick`` receives the plan of each step.
    """

    seconds: float
    step: int = 0

    @property
    def now(self) -> float:
        """Return the seconds since the first arrival."""
        return self.seconds * self.step

    def tick(self, plan: StepPlan | None) -> None:
        """Count a step; ``plan`` None means that nothing ran."""
        self.step += 1

    def skip_to(self, when: float) -> None:
        """Skip the steps before ``when`` seconds, in which no request is served."""
        if self.seconds:
            self.step = max(self.step, math.ceil(when / self.seconds))

    def step_of(self, when: np.ndarray) -> np.ndarray:
        """Return the first step that begins at ``when`` seconds or later, i64."""
        if not self.seconds:
            return np.zeros(len(when), np.int64)
        return np.ceil(when / self.seconds).astype(np.int64)


class NoHistories(Histories):
    """Histories that store no tokens, since the trace gives the tokens of an answer."""

    def __init__(self) -> None:
        """Skip the base class, which allocates memory."""

    def put(self, slot: int, tokens: np.ndarray) -> None:
        """Ignore the tokens of a row."""


class Counting(Sim):
    """A device that returns the trace's tokens at once.  ``Join.seed`` is the index of a request in the trace."""

    def __init__(self, trace: Trace, sizes: ServeSizes, steps: Steps) -> None:
        super().__init__(SimOptions(step_ms=0, vocab_size=VOCAB))
        self.trace, self.sizes, self.steps = trace, sizes, steps
        # by row: the content number of its answer, which stands for the answer's tokens
        self.token = np.zeros(sizes.max_num_seqs, np.int32)
        self.request = np.zeros(sizes.max_num_seqs, np.int64)  # by row: the index of its request in the trace
        # by request: step of its admission, of its first and of its last token; -1 means not yet
        not_yet = np.full(len(trace), -1, np.int64)
        self.joined = not_yet
        self.first = not_yet.copy()
        self.done = not_yet.copy()
        self.computed = 0
        self.plan: StepPlan | None = None

    def start(self, wiring: Wiring) -> Capacity:
        capacity = super().start(wiring)
        bytes_of_groups = (self.sizes.block,) * len(self.sizes.windows)
        return replace(capacity, block_bytes=bytes_of_groups)

    def _histories(self, slots: int, length: int) -> Histories:
        return NoHistories()

    def submit(self, plan: StepPlan) -> None:
        self.plan = plan
        self.computed += int(plan.q_len.sum())
        super().submit(plan)

    def _join(self, j: Join) -> None:
        super()._join(j)
        self.token[j.slot] = self.trace.answer[j.seed]
        self.request[j.slot] = j.seed
        # the step is stored only at the first join: a preempted request joins again
        new = j.seed[self.joined[j.seed] < 0]
        self.joined[new] = self.steps.step

    def _next(self, slots: Column) -> Column:
        return self.token[slots]

    def _commit(self, slots: Column, tokens: Column) -> Column:
        """Append a token to each row and return the stop flags, u8.  A row ends only at its length."""
        self.known[slots] += 1
        ended = self.known[slots] >= self.end[slots]
        self.stopped[slots] = ended
        requests = self.request[slots]
        self.first[requests[self.first[requests] < 0]] = self.steps.step
        self.done[requests[ended]] = self.steps.step
        return np.where(ended, LENGTH, 0).astype(np.uint8)


class NoSampler:
    """An empty stand-in for the sampler, which the engine requires and this device does not use."""

    reads: frozenset[str] = frozenset()

    def columns(self) -> dict[str, Any]:
        return {}

    def bind_prompt(self, params: SamplingParams, prompt: np.ndarray) -> Row:
        return Row()


class _Tally:
    """Sums of the engine's step times over all steps; the engine's clock itself stores the latest steps only."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock
        self.counted = 0  # number of steps that the sums include
        self.part = np.zeros(len(PARTS))
        self.seam: dict[str, float] = {}

    def step(self) -> None:
        """Add the stored steps to the sums if the clock is about to overwrite them; called once per step."""
        if self.clock.count - self.counted == self.clock.size:
            self.add()

    def add(self) -> None:
        """Add the steps that are not yet in the sums."""
        rows = np.arange(self.counted, self.clock.count) % self.clock.size
        self.part += self.clock.part[rows].sum(axis=0)
        for name, column in self.clock.seam.items():
            seconds = float(column[rows].sum())
            self.seam[name] = self.seam.get(name, 0.0) + seconds
        self.counted = self.clock.count


def serve(
    trace: Trace,
    sizes: ServeSizes,
    policy: MakePolicy,
    evictor: MakeEvictor | None,
    seconds_per_step: float = 0.05,
) -> ServeRun:
    """Run the whole trace and return its results.

    ``policy`` and ``evictor`` construct the plug-ins; ``evictor`` None means Belady's rule, which reads the later
    prompts of the trace.  With ``seconds_per_step`` 0 all requests arrive at the start.  Raise ConfigError if a batch
    has fewer tokens than rows, and EngineDeadError if the engine fails or the scheduler plans nothing for too long.
    """
    if sizes.max_num_batched_tokens < sizes.max_num_seqs:
        raise ConfigError("max_num_batched_tokens is less than max_num_seqs, so a decode step of all rows does not fit")
    steps = Steps(seconds_per_step)
    device = Counting(trace, sizes, steps)
    sent = 0
    engine = engine_for(device, sizes, policy, evictor, lambda: steps.now, lambda: sent)
    tally = _Tally(engine.clock)
    cached = np.zeros(len(trace), np.int32)

    def ended(r: Request) -> None:
        cached[r.params.seed] = r.cached_tokens

    due = steps.step_of(trace.arrival)
    refused = 0
    idle = 0
    start = perf_counter()
    start_cpu = process_time()
    while sent < len(trace) or engine.busy:
        while sent < len(trace) and due[sent] <= steps.step:
            refused += not _add(engine, trace, sent, ended)
            sent += 1
        device.plan = None
        worked = engine.step()
        if engine.dead:
            raise EngineDeadError(engine.dead)
        idle = 0 if worked else idle + 1
        if idle > IDLE_TURNS:
            raise EngineDeadError(describe_stall(engine))
        steps.tick(device.plan)
        tally.step()
        if not engine.busy and sent < len(trace):
            steps.skip_to(float(trace.arrival[sent]))
    tally.add()
    seconds = perf_counter() - start
    cpu_seconds = process_time() - start_cpu
    return _result(engine, device, due, cached, tally, seconds, cpu_seconds, refused)


def describe_stall(engine: Engine) -> str:
    """Return the message for an engine that plans no step though requests wait."""
    scheduler = type(engine.planner.policy).__name__
    waiting = f"{engine.planner.n_waiting} requests wait and nothing was planned in {IDLE_TURNS} turns"
    return f"{waiting}: the scheduler {scheduler} holds them back"


def _result(
    engine: Engine,
    device: Counting,
    due: Column,
    cached: Column,
    tally: _Tally,
    seconds: float,
    cpu_seconds: float,
    refused: int,
) -> ServeRun:
    """Return the results of a run; ``due`` holds the step in which each request arrives."""
    never_ran = device.joined < 0

    def since_arrival(steps: Column) -> Column:
        return np.where(never_ran, -1, steps - due)

    evictions = sum(pool.evictions for pool in engine.cache.pools)
    part_seconds = dict(zip(PARTS, tally.part.tolist(), strict=True))
    return ServeRun(
        engine.clock.count,
        since_arrival(device.joined),
        since_arrival(device.first),
        since_arrival(device.done),
        cached,
        device.trace.prompt,
        device.computed,
        evictions,
        engine.planner.preemptions,
        part_seconds,
        tally.seam,
        seconds=seconds,
        cpu_s=cpu_seconds,
        refused=refused,
        figures=flat(engine.stats()),
    )


def engine_for(
    device: Counting,
    sizes: ServeSizes,
    policy: MakePolicy,
    evictor: MakeEvictor | None,
    now: Callable[[], float],
    sent: Callable[[], int],
    predictor: MakePredictor | None = None,
) -> Engine:
    """Return an engine on a device that returns the trace's tokens.

    ``policy`` and ``evictor`` construct the plug-ins.  ``evictor`` None means Belady's rule, which finds its place in
    the trace by ``sent()``, the number of requests that have arrived.  ``now()`` is the engine's clock in seconds.
    ``predictor`` None predicts nothing.
    """
    future: dict[int, list[int]] = {}
    figures = PluginFigures()

    def make_policy(ctx: SchedulerContext) -> Any:
        return figures.of("scheduler", policy(ctx))

    def make_evictor(ctx: EvictorContext) -> Any:
        made: Evictor = Optimum(ctx, future, planned) if evictor is None else evictor(ctx)
        return figures.of("evictor", made)

    def planned() -> int:
        return sent() - engine.planner.n_waiting

    def make_predictor(ctx: PredictorContext) -> Any:
        assert predictor is not None
        return figures.of("predictor", predictor(ctx))

    engine = _engine(device, sizes, make_policy, make_evictor, now, predictor and make_predictor)
    engine.events.stats_asked.subscribe(figures.add_to)
    if evictor is None:
        trace = device.trace
        root = engine.cache.pools[0].root(("", ""))[1]
        full_blocks = ((trace.prompt - 1) // sizes.block).tolist()  # a hit leaves at least a token to compute
        chains = []
        for i, n in enumerate(full_blocks):
            keys = trace.keys(i, sizes.block, root)
            chains.append(keys[:n])
        future.update(uses_of(chains))
    return engine


def _engine(
    device: Counting, sizes: ServeSizes, policy: Any, evictor: Any, now: Callable[[], float], predictor: Any
) -> Engine:
    """Return an engine that plans steps for the counting device of a replay, with the replay's sizes, policy, evictor
    and predictor.
    """
    cache = CacheWiring(
        sizes.block,
        sizes.blocks,
        groups=((),) * len(sizes.windows),
        num_state_checkpoints=sizes.checkpoints or 0,
        recurrent=sizes.checkpoints is not None,
    )
    device_part = Part("minivllm/replay", "minivllm.lab.replay.serve:Counting")
    wiring = Wiring(
        model_dir="",
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        batch_invariant=False,
        seed=0,
        parts={"model": device_part},
        cache=cache,
        steps=StepWiring(run_ahead=sizes.depth, tpot_target_ms=sizes.tpot_target_ms),
    )
    sampler = cast(Processor, NoSampler())
    parts = EngineParts(
        policy,
        evictor,
        processors=[("replay/none", sampler)],
        strategies=[("minivllm/single", Single(None))],
        now=now,
        predictor=predictor,
    )
    options = CacheOptions(sizes.windows, prefix_caching=sizes.prefix, partial_hits=sizes.partial)
    return Engine(wiring, device, device.start(wiring), parts, options)


def _add(engine: Engine, trace: Trace, i: int, ended: Callable[[Request], None]) -> bool:
    """Add request i to the engine, and return False if the engine refuses it as too long for the model or the cache."""
    output = int(trace.output[i])
    arrival = float(trace.arrival[i])
    session = trace.session_of(i)
    params = SamplingParams(max_tokens=output, ignore_eos=True, detokenize=False, seed=i, session=session)
    request = Request(str(i), trace.tokens(i), params, arrival, on_done=ended)
    try:
        engine.add(request)
    except RequestError:
        return False
    return True
