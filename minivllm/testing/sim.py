"""The engine over a simulated device that checks what a real one gets wrong silently, and the answers it must give.

The device is the executor ``sim`` with its check on (see ``plugins.executor.sim``); here it also fails steps on purpose
and keeps what it was asked.  The next token is a function of (history, sample), so an answer is known without the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minivllm.core.engine import parts as parts_module
from minivllm.core.engine.engine import IDLE, Engine
from minivllm.core.engine.parts import CacheOptions, EngineParts, monotonic
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.executor import CacheWiring, Part, SpeculationWiring, StepWiring, Wiring
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import NAN, StepError, StepResult
from minivllm.core.interfaces.sampling import Row
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy, Guide
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.executor.made_up import MadeUpModel, hash_of
from minivllm.plugins.executor.options import SimOptions
from minivllm.plugins.executor.sim import Sim
from minivllm.plugins.scheduler.fcfs import Fcfs

VOCAB, EOS_ID = 50, 49
MODEL = MadeUpModel(VOCAB)


def logprobs_after(history: np.ndarray) -> np.ndarray:
    """f32 [VOCAB] what the device says of the next token."""
    return MODEL.logits(hash_of(history))[0]


def answer(prompt, params: SamplingParams, sample: int = 0, max_len: int = 256) -> tuple[list[int], str]:
    """What the engine must give: token ids and finish reason.  A ``choose_fn`` is taken for one that chooses the
    likeliest token, which without it the first sample alone draws."""
    tokens = list(prompt)
    end = min(len(tokens) + params.max_tokens, max_len)
    drawn_as = np.array([0 if params.choose_fn is not None else sample])
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_ID})
    while True:
        h = hash_of(np.array(tokens))
        t = int(MODEL.draw(h, drawn_as)[0])
        if t in stops and len(tokens) < len(prompt) + params.min_tokens:
            t = next(i for i in MODEL.at_rank(h, np.arange(VOCAB)).tolist() if i not in stops)
        tokens.append(t)
        if t in stops:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= end:
            return tokens[len(prompt) :], "length"


def guided_answer(prompt, guide: Guide, params: SamplingParams, max_len: int = 256) -> tuple[list[int], str]:
    """What the engine must give of a request with a guide: the likeliest tokens of both."""
    own, other = list(prompt), list(guide.prompt) or list(prompt)[-1:]
    most = min(params.max_tokens, max_len - len(own), max_len - len(other))
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_ID})
    for n in range(most):
        a, b = logprobs_after(np.array(own)), logprobs_after(np.array(other))
        x = np.float32(guide.scale) * (a - b) + b
        if n < params.min_tokens:
            x[list(stops)] = -np.inf
        own.append(int(x.argmax()))
        other.append(own[-1])
        if own[-1] in stops:
            return own[len(prompt) :], "stop"
    return own[len(prompt) :], "length"


class SimExecutor(Sim):
    """Fails the steps ``fail_at``, keeps what it was asked, and gives no result before it must."""

    def __init__(self, options: SimOptions, blocks: list[int], windows: tuple[int | None, ...]) -> None:
        super().__init__(options)
        self.blocks, self.windows = blocks, windows
        self.fail_at: set[int] = set()
        self.trail: list[tuple[list[int], list[int]]] = []  # slots and q_len of every step
        self.max_tokens = self.max_rows = 0

    def _blocks(self, wiring):
        return tuple(self.blocks)

    def submit(self, plan) -> None:
        self.max_tokens = max(self.max_tokens, int(plan.q_len.sum()))
        self.max_rows = max(self.max_rows, len(plan.slots))
        self.trail.append((plan.slots.tolist(), plan.q_len.tolist()))
        super().submit(plan)

    def _finished(self, step):
        return False

    def _run(self, plan, late, ms):
        if plan.id not in self.fail_at:
            return super()._run(plan, late, ms)
        self.stopped[plan.slots] = True  # their KV is not written: no later step may go on from it
        z = np.zeros(len(plan.samples), np.int32)
        error = (StepError("step", "sim", "planned failure"),)
        return StepResult(plan.id, plan.slots[plan.samples], z, z, z.astype(np.uint8), errors=error)


class Clock:
    """Seconds that pass only when a test says so.  ``with clock:`` the engine reads it in place of the real one, so
    that times in a policy's view, and what a policy does with them, are the same in every run."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def __enter__(self) -> Clock:
        self._real = parts_module.time
        parts_module.time = self  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        parts_module.time = self._real

    def turn(self, engine: Engine, seconds: float = 0.02) -> bool:
        """One turn of the loop, which takes ``seconds``, or the wait that follows a turn without work."""
        with self:
            worked = engine.step()
        held = engine.planner.wake_at - self.now if engine.planner.wake_at else 0.0
        self.now += seconds if worked else min(max(IDLE, held), 60.0)
        return worked


