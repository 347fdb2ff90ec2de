"""The engine over a simulated device that checks every read of the KV cache, and the expected answers of requests.

The device is the executor ``sim`` with its check on (see ``plugins.executor.sim``).  Here it also fails steps on
purpose and records its steps.  The next token is a function of (history, sample), so that an answer can be computed
without the engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minivllm.core.engine import parts as parts_module
from minivllm.core.engine.engine import IDLE, Engine
from minivllm.core.engine.parts import CacheOptions, EngineParts, monotonic
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.executor import CacheWiring, ImageWiring, Part, SpeculationWiring, StepWiring, Wiring
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import NAN, StepError, StepResult
from minivllm.core.interfaces.predictor import Predictor, PredictorContext
from minivllm.core.interfaces.sampling import Row
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy, Guide
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.executor.made_up import MadeUpModel, hash_of
from minivllm.plugins.executor.options import SimOptions
from minivllm.plugins.executor.sim import Sim
from minivllm.plugins.scheduler.fcfs import Fcfs

VOCAB = 50
EOS_ID = 49
MODEL = MadeUpModel(VOCAB)
PART = Part("sim/sim", "minivllm.testing.sim:Sim", features=("multi_position",))
FIXED: dict[str, Any] = {  # fields of Wiring that are the same in each simulated engine
    "model_dir": "", "load_format": "dummy", "device": "cpu", "dtype": "float32", "batch_invariant": False, "seed": 0,
    "eos_ids": (EOS_ID,),
}  # fmt: skip
Answer = tuple[list[int], str]  # token ids and finish reason


def logprobs_after(history: np.ndarray) -> np.ndarray:
    """Return the device's log-probabilities of the next token, f32 [VOCAB]."""
    return MODEL.logits(hash_of(history))[0]


def _stop_ids(params: SamplingParams) -> set[int]:
    if params.ignore_eos:
        return set(params.stop_token_ids)
    return {*params.stop_token_ids, EOS_ID}


def answer(prompt, params: SamplingParams, sample: int = 0, max_len: int = 256) -> Answer:
    """Return the expected token ids and finish reason of one sample of a request.

    Sample 0 draws the likeliest tokens.  A ``choose_fn`` is assumed to choose them too, for every sample.
    """
    if params.choose_fn is not None:
        sample = 0
    tokens = list(prompt)
    first = len(tokens)
    least = first + params.min_tokens
    end = min(first + params.max_tokens, max_len)
    drawn_as = np.array([sample])
    stops = _stop_ids(params)
    while True:
        h = hash_of(np.array(tokens))
        drawn = MODEL.draw(h, drawn_as)
        t = int(drawn[0])
        if t in stops and len(tokens) < least:
            likeliest = MODEL.at_rank(h, np.arange(VOCAB))
            t = next(i for i in likeliest.tolist() if i not in stops)
        tokens.append(t)
        if t in stops:
            return tokens[first:], "stop"
        if len(tokens) >= end:
            return tokens[first:], "length"


def guided_answer(prompt, guide: Guide, params: SamplingParams, max_len: int = 256) -> Answer:
    """Return the expected token ids and finish reason of a request with a guide.

    A guide is a second prompt that changes the logits of the request. The likeliest tokens of the combined
    distribution are drawn.
    """
    own = list(prompt)
    other = list(guide.prompt) or own[-1:]
    longest = max(len(own), len(other))
    most = min(params.max_tokens, max_len - longest)
    stops = _stop_ids(params)
    for n in range(most):
        a = logprobs_after(np.array(own))
        b = logprobs_after(np.array(other))
        scale = np.float32(guide.scale)
        x = scale * (a - b) + b
        if n < params.min_tokens:
            x[list(stops)] = -np.inf
        token = int(x.argmax())
        own.append(token)
        other.append(token)
        if token in stops:
            return own[len(prompt) :], "stop"
    return own[len(prompt) :], "length"


