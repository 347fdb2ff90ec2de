"""The engine over a trace: its own planner, block pools, scheduler and evictor, and a device that only counts.

Nothing is computed, so a step costs what the host does in it.  The answer of a request is as long as the trace says,
and its tokens are the trace's, so the next turn of a conversation finds it in the cache.
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
IDLE_TURNS = 100_000  # with requests there and nothing planned: the policy holds them back for ever


@dataclass(frozen=True)
class ServeSizes:
    """What of the engine's options a replay needs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block: int  # tokens
    blocks: int  # that requests can use
    prefix: bool = True
    partial: bool = True  # hits go on inside a block
    depth: int = 0  # steps in flight beside the newest
    windows: tuple[int | None, ...] = (None,)  # of each KV group


@dataclass(frozen=True)
class ServeRun:
    """What became of the trace.  Columns are [n], -1 where a request was refused."""

    steps: int  # that did work
    queued: np.ndarray  # i64 steps from arrival to a place in a batch
    first: np.ndarray  # i64 steps from arrival to the first token
    done: np.ndarray  # i64 steps from arrival to the last token
    cached: np.ndarray  # i32 prompt tokens found in the cache when it was first admitted
    prompt: np.ndarray  # i32
    computed: int  # tokens that went through the device
    evictions: int
    preemptions: int
    part_s: Mapping[str, float]  # host seconds by part of a turn
    seam_s: Mapping[str, float]  # host seconds by seam
    seconds: float  # of the whole replay
    cpu_s: float  # of it, what this process computed: the machine may have had other things to do
    refused: int
    figures: Mapping[str, float] = field(default_factory=dict)  # of plug-ins, by "evictor.NAME"

    @property
    def hit_rate(self) -> float:
        """Of prompt tokens."""
        served = self.queued >= 0
        return float(self.cached[served].sum() / max(1, self.prompt[served].sum()))