class NoProcessor:
    def __init__(self, reads):
        self.reads = frozenset(reads)

    def columns(self):
        return {}

    def bind_prompt(self, params, prompt):
        return Row()


def _wiring(slots: int, max_len: int, block: int, depth: int, budget: int, drafts: int, groups: int) -> Wiring:
    part = Part("sim/sim", "minivllm.testing.sim:Sim", features=("multi_position",))
    return Wiring(
        model_dir="",
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_model_len=max_len,
        batch_invariant=False,
        seed=0,
        parts={"model": part, "sampler": part, "drafter": part},
        cache=CacheWiring(block, groups=tuple((i,) for i in range(groups))),
        steps=StepWiring(run_ahead=depth),
        speculation=SpeculationWiring(drafts, "always"),
        eos_ids=(EOS_ID,),
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
) -> Engine:
    """``policy`` and ``evictor`` are called with (None, context); ``blocks``: a number, or a list of one per window.
    ``reads``: names of parameters that requests may set although no processor here honours them.  ``drafts``: rows
    bring so many to a step, whether it pays or not; ``now``: the engine's clock, seconds."""
    wiring = _wiring(slots, max_len, block, depth, budget, drafts, len(windows))
    options = SimOptions(step_ms=0, vocab_size=VOCAB, check=True)
    executor = SimExecutor(options, blocks if isinstance(blocks, list) else [blocks] * len(windows), windows)
    capacity = executor.start(wiring)
    engine = Engine(
        wiring,
        executor,
        capacity,
        EngineParts(
            policy=lambda ctx: policy(None, ctx),
            evictor=lambda ctx: evictor(None, ctx),
            processors=[("sim/none", NoProcessor(reads))],
            strategies=[("sim/branches", strategy or _Strategy())],
            now=now,
        ),
        CacheOptions(windows, prefix, partial),
    )

    def space(slot: int) -> object:
        seq = engine.slots.seq[slot]
        if seq is None:  # it left between the plan of the step and its submission
            flight = engine.in_flight[-1]
            seq = engine.planner.departed[int(flight.serial[flight.plan.slots.tolist().index(slot)])]
        params = seq.request.params
        return params.tenant, params.cache_salt

    executor.space = space
    return engine


class _Strategy(DecodingStrategy):
    def start(self, params):
        return [Branch(i) for i in range(params.n)]

    def result(self, params, ends):
        return [e.sample for e in ends]


def request(engine: Engine, rid: str, prompt, arrival: float | None = None, **params) -> Request:
    """Add one; it arrives after those that are there unless ``arrival`` says when."""
    at = float(len(engine.requests)) if arrival is None else arrival
    r = Request(rid, np.array(prompt, np.int32), SamplingParams.make(**params), arrival=at)
    engine.add(r)
    return r


def outputs(r: Request) -> list[tuple[list[int], str]]:
    """Token ids and finish reason of each sequence."""
    return [(s.tokens[len(r.prompt) : s.known].tolist(), s.finish_reason) for s in r.sequences]


def run(engine: Engine, limit: int = 20000, check: bool = False) -> int:
    steps = 0
    while engine.busy:
        engine.step()
        if check:
            engine.cache.check()
        steps += 1
        assert steps < limit, "the engine does not come to rest"
    return steps


def at_rest(engine: Engine) -> None:
    """Everything is given back: slots, blocks, tables, queues."""
    engine.cache.check()
    s = engine.slots
    assert len(s.running) == 0 and len(s.free) + len(s.cooling) == s.size and engine.planner.reserved == 0
    assert (
        not engine.planner.departed and engine.planner.n_waiting == 0 and not engine.in_flight and not engine.requests
    )
    for pool in engine.cache.pools:
        assert pool.free + pool.idle == pool.total - 1


__all__ = [
    "NAN", "Clock", "SimExecutor", "answer", "at_rest", "guided_answer", "outputs", "request", "run", "sim_engine",
]  # fmt: skip