class SimExecutor(Sim):
    """A simulated device that fails the steps ``fail_at``, records its steps, and returns results as late as
    possible."""

    def __init__(self, options: SimOptions, blocks: list[int], windows: tuple[int | None, ...]) -> None:
        super().__init__(options)
        self.blocks = blocks
        self.windows = windows
        self.fail_at: set[int] = set()
        self.trail: list[tuple[list[int], list[int]]] = []  # (slots, numbers of tokens) of every step
        self.max_tokens = self.max_rows = 0  # numbers of tokens and of rows of the largest steps

    def _blocks(self, wiring):
        return tuple(self.blocks)

    def submit(self, plan) -> None:
        tokens = int(plan.q_len.sum())
        drafts = np.count_nonzero(plan.draft)  # further rows of the same slots
        rows = len(plan.slots) - drafts
        self.max_tokens = max(self.max_tokens, tokens)
        self.max_rows = max(self.max_rows, rows)
        step = (plan.slots.tolist(), plan.q_len.tolist())
        self.trail.append(step)
        super().submit(plan)

    def _finished(self, step):
        return False

    def _run(self, plan, late, ms):
        if plan.id not in self.fail_at:
            return super()._run(plan, late, ms)
        self.stopped[plan.slots] = True  # the KV of these slots is not written, so no later step may continue them
        zeros = np.zeros(len(plan.samples), np.int32)
        error = (StepError("step", "sim", "planned failure"),)
        flags = zeros.astype(np.uint8)
        slots = plan.slots[plan.samples]
        return StepResult(plan.id, slots, zeros, zeros, flags, errors=error)