class Steps:
    """Time in a replay: step k begins ``seconds`` x k after the first arrival.  A clock that says how long a step takes
    would go here; ``tick`` is told of each step's plan (None: nothing ran)."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.step = seconds, 0

    @property
    def now(self) -> float:
        return self.seconds * self.step

    def tick(self, plan: StepPlan | None) -> None:
        self.step += 1

    def skip_to(self, when: float) -> None:
        """Nothing is to be done before then."""
        if self.seconds:
            self.step = max(self.step, math.ceil(when / self.seconds))

    def step_of(self, when: np.ndarray) -> np.ndarray:
        """The step that begins at ``when`` or after it, i64."""
        if not self.seconds:
            return np.zeros(len(when), np.int64)
        return np.ceil(when / self.seconds).astype(np.int64)


class NoHistories(Histories):
    """What rows draw is known by their request, so nothing is remembered; there are no branches."""

    def __init__(self) -> None:
        """Takes no memory."""

    def put(self, slot: int, tokens: np.ndarray) -> None:
        pass


class Counting(Sim):
    """Answers at once, with the trace's tokens.  ``Join.seed`` is the number of the request in the trace."""

    def __init__(self, trace: Trace, sizes: ServeSizes, steps: Steps) -> None:
        super().__init__(SimOptions(step_ms=0, vocab_size=VOCAB))
        self.trace, self.sizes, self.steps = trace, sizes, steps
        self.token = np.zeros(sizes.max_num_seqs, np.int32)  # what the row's answer holds
        self.request = np.zeros(sizes.max_num_seqs, np.int64)  # whose row it is
        # steps, -1 = not yet: the place in a batch, the first token, the last
        self.joined, self.first, self.done = (np.full(len(trace), -1, np.int64) for _ in range(3))
        self.computed = 0
        self.plan: StepPlan | None = None

    def start(self, wiring: Wiring) -> Capacity:
        return replace(super().start(wiring), block_bytes=(self.sizes.block,) * len(self.sizes.windows))

    def _histories(self, slots: int, length: int) -> Histories:
        return NoHistories()

    def submit(self, plan: StepPlan) -> None:
        self.plan = plan
        self.computed += int(plan.q_len.sum())
        super().submit(plan)

    def _join(self, j: Join) -> None:
        super()._join(j)
        self.token[j.slot], self.request[j.slot] = self.trace.answer[j.seed], j.seed
        self.joined[j.seed[self.joined[j.seed] < 0]] = self.steps.step

    def _next(self, slots: np.ndarray) -> np.ndarray:
        return self.token[slots]

    def _commit(self, slots: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Rows end at their length alone."""
        self.known[slots] += 1
        flags = np.where(self.known[slots] >= self.end[slots], LENGTH, 0).astype(np.uint8)
        self.stopped[slots] = flags != 0
        asked = self.request[slots]
        self.first[asked[self.first[asked] < 0]] = self.steps.step  # it drew, so its prompt is computed
        self.done[asked[flags != 0]] = self.steps.step
        return flags


class NoSampler:
    reads: frozenset[str] = frozenset()

    def columns(self) -> dict[str, Any]:
        return {}

    def bind_prompt(self, params: SamplingParams, prompt: np.ndarray) -> Row:
        return Row()


class _Tally:
    """Sums over all steps what the engine's clock keeps of the last ones."""

    def __init__(self, clock: StepClock) -> None:
        self.clock, self.counted = clock, 0
        self.part = np.zeros(len(PARTS))
        self.seam: dict[str, float] = {}

    def step(self) -> None:
        if self.clock.count - self.counted == self.clock.size:
            self.add()

    def add(self) -> None:
        rows = np.arange(self.counted, self.clock.count) % self.clock.size
        self.part += self.clock.part[rows].sum(axis=0)
        for name, column in self.clock.seam.items():
            self.seam[name] = self.seam.get(name, 0.0) + float(column[rows].sum())
        self.counted = self.clock.count


def serve(
    trace: Trace,
    sizes: ServeSizes,
    policy: Callable[[SchedulerContext], SchedulerPolicy],
    evictor: Callable[[EvictorContext], Evictor] | None,
    seconds_per_step: float = 0.05,
) -> ServeRun:
    """Serve the whole trace.  ``evictor`` None: Belady's rule, which knows all prompts to come in order of arrival.
    ``seconds_per_step`` 0: all requests are there at the start."""
    if sizes.max_num_batched_tokens < sizes.max_num_seqs:
        raise ConfigError("max_num_batched_tokens is less than max_num_seqs: a decode step would not fit")
    steps = Steps(seconds_per_step)
    device = Counting(trace, sizes, steps)
    sent = 0
    engine = engine_for(device, sizes, policy, evictor, lambda: steps.now, lambda: sent)
    tally = _Tally(engine.clock)
    cached = np.zeros(len(trace), np.int32)

    def ended(r: Request) -> None:
        cached[r.params.seed] = r.cached_tokens

    due = steps.step_of(trace.arrival)
    refused = idle = 0
    start, start_cpu = perf_counter(), process_time()
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
            what = f"{engine.planner.n_waiting} requests wait and nothing was planned in {IDLE_TURNS} turns"
            raise EngineDeadError(f"{what}: the scheduler {type(engine.planner.policy).__name__} holds them back")
        steps.tick(device.plan)
        tally.step()
        if not engine.busy and sent < len(trace):
            steps.skip_to(float(trace.arrival[sent]))
    tally.add()
    seconds, cpu = perf_counter() - start, process_time() - start_cpu
    return _result(engine, device, trace, due, cached, tally, (seconds, cpu), refused)


def _result(
    engine: Engine,
    device: Counting,
    trace: Trace,
    due: np.ndarray,
    cached: np.ndarray,
    tally: _Tally,
    times: tuple[float, float],
    refused: int,
) -> ServeRun:
    """``due``: the step in which each request comes; ``times``: seconds of the run, by the clock and of CPU time."""
    at = np.where(device.joined >= 0, due, 0)
    gone = device.joined < 0
    since = lambda column: np.where(gone, -1, column.astype(np.int64) - at)  # noqa: E731
    pools = engine.cache.pools
    return ServeRun(
        engine.clock.count,
        since(device.joined),
        since(device.first),
        since(device.done),
        cached,
        trace.prompt,
        device.computed,
        sum(p.evictions for p in pools),
        engine.planner.preemptions,
        dict(zip(PARTS, tally.part.tolist(), strict=True)),
        tally.seam,
        *times,
        refused,
        flat(engine.stats()),
    )


def engine_for(
    device: Counting,
    sizes: ServeSizes,
    policy: Callable[[SchedulerContext], SchedulerPolicy],
    evictor: Callable[[EvictorContext], Evictor] | None,
    now: Callable[[], float],
    sent: Callable[[], int],
) -> Engine:
    """An engine whose device makes the trace's tokens up.  ``sent``: requests of the trace that have come, by which
    Belady's rule (``evictor`` None) knows where in the trace it is."""
    future: dict[int, list[int]] = {}
    asked = evictor or (lambda ctx: Optimum(ctx, future, lambda: sent() - engine.planner.n_waiting))
    figures = PluginFigures()
    of = lambda seam, make: lambda ctx: figures.of(seam, make(ctx))  # noqa: E731
    engine = _engine(device, sizes, of("scheduler", policy), of("evictor", asked), now)
    engine.events.stats_asked.subscribe(figures.add_to)
    if evictor is None:
        trace, root = device.trace, engine.cache.pools[0].root(("", ""))[1]
        usable = ((trace.prompt - 1) // sizes.block).tolist()  # a hit leaves a token to compute
        future.update(uses_of([trace.keys(i, sizes.block, root)[:n] for i, n in enumerate(usable)]))
    return engine


def _engine(device: Counting, sizes: ServeSizes, policy: Any, evictor: Any, now: Callable[[], float]) -> Engine:
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
        parts={"model": Part("minivllm/replay", "minivllm.lab.replay.serve:Counting")},
        cache=CacheWiring(sizes.block, sizes.blocks, groups=((),) * len(sizes.windows)),
        steps=StepWiring(run_ahead=sizes.depth),
    )
    return Engine(
        wiring,
        device,
        device.start(wiring),
        EngineParts(
            policy,
            evictor,
            processors=[("replay/none", cast(Processor, NoSampler()))],
            strategies=[("minivllm/single", Single(None))],
            now=now,
        ),
        CacheOptions(sizes.windows, prefix_caching=sizes.prefix, partial_hits=sizes.partial),
    )


def _add(engine: Engine, trace: Trace, i: int, ended: Callable[[Request], None]) -> bool:
    """False if the engine refuses it: it is longer than the model, or the cache."""
    params = SamplingParams(max_tokens=int(trace.output[i]), ignore_eos=True, detokenize=False, seed=i)
    try:
        engine.add(Request(str(i), trace.tokens(i), params, float(trace.arrival[i]), on_done=ended))
    except RequestError:
        return False
    return True
