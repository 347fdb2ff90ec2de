"""A device without a model, for tests of everything round it: it checks what a real one would silently get wrong.

Each KV slot holds a fingerprint of the token prefix that was computed there.  A row's step checks that every earlier
position of its block table (within the group's window) holds the fingerprint of *its own* history: a wrong block, a
missing copy, a block reused too early, or a stale table row fails at once.  The next token is a function of (history,
sample), so an answer is known without the engine.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from minivllm.core.engine import parts as parts_module
from minivllm.core.engine.engine import IDLE, Engine
from minivllm.core.engine.parts import CacheOptions, EngineParts, monotonic
from minivllm.core.engine.request import Request
from minivllm.core.interfaces.executor import Capacity, Executor, Part, Wiring
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import EOS, LENGTH, NAN, OVERSHOOT, STOP_ID, LogProbs, StepError, StepResult
from minivllm.core.interfaces.sampling import Row
from minivllm.core.interfaces.strategy import Branch, DecodingStrategy
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs

VOCAB, EOS_ID = 50, 49


def fingerprint(tokens: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(tokens, np.int32).tobytes()) + 1


def next_token(history: np.ndarray, sample: int) -> int:
    return zlib.crc32(np.append(history, sample).astype(np.int32).tobytes()) % VOCAB


def logprobs_after(history: np.ndarray) -> np.ndarray:
    """f32 [VOCAB] what the device says of the next token."""
    logits = np.random.default_rng(zlib.crc32(np.asarray(history, np.int32).tobytes())).normal(0, 3, VOCAB)
    return (logits - np.logaddexp.reduce(logits)).astype(np.float32)


def answer(prompt, params: SamplingParams, sample: int = 0, max_len: int = 256) -> tuple[list[int], str]:
    """What the engine must give: token ids and finish reason."""
    tokens = list(prompt)
    end = min(len(tokens) + params.max_tokens, max_len)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS_ID})
    while True:
        t = next_token(np.array(tokens, np.int32), sample)
        tokens.append(t)
        if t in stops and len(tokens) - 1 >= len(prompt) + params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= end:
            return tokens[len(prompt) :], "length"


class SimExecutor(Executor):
    """Steps run when submitted; results come back ``depth`` steps later."""

    def __init__(self, slots: int, max_len: int, blocks: list[int], block: int, windows, depth: int = 0) -> None:
        self.block, self.windows, self.depth, self.blocks = block, windows, depth, blocks
        self.tokens = np.zeros((slots, max_len + 1), np.int32)
        self.known, self.prompt, self.end, self.min_end, self.sample = (np.zeros(slots, int) for _ in range(5))
        self.stops: list[list[int]] = [[] for _ in range(slots)]
        self.eos = np.zeros(slots, int)
        self.stopped = np.ones(slots, bool)
        self.table = np.zeros((len(windows), slots, max_len // block + 2), np.int32)
        self.kv = [np.zeros((n, block), np.int64) for n in blocks]
        self.results: deque[StepResult] = deque()
        self.fail_at: set[int] = set()
        # slot -> what its KV may be shared with; every position that is read is checked to be its own
        self.space: Callable[[int], object] = lambda slot: ()
        self.trail: list[tuple[list[int], list[int]]] = []  # slots and q_len of every step
        self.max_tokens = self.max_rows = 0
        self.luck = 0.7  # share of the drafts that are right
        self.held: dict[int, object] = {}

    def start(self, wiring):
        return Capacity(tuple(self.blocks), (1,) * len(self.blocks), VOCAB, 0, self.depth)

    def _delta(self, d) -> None:
        self.stopped[d.leave] = True
        if d.join is not None:
            j, at = d.join, 0
            for i, slot in enumerate(j.slot):
                n = j.known[i]
                self.tokens[slot, :n] = j.tokens[at : at + n]
                at += n
                self.known[slot], self.prompt[slot], self.end[slot] = n, j.prompt[i], j.end[i]
                self.min_end[slot], self.sample[slot], self.eos[slot] = j.min_end[i], j.sample[i], j.n_eos[i]
                self.stops[slot] = [int(x) for x in j.stop_ids[i] if x >= 0]
                self.stopped[slot] = False
        for src, dst, sample in d.fork:
            for column in (self.tokens, self.known, self.prompt, self.end, self.min_end, self.eos):
                column[dst] = column[src]
            self.stopped[dst] = False
            self.stops[dst], self.sample[dst] = self.stops[src], sample
        for slot, token in d.token:
            self.tokens[slot, self.known[slot]] = token
            self.known[slot] += 1
        seen = set()
        for g, slot, i, b in d.table:
            assert (g, slot, i) not in seen, "a table entry is named twice in one delta"
            seen.add((g, slot, i))
            self.table[g, slot, i] = b
        for g, slot, first, count in d.trim:
            self.table[g, slot, first : first + count] = 0
        for g in range(len(self.kv)):
            copy = d.copy[d.copy[:, 0] == g]
            assert len(set(copy[:, 2].tolist())) == len(copy), "two copies to one block in one delta"
            self.kv[g][copy[:, 2]] = self.kv[g][copy[:, 1]]  # all are read before one is written

    def submit(self, plan) -> None:
        self._delta(plan.delta)
        self.max_tokens = max(self.max_tokens, int(plan.q_len.sum()))
        self.max_rows = max(self.max_rows, len(plan.slots))
        self.trail.append((plan.slots.tolist(), plan.q_len.tolist()))
        rows = plan.slots[plan.draft == 0] if len(plan.draft) else plan.slots
        assert len(set(rows.tolist())) == len(rows), "a slot twice in a step, and not for a draft"
        drafted = self._draft(plan)
        assert (plan.q_len > 0).all() and (np.diff(plan.q_len > 1).clip(-1, 1) >= 0).all(), "one-token rows come first"
        if plan.id in self.fail_at:
            self.stopped[plan.slots] = True  # their KV is not written: no later step may go on from it
            n = len(plan.samples)
            z = np.zeros(n, np.int32)
            error = (StepError("step", "sim", "planned failure"),)
            self.results.append(StepResult(plan.id, plan.slots[plan.samples], z, z, z.astype(np.uint8), errors=error))
            return
        where = [(plan.slots[r], plan.computed[r] + i + 1) for r, count in plan.prompt for i in range(count)]
        tokens = np.array([self.tokens[slot, n] for slot, n in where], np.int32)
        prompt = self._logprobs(where, tokens, plan.prompt_topk) if where else None
        for slot, q, computed in zip(plan.slots, plan.q_len, plan.computed, strict=True):
            if not self.stopped[slot]:
                self._row(slot, int(q), int(computed))
        n = len(plan.samples)
        tokens, count, flags = np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(n, np.uint8)
        for i, r in enumerate(plan.samples):
            slot = plan.slots[r]
            if self.stopped[slot]:
                flags[i] = OVERSHOOT if not len(plan.draft) or not plan.draft[r] else 0
                continue
            if len(plan.draft) and plan.draft[r] and not self._holds(slot, int(plan.computed[r])):
                continue
            assert self.known[slot] == plan.computed[r] + plan.q_len[r]
            tokens[i] = next_token(self.tokens[slot, : self.known[slot]], self.sample[slot])
            if i in plan.host or i in plan.held:
                continue
            count[i], flags[i] = 1, self._commit(slot, tokens[i])
        logits = np.zeros((len(plan.host), VOCAB), np.float32)
        logits[np.arange(len(plan.host)), tokens[plan.host]] = 1.0
        where = list(zip(plan.slots[plan.samples], (plan.computed + plan.q_len)[plan.samples], strict=True))
        lp = self._logprobs(where, tokens, plan.topk) if plan.topk >= 0 else None
        result = StepResult(
            plan.id,
            plan.slots[plan.samples],
            tokens,
            count,
            flags,
            logprobs=lp,
            prompt=prompt,
            logits=logits,
            drafted=drafted,
        )
        if len(plan.late):
            self.held[plan.id] = (plan, result)
        self.results.append(result)

    def _logprobs(self, where, tokens, topk: int) -> LogProbs:
        """``where``: (slot, length of the history)."""
        rows = [logprobs_after(self.tokens[slot, :n]) for slot, n in where]
        values = np.array(rows, np.float32).reshape(-1, VOCAB)
        ids = np.argsort(-values, axis=1, kind="stable")[:, :topk].astype(np.int32)
        chosen = values[np.arange(len(tokens)), tokens]
        rank = (values > chosen[:, None]).sum(axis=1).astype(np.int32) + 1
        return LogProbs(chosen, rank, ids, np.take_along_axis(values, ids, 1))

    def supply(self, step, late) -> None:
        if step not in self.held:
            return  # the step had failed
        plan, result = self.held.pop(step)
        for k, i in enumerate(plan.late):
            bits = np.unpackbits(late.mask[k].view(np.uint8), bitorder="little")[:VOCAB]
            slot = result.slots[i]
            if not bits[result.tokens[i]] and result.count[i]:
                self.known[slot] -= 1
                self.stopped[slot] = False
                result.tokens[i] = int(np.argmax(bits))
                result.flags[i] = self._commit(slot, result.tokens[i])

    def _draft(self, plan) -> np.ndarray:
        """Drafts into the history, of which a share of ``luck`` is right; how many each row has."""
        self.drafts: dict[tuple[int, int], int] = {}
        counts = []
        for r in np.flatnonzero(plan.draft == 1) - 1:
            slot, known = int(plan.slots[r]), int(plan.computed[r]) + 1
            assert (plan.computed[r] + plan.q_len[r], plan.draft[r]) == (known, 0), "a draft behind no row of its slot"
            assert self.known[slot] == known or self.stopped[slot], (
                f"a row with drafts was not at rest: it has {self.known[slot]} tokens, not {known}"
            )
            n = int((plan.slots == slot).sum()) - 1
            assert plan.draft[r : r + n + 1].tolist() == list(range(n + 1)), "drafts of a row do not stand together"
            for at in range(known, known + n):
                history = self.tokens[slot, :at]
                right, chance = next_token(history, self.sample[slot]), zlib.adler32(history.tobytes()) % 97
                self.tokens[slot, at] = self.drafts[slot, at] = (right + (chance >= 97 * self.luck)) % VOCAB
            counts.append(n)
        return np.array(counts, np.int32)

    def _holds(self, slot, at) -> bool:
        """The draft for position ``at`` is what was drawn there, and so were those before it."""
        return self.known[slot] == at + 1 and self.tokens[slot, at] == self.drafts[slot, at]

    def _row(self, slot, q, computed) -> None:
        history, space = self.tokens[slot], zlib.crc32(repr(self.space(slot)).encode())
        for g, window in enumerate(self.windows):
            low = 0 if window is None else max(0, computed - window + 1)
            for p in range(low, computed):
                b = self.table[g, slot, p // self.block]
                assert b > 0, f"group {g} slot {slot}: position {p} has no block"
                assert self.kv[g][b, p % self.block] == fingerprint(history[: p + 1]) ^ space, (
                    f"foreign KV at {p} of slot {slot}"
                )
            for p in range(computed, computed + q):
                b = self.table[g, slot, p // self.block]
                assert b > 0, f"group {g} slot {slot}: position {p}, which is written, has no block"
                self.kv[g][b, p % self.block] = fingerprint(history[: p + 1]) ^ space

    def _commit(self, slot, token) -> int:
        n = self.known[slot]
        self.tokens[slot, n] = token
        self.known[slot] = n + 1
        flags = 0
        if n >= self.min_end[slot] and token in self.stops[slot]:
            flags = EOS if token in self.stops[slot][: self.eos[slot]] else STOP_ID
        if n + 1 >= self.end[slot]:
            flags |= LENGTH
        self.stopped[slot] = bool(flags)
        return flags

    def collect(self, in_flight):
        out = []
        while len(self.results) > in_flight:
            out.append(self.results.popleft())
        return out

    def alive(self) -> bool:
        return True

    def stop(self, deadline=10.0) -> None:
        self.results.clear()


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

    def bind(self, params, prompt_len):
        return Row()


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
    part = Part("sim/sim", "minivllm.testing.sim:Sim", features=("multi_position",))
    wiring = Wiring(
        model_dir="", load_format="dummy", device="cpu", dtype="float32", block=block, max_num_seqs=slots,
        max_num_batched_tokens=budget, max_model_len=max_len, num_blocks=-1, memory_utilization=0.9,
        batch_invariant=False, seed=0, parts={"model": part, "sampler": part, "drafter": part}, drafts=drafts,
        speculate_always=True, eos_ids=(EOS_ID,),
    )  # fmt: skip
    executor = SimExecutor(
        slots, max_len, blocks if isinstance(blocks, list) else [blocks] * len(windows), block, windows, depth
    )
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


__all__ = ["NAN", "Clock", "SimExecutor", "answer", "at_rest", "outputs", "request", "run", "sim_engine"]