class Clock:
    """A clock that advances only when a test calls it.

    In a block ``with clock:`` the engine reads it in place of the real clock, so that the times in a policy's view,
    and its decisions by them, are the same in every run.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._replaced: list[Any] = []  # a stack, because blocks may be nested

    def monotonic(self) -> float:
        return self.now

    def __enter__(self) -> Clock:
        self._replaced.append(parts_module.time)
        parts_module.time = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        parts_module.time = self._replaced.pop()

    def turn(self, engine: Engine, seconds: float = 0.02) -> bool:
        """Run one turn of the engine's loop, and return whether it did work.

        The clock advances by ``seconds``, or after a turn without work by the time that the loop would wait.
        """
        with self:
            worked = engine.step()
        if engine.planner.wake_at:
            held = engine.planner.wake_at - self.now
        else:
            held = 0.0
        self.now += seconds if worked else min(max(IDLE, held), 60.0)
        return worked


class NoProcessor:
    """A processor that accepts parameters and ignores them."""

    def __init__(self, reads):
        self.reads = frozenset(reads)

    def columns(self):
        return {}

    def bind_prompt(self, params, prompt):
        return Row()


def _cache_wiring(
    block: int,
    groups: int,
    checkpoints: int | None,
    stores: tuple[Part, ...],
    compress: tuple[float, int] | None,
    pressure: float,
) -> CacheWiring:
    """Return the settings of a cache with one layer in each of its groups."""
    kv_budget, compress_every = compress or (0, 0)
    indices = tuple((i,) for i in range(groups))
    return CacheWiring(
        block,
        groups=indices,
        num_state_checkpoints=checkpoints or 0,
        recurrent=checkpoints is not None,
        stores=stores,
        kv_budget=kv_budget,
        compress_every=compress_every,
        pressure_budget=pressure,
    )


def _space_of(engine: Engine, slot: int) -> object:
    """Return the tenant and the salt of the sequence in a slot: only sequences with the same ones share blocks."""
    seq = engine.slots.seq[slot]
    if seq is None:  # the sequence left its slot between the plan of the step and its submission
        flight = engine.in_flight[-1]
        slots = flight.plan.slots.tolist()
        serial = flight.serial[slots.index(slot)]
        seq = engine.planner.departed[int(serial)]
    params = seq.request.params
    return params.tenant, params.cache_salt


def _plugins(policy, evictor, strategy, reads, now, predictor) -> EngineParts:
    """Return the plug-ins of an engine, made from the arguments of ``sim_engine``."""
    processor = NoProcessor(reads)
    branches = strategy or _Strategy()
    return EngineParts(
        policy=functools.partial(policy, None),
        evictor=functools.partial(evictor, None),
        processors=[("sim/none", processor)],
        strategies=[("sim/branches", branches)],
        now=now,
        predictor=predictor,
    )


def sim_engine(
    *,
    slots=8,
    max_len=256,
    blocks=64,
    block=4,
    windows=(None,),
    depth=0,
    budget=64,
    prefix=True,
    partial=True,
    policy=Fcfs,
    evictor=Lru,
    strategy: DecodingStrategy | None = None,
    reads: Iterable[str] = ("temperature",),
    drafts: int = 0,
    now: Callable[[], float] = monotonic,
    checkpoints: int | None = None,
    stores: tuple[Part, ...] = (),
    compress: tuple[float, int] | None = None,
    pressure: float = 0,
    images: ImageWiring | None = None,
    device: Callable[..., SimExecutor] | None = None,
    predictor: Callable[[PredictorContext], Predictor] | None = None,
) -> Engine:
    """Return an engine over a simulated device.

    ``policy`` and ``evictor`` are called with (None, context).  ``blocks`` is the number of blocks of each KV group,
    or a list of them, one per window.  ``reads`` names parameters that requests may set.  ``drafts`` is the number of
    draft tokens that each row brings to a step.  ``now`` is the engine's clock, in seconds.  ``checkpoints`` is the
    number of copies of recurrent states, None for a model without.  ``stores`` are the lower tiers of the KV cache.
    ``compress`` has ``kv_budget`` and ``compress_every``, or None.  ``pressure`` is ``pressure_budget``.  ``device``
    makes the simulated device, ``predictor`` the predictor; None means ``SimExecutor`` and no predictions.
    """
    groups = len(windows)
    parts = dict.fromkeys(("model", "sampler", "drafter"), PART)
    if compress:
        parts["compressor"] = PART
    wiring = Wiring(
        **FIXED,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        parts=parts,
        cache=_cache_wiring(block, groups, checkpoints, stores, compress, pressure),
        steps=StepWiring(run_ahead=depth),
        speculation=SpeculationWiring(drafts, "always"),
        images=images or ImageWiring(),
    )
    options = SimOptions(step_ms=0, vocab_size=VOCAB, check=True)
    if not isinstance(blocks, list):
        blocks = [blocks] * groups
    make_device = device or SimExecutor
    executor = make_device(options, blocks, windows)
    plugins = _plugins(policy, evictor, strategy, reads, now, predictor)
    cache = CacheOptions(windows, prefix, partial)
    engine = Engine(wiring, executor, executor.start(wiring), plugins, cache)
    executor.space = functools.partial(_space_of, engine)
    return engine


class _Strategy(DecodingStrategy):
    """A strategy with n independent branches per request, all of which are in its answer."""

    def start(self, params):
        return [Branch(i) for i in range(params.n)]

    def result(self, params, ends):
        return [e.sample for e in ends]


def request(engine: Engine, rid: str, prompt, arrival: float | None = None, **params) -> Request:
    """Add a request; ``arrival`` is its time in seconds, and None means after the other requests."""
    if arrival is None:
        arrival = float(len(engine.requests))
    made = SamplingParams.make(**params)
    ids = np.array(prompt, np.int32)
    r = Request(rid, ids, made, arrival=arrival)
    engine.add(r)
    return r


def outputs(r: Request) -> list[tuple[list[int], str]]:
    """Return (token ids, finish reason) of each sequence of a request."""
    found = []
    for s in r.sequences:
        tokens = s.tokens[len(r.prompt) : s.known].tolist()
        found.append((tokens, s.finish_reason))
    return found


def run(engine: Engine, limit: int = 20000, check: bool = False) -> int:
    """Run the engine until all requests have ended, and return the number of turns.

    ``check`` compares the cache's tables after each turn.  More than ``limit`` turns fail.
    """
    steps = 0
    while engine.busy:
        engine.step()
        if check:
            engine.cache.check()
        steps += 1
        assert steps < limit, f"requests have not ended after {steps} turns"
    return steps


def at_rest(engine: Engine) -> None:
    """Fail unless the engine has returned all slots and blocks, and its queues and tables are empty."""
    engine.cache.check()
    slots = engine.slots
    planner = engine.planner
    assert len(slots.running) == 0
    assert len(slots.free) + len(slots.cooling) == slots.size
    assert planner.reserved == 0 and planner.n_waiting == 0 and not planner.departed
    assert not engine.in_flight and not engine.requests
    for pool in engine.cache.pools:
        assert pool.free + pool.idle == pool.total - 1


__all__ = [
    "NAN", "Clock", "SimExecutor", "answer", "at_rest", "guided_answer", "outputs", "request", "run", "sim_engine",
]  # fmt: skip
