"""Steps made by hand for an executor, transformers' answers for them, and what an executor may leave behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minivllm.core.interfaces.executor import Capacity, Executor, Wiring
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import STOP_IDS, Delta, Join, StepPlan, StepResult, with_drafts
from minivllm.device.worker.build import make_processors

from .tiny import tiny_dir

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
SLOTS, BLOCK, MAX_LEN = 8, 4, 96
NOTHING: Mapping[str, Sequence[float]] = {}
NEAR = 1e-3  # two log-probabilities: sums in another order, nothing else
LAYERS = dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=20, max_window_layers=2)  # two KV groups


@dataclass(frozen=True)
class Tiny:
    """A model on disk, and transformers' model of the same weights."""

    keep: tempfile.TemporaryDirectory
    path: Path
    model: Any


@lru_cache(maxsize=4)
def tiny(seed: int = 0) -> Tiny:
    keep = tempfile.TemporaryDirectory(prefix="minivllm-executor-")
    path, _, model = tiny_dir(Path(keep.name), "qwen2", seed=seed, **LAYERS)
    return Tiny(keep, path, model)


@lru_cache(maxsize=4096)
def logits_after(tokens: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """transformers' logits f32 [V] of the next token."""
    with torch.inference_mode():
        return tiny(seed).model(torch.tensor([tokens])).logits[0, -1]


def greedy(prompt: Sequence[int], n: int, seed: int = 0) -> list[int]:
    out = list(prompt)
    for _ in range(n):
        out.append(int(logits_after(tuple(out), seed).argmax()))
    return out[len(prompt) :]


def prompts(*lengths: int) -> list[list[int]]:
    return [[(7 * i + 11 * n) % 58 + 3 for i in range(n)] for n in lengths]


@dataclass(frozen=True)
class Joining:
    """A sequence that takes a slot with the next plan.  ``drawn``: what it had drawn when it was preempted."""

    slot: int
    prompt: list[int]
    out: int
    stop: tuple[int, ...]
    params: SamplingParams
    drawn: list[int]
    saved: int
    add: Mapping[str, Sequence[float]]  # point -> vector that is added there

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.drawn


class Driver:
    """Makes plans as the engine does, row by row, for sequences whose blocks are chosen from the last one downwards:
    the blocks of a slot lie in a *pile* of its number, unless another one is named; pile ``SLOTS`` is a small one."""

    def __init__(self, executor: Executor, capacity: Capacity, wiring: Wiring) -> None:
        self.executor, self.capacity, self.wiring = executor, capacity, wiring
        self.processors = [made for _, made in make_processors(wiring, capacity.vocab_size)]
        self.known, self.computed, self.end = (np.zeros(SLOTS, np.int32) for _ in range(3))
        self.steps = 0
        self.steered: dict[int, list[int]] = {}  # slot -> numbers of the points at which something is added
        self._forget()

    def _forget(self) -> None:
        self._joins: list[Joining] = []
        self._leave: list[int] = []
        self._forks: list[tuple[int, int, int]] = []
        self._tokens: list[tuple[int, int]] = []
        self._table: list[tuple[int, int, int, int]] = []
        self._copy: list[tuple[int, int, int]] = []
        self._keep: list[tuple[int, int]] = []

    def join(
        self,
        slot: int,
        prompt: Sequence[int],
        out: int,
        stop: tuple[int, ...] = (),
        fault: str = "",
        *,
        tally: bool = False,
        drawn: Sequence[int] = (),
        saved: int = -1,
        pile: int | None = None,
        blocks: int | None = None,
        add: Mapping[str, Sequence[float]] = NOTHING,
    ) -> None:
        """``tally``: each token that it draws tells how many came before (``faulty.CountingProcessor``); ``blocks``:
        how many it gets with its join, which without it are all that it will ever need."""
        extra = {"fault": fault} if fault else {}
        params = SamplingParams(temperature=0, extra={**extra, "tally": True} if tally else extra)
        self._joins.append(Joining(slot, list(prompt), out, stop, params, list(drawn), saved, add))
        self.steered[slot] = [self.point(name) for name in add]
        self.known[slot], self.computed[slot] = len(prompt) + len(drawn), 0
        self.end[slot] = len(prompt) + out
        self.give(slot, range(-(-(len(prompt) + out) // BLOCK) if blocks is None else blocks), pile)

    def point(self, name: str) -> int:
        """Its number in ``Capacity.taps``."""
        return list(self.capacity.taps or ()).index(name)

    def block(self, group: int, pile: int, i: int) -> int:
        return self.capacity.blocks[group] - 1 - pile * -(-MAX_LEN // BLOCK) - i

    def give(self, slot: int, indices: Sequence[int], pile: int | None = None) -> None:
        """Blocks of a pile at these places of a slot's table, in all groups."""
        at = slot if pile is None else pile
        self._table += [(g, slot, i, self.block(g, at, i)) for g in range(len(self.capacity.blocks)) for i in indices]

    def copy(self, source: int, to: int, blocks: int) -> None:
        """The first blocks of a pile into those of another one."""
        pairs = [(g, i) for g in range(len(self.capacity.blocks)) for i in range(blocks)]
        self._copy += [(g, self.block(g, source, i), self.block(g, to, i)) for g, i in pairs]

    def fork(self, source: int, slot: int, sample: int) -> None:
        """A branch with blocks of its own, into which those of its source are copied."""
        self._forks.append((source, slot, sample))
        for column in (self.known, self.computed, self.end):
            column[slot] = column[source]
        self.steered[slot] = self.steered[source]
        self.give(slot, range(-(-int(self.end[slot]) // BLOCK)))
        self.copy(source, slot, -(-int(self.computed[source]) // BLOCK))

    def keep(self, slot: int, seq: int) -> None:
        """Put what the columns of a row alone know aside, for the join that has ``saved=seq``."""
        self._keep.append((slot, seq))

    def leave(self, *slots: int) -> None:
        self._leave += slots

    def token(self, slot: int, token: int) -> None:
        """A token chosen on the host."""
        self._tokens.append((slot, token))
        self.known[slot] += 1

    def plan(
        self,
        rows: Mapping[int, int],
        late: Sequence[int] = (),
        host: Sequence[int] = (),
        topk: int = -1,
        held: Sequence[int] = (),
        prompt: Mapping[int, int] | None = None,
        prompt_topk: int = 0,
        drafts: Mapping[int, int] | None = None,
        guided: Sequence[tuple[int, int, float]] = (),
        taps: Sequence[tuple[str, int, int]] = (),
    ) -> StepPlan:
        """``rows``: slot -> tokens; ``late``, ``host`` and ``held``: slots; ``prompt``: slot -> tokens that are scored;
        ``drafts``: slot -> drafts behind its newest token; ``guided``: (slot, slot of its guide, scale); ``taps``:
        (point, slot, first token that is read).  A row that reaches what is known draws."""
        drafts = drafts or {}
        slots = np.array(sorted(rows, key=lambda s: 2 * (rows[s] != 1) + (s in drafts)), np.int32)
        draft = np.empty(0, np.int32)
        if drafts:
            slots, _, draft = with_drafts(slots, np.array([drafts.get(s, 0) for s in slots.tolist()]))
        q_len = np.array([rows[s] for s in slots.tolist()], np.int32)
        computed = self.computed[slots] + (draft if drafts else 0)
        self.computed[list(rows)] += np.array(list(rows.values()), np.int32)
        samples = np.flatnonzero(self.computed[slots] == self.known[slots]).astype(np.int32)
        drawn = slots[samples].tolist()
        at = lambda chosen: np.array([i for i, s in enumerate(drawn) if s in chosen], np.int32)  # noqa: E731
        self.known[[s for s in set(drawn) if s not in (*host, *held)]] += 1
        self.steps += 1
        pairs = [(drawn.index(row), drawn.index(guide)) for row, guide, _ in guided]
        read = sorted((self.point(p), slots.tolist().index(slot), first) for p, slot, first in taps)
        scored = [(i, prompt[s]) for i, s in enumerate(slots.tolist()) if prompt and s in prompt]
        return StepPlan(
            self.steps,
            slots,
            q_len,
            computed.astype(np.int32),
            samples,
            topk,
            at(late),
            at(host),
            at(held),
            np.array(scored, np.int32).reshape(-1, 2),
            prompt_topk,
            draft,
            delta=self._delta(),
            guided=np.array(pairs, np.int32).reshape(-1, 2),
            scale=np.array([scale for *_, scale in guided], np.float32),
            taps=np.array(read, np.int32).reshape(-1, 3),
            steered=np.array(sorted({n for s in slots.tolist() for n in self.steered.get(s, ())}), np.int32),
        )

    def drafted(self, slot: int, result: StepResult) -> int:
        """How many tokens a row with drafts got, which from now on are known."""
        n = int(result.count[result.slots == slot].sum())
        self.known[slot] += n - 1
        self.computed[slot] += n - 1
        return n

    def submit(self, rows: Mapping[int, int], **more: Any) -> StepPlan:
        plan = self.plan(rows, **more)
        self.executor.submit(plan)
        return plan

    def _delta(self) -> Delta:
        i32 = lambda values, *shape: np.array(values, np.int32).reshape(*shape or (-1,))  # noqa: E731
        delta = Delta(
            join=self._join() if self._joins else None,
            leave=i32(self._leave),
            fork=i32(self._forks, -1, 3),
            table=i32(self._table, -1, 4),
            copy=i32(self._copy, -1, 3),
            token=i32(self._tokens, -1, 2),
            keep=np.array(self._keep, np.int64).reshape(-1, 2),
        )
        self._forget()
        return delta

    def _join(self) -> Join:
        i32 = lambda values: np.array(list(values), np.int32)  # noqa: E731
        joins, n = self._joins, len(self._joins)
        prompt = i32(len(j.prompt) for j in joins)
        stop_ids = np.full((n, STOP_IDS), -1, np.int32)
        for row, j in zip(stop_ids, joins, strict=True):
            row[: len(j.stop)] = j.stop
        prompts = [i32(j.prompt) for j in joins]
        bound = [{i: p.bind_prompt(j.params, prompts[i]) for i, j in enumerate(joins)} for p in self.processors]
        return Join(
            slot=i32(j.slot for j in joins),
            known=i32(len(j.tokens) for j in joins),
            computed=np.zeros(n, np.int32),
            prompt=prompt,
            end=prompt + i32(j.out for j in joins),
            seed=np.zeros(n, np.int64),
            sample=np.zeros(n, np.int32),
            min_end=prompt,
            stop_ids=stop_ids,
            n_eos=np.zeros(n, np.int32),
            tokens=i32(t for j in joins for t in j.tokens),
            bound=tuple({i: row for i, row in rows.items() if row is not None} for rows in bound),
            saved=np.array([j.saved for j in joins], np.int64),
            steer=i32((i, self.point(name)) for i, j in enumerate(joins) for name in j.add).reshape(-1, 2),
            vectors=np.array([x for j in joins for vector in j.add.values() for x in vector], np.float32),
        )

    def generate(self, items: Sequence[Sequence[int]], n: int, ahead: int = 0, chunk: int = 7) -> list[list[int]]:
        """n greedy tokens for each prompt, in slots 0, 1 ..., with ``ahead`` steps in flight beside the newest."""
        for slot, prompt in enumerate(items):
            self.join(slot, prompt, n)
        slots, flights = range(len(items)), Counter()
        out: list[list[int]] = [[] for _ in items]
        while True:
            lack = {s: int(self.known[s] - self.computed[s]) for s in slots if self.known[s] < self.end[s]}
            if not lack:
                break
            plan = self.submit({s: min(q, chunk) for s, q in lack.items()})
            flights[plan.id] += 1
            self._take(self.executor.collect(ahead), out)
        self._take(self.executor.collect(0), out)
        self.leave(*slots)
        return out

    def _take(self, results: Sequence[StepResult], out: list[list[int]]) -> None:
        for result in results:
            assert not result.errors, f"step {result.id} failed: {result.errors}"
            for slot, token, count in zip(result.slots, result.tokens, result.count, strict=True):
                out[slot] += [int(token)] * int(count)


def check_result(plan: StepPlan, result: StepResult, vocab: int) -> None:
    """Shapes and ranges that hold for every result."""
    n = len(plan.samples)
    assert result.id == plan.id, f"step {result.id} where {plan.id} was due"
    for name in ("slots", "tokens", "count", "flags"):
        shape = np.shape(getattr(result, name))
        assert shape == (n,), f"step {plan.id}: {name} has shape {shape}, and {n} rows draw"
    assert (result.slots == plan.slots[plan.samples]).all(), f"step {plan.id}: slots {result.slots} are not the plan's"
    assert ((result.tokens >= 0) & (result.tokens < vocab)).all(), f"step {plan.id}: tokens {result.tokens}"
    asked, lp = plan.topk >= 0, result.logprobs
    assert (lp is not None) == asked, f"step {plan.id}: topk={plan.topk}, and logprobs is {lp}"
    if lp is not None:
        enough = len(lp.top) == len(lp.top_ids) == n and min(lp.top.shape[1], lp.top_ids.shape[1]) >= plan.topk
        assert len(lp.chosen) == len(lp.rank) == n and enough, f"step {plan.id}: {n} rows draw, logprobs are {lp}"
    assert np.isin(result.count, (0, 1)).all(), f"step {plan.id}: count {result.count}, want 0 or 1"


def check_logprobs(
    plans: Sequence[StepPlan],
    results: Sequence[StepResult],
    known: Sequence[list[int]],
    vocab: int,
    after: Callable[[Sequence[int]], torch.Tensor],
) -> None:
    """Log-probabilities of greedy rows are those of the logits ``after`` their tokens; ``known``: slot -> its tokens
    before the steps."""
    for plan, result in zip(plans, results, strict=True):
        check_result(plan, result, vocab)
        for j, slot in enumerate(result.slots.tolist()):
            want, token = after(known[slot]).log_softmax(-1), int(result.tokens[j])
            known[slot].append(token)
            if (lp := result.logprobs) is None:
                continue
            best, where = want.topk(plan.topk), f"step {plan.id}, row {j}, slot {slot}: {lp}; want"
            assert abs(lp.chosen[j] - want[token]) < NEAR and lp.rank[j] == 1, f"{where} {want[token]}, the best"
            assert np.allclose(lp.top[j, : plan.topk], best.values, atol=NEAR), f"{where} {best.values}"
            assert lp.top_ids[j, : plan.topk].tolist() == best.indices.tolist(), f"{where} tokens {best.indices}"


def check_error(result: StepResult, scope: str, plugin: str, words: str) -> None:
    """One error of this scope, which names what failed and keeps its words."""
    assert len(result.errors) == 1, f"step {result.id} has the errors {result.errors}: want one"
    e = result.errors[0]
    assert e.scope == scope, f"scope {e.scope!r}: want {scope!r}"
    assert plugin in e.plugin, f"plugin {e.plugin!r}: want the name of what failed, {plugin}"
    assert words in e.message, f"message {e.message!r}: want its words, {words!r}"


def by_slot(result: StepResult, what: str = "tokens") -> dict[int, int]:
    return dict(zip(result.slots.tolist(), getattr(result, what).tolist(), strict=True))


def belongings() -> dict[str, Counter]:
    """What this process has: threads, child processes, open files, shared memory, memory of the GPU."""
    found = {"threads": Counter(t.name for t in threading.enumerate()), "processes": Counter(), "files": Counter()}
    proc = Path("/proc/self/fd")
    for fd in proc.iterdir() if proc.is_dir() else ():
        try:
            found["files"][os.readlink(fd)] += 1
        except OSError:  # the one that lists them
            continue
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().partition(" (")[2]
        except OSError:  # it has ended meanwhile
            continue
        if rest.rpartition(") ")[2].split()[1] == str(os.getpid()):
            found["processes"][rest.rpartition(") ")[0]] += 1
    shm = Path("/dev/shm")
    found["shared memory"] = Counter(p.name for p in shm.iterdir()) if shm.is_dir() else Counter()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        found["bytes of GPU memory"] = Counter({"": torch.cuda.memory_allocated()})
    return found


def profile_ended() -> bool:
    """Ends torch's profiler of this process if it runs, which would trace all that follows; True if it did."""
    running = torch.autograd._profiler_enabled()
    if running:
        torch.autograd._disable_profiler()
    return running


def left_behind(before: dict[str, Counter], patience: float = 3.0) -> dict[str, Any]:
    """What is there now and was not before; waits a little, because a thread needs a moment to end."""
    end = time.monotonic() + patience
    while True:
        now = belongings()
        more = {what: dict(now[what] - before[what]) for what in now if now[what] - before[what]}
        if "shared memory" in more:
            theirs = of_others(more["shared memory"], os.getpid())
            more["shared memory"] = {name: 1 for name in more["shared memory"] if name not in theirs}
            more = {what: names for what, names in more.items() if names}
        if not more or time.monotonic() > end:
            return more
        time.sleep(0.02)


def of_others(names: Iterable[str], process: int) -> set[str]:
    """Those files of /dev/shm that are mapped by a process which runs beside ``process``, such as another test: neither
    this one, nor a process that it began, nor one whose parent has ended, which it may have begun."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(") ")[2].split()[1])
    found: set[str] = set()
    for pid, parent in parents.items():
        above = [pid]
        while above[-1] in parents:
            above.append(parents[above[-1]])
        if process in above or parent <= 1:
            continue
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found.update(name for name in names if f"/dev/shm/{name}" in maps)
    return found
