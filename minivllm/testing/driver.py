"""Tools for the suite of executors: hand-made step plans, expected tokens from transformers, and resources of a
process.
"""

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

torch.set_num_threads(1)  # use one thread, because several threads only wait for each other on tiny tensors
SLOTS = 8
BLOCK = 4  # number of tokens of a block
MAX_LEN = 96  # most tokens of a sequence
NOTHING: Mapping[str, Sequence[float]] = {}
NEAR = 1e-3  # allowed difference of log-probabilities, for sums in another order
LAYERS = dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=20, max_window_layers=2)  # two KV groups


@dataclass(frozen=True)
class Tiny:
    """A small model in a folder on disk, and the same model in transformers."""

    keep: tempfile.TemporaryDirectory
    path: Path
    model: Any


@lru_cache(maxsize=4)
def tiny(seed: int = 0) -> Tiny:
    """Return a small model with random weights that depend on the seed."""
    keep = tempfile.TemporaryDirectory(prefix="minivllm-executor-")
    path, _, model = tiny_dir(Path(keep.name), "qwen2", seed=seed, **LAYERS)
    return Tiny(keep, path, model)


@lru_cache(maxsize=4096)
def logits_after(tokens: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return the logits of the next token by transformers, float32 [V].

    ``tokens`` are all tokens before it, and ``seed`` chooses the weights of the small model.
    """
    with torch.inference_mode():
        return tiny(seed).model(torch.tensor([tokens])).logits[0, -1]


def greedy(prompt: Sequence[int], n: int, seed: int = 0) -> list[int]:
    """Return the n most likely tokens after a prompt, one after another, computed by transformers."""
    tokens = list(prompt)
    for _ in range(n):
        token = int(logits_after(tuple(tokens), seed).argmax())
        tokens.append(token)
    return tokens[len(prompt) :]


def prompts(*lengths: int) -> list[list[int]]:
    """Return a different prompt for each of the lengths."""
    return [[(7 * i + 11 * n) % 58 + 3 for i in range(n)] for n in lengths]


def int32(values: Iterable[Any], *shape: int) -> np.ndarray:
    """Return values as an int32 array of a shape, which is one-dimensional if none is given."""
    array = np.array(list(values), np.int32)
    return array.reshape(*shape or (-1,))


@dataclass(frozen=True)
class Joining:
    """A sequence that enters a slot of the executor with the next step plan."""

    slot: int
    prompt: list[int]
    out: int  # largest number of tokens to generate
    stop: tuple[int, ...]
    params: SamplingParams
    drawn: list[int]  # tokens that were generated before the sequence was preempted
    saved: int  # id of the sequence whose saved processor columns are restored, or -1
    add: Mapping[str, Sequence[float]]  # tap point of the model -> vector that is added there

    @property
    def tokens(self) -> list[int]:
        """Return the prompt and the generated tokens."""
        return self.prompt + self.drawn


class Driver:
    """Build the step plans for an executor, as the engine does, and keep the state of the sequence in each slot.

    The blocks of the cache are divided into *piles*, from the last block downwards.  A pile has room for a sequence of
    ``MAX_LEN`` tokens.  Slot i uses pile i, unless another pile is given.  Pile ``SLOTS`` is smaller.
    """

    def __init__(self, executor: Executor, capacity: Capacity, wiring: Wiring) -> None:
        self.executor = executor
        self.capacity = capacity
        self.wiring = wiring
        self.processors = [processor for _, processor in make_processors(wiring, capacity.vocab_size)]
        self.known = np.zeros(SLOTS, np.int32)  # number of known tokens in each slot
        self.computed = np.zeros(SLOTS, np.int32)  # number of tokens in each slot whose keys are in the cache
        self.end = np.zeros(SLOTS, np.int32)  # largest length of the sequence in each slot
        self.steps = 0
        # slot -> indices of the tap points at which a vector is added to the row
        self.steered: dict[int, list[int]] = {}
        self._start_delta()

    def _start_delta(self) -> None:
        """Clear the list of changes for the next plan, after a plan has included them."""
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
        """Put a new sequence into a slot with the next plan.

        ``out`` is the number of tokens to generate, ``stop`` the stop ids.  ``fault`` makes the processor
        ``faulty.Faulty`` raise. ``tally`` makes the sequence draw the count of its earlier tokens
        (``faulty.CountingProcessor``).  ``drawn`` and ``saved`` are for a preempted sequence: its generated tokens,
        and the id under which its columns were saved.  ``blocks`` is the number of blocks that the sequence gets with
        this plan; None means all that it will need.
        """
        extra: dict[str, Any] = {}
        if fault:
            extra["fault"] = fault
        if tally:
            extra["tally"] = True
        params = SamplingParams(temperature=0, extra=extra)
        joining = Joining(slot, list(prompt), out, stop, params, list(drawn), saved, add)
        self._joins.append(joining)
        self.steered[slot] = [self.point(name) for name in add]
        self.known[slot] = len(prompt) + len(drawn)
        self.computed[slot] = 0
        self.end[slot] = len(prompt) + out
        needed = -(-(len(prompt) + out) // BLOCK)
        indices = range(needed if blocks is None else blocks)
        self.give(slot, indices, pile)

    def point(self, name: str) -> int:
        """Return the index of a tap point of the model in ``Capacity.taps``."""
        return list(self.capacity.taps or ()).index(name)

    def block(self, group: int, pile: int, i: int) -> int:
        """Return the number of the i-th block of a pile in a KV group."""
        size = -(-MAX_LEN // BLOCK)
        return self.capacity.blocks[group] - 1 - pile * size - i

    def give(self, slot: int, indices: Sequence[int], pile: int | None = None) -> None:
        """Set entries of a slot's block table to blocks of a pile, in all KV groups.

        ``indices`` are the positions in the table and in the pile.  ``pile`` None means the pile with the slot's
        number.
        """
        source = slot if pile is None else pile
        for group in range(len(self.capacity.blocks)):
            self._table += [(group, slot, i, self.block(group, source, i)) for i in indices]

    def copy(self, source: int, to: int, blocks: int) -> None:
        """Make the next plan copy the first ``blocks`` blocks of pile ``source`` to pile ``to``."""
        for group in range(len(self.capacity.blocks)):
            for i in range(blocks):
                self._copy.append((group, self.block(group, source, i), self.block(group, to, i)))

    def fork(self, source: int, slot: int, sample: int) -> None:
        """Make the next plan start a branch of the sequence in slot ``source`` in another slot, with copied blocks.

        ``sample`` is the branch's sample number.
        """
        self._forks.append((source, slot, sample))
        for column in (self.known, self.computed, self.end):
            column[slot] = column[source]
        self.steered[slot] = self.steered[source]
        indices = range(-(-int(self.end[slot]) // BLOCK))
        self.give(slot, indices)
        computed = -(-int(self.computed[source]) // BLOCK)
        self.copy(source, slot, computed)

    def keep(self, slot: int, seq: int) -> None:
        """Make the next plan save the kept processor columns of a slot, for a later join with ``saved=seq``."""
        self._keep.append((slot, seq))

    def leave(self, *slots: int) -> None:
        """Remove the sequences from some slots with the next plan."""
        self._leave += slots

    def token(self, slot: int, token: int) -> None:
        """Append a token that the host has chosen to the sequence in a slot."""
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
        pooled: Sequence[tuple[int, int, int]] = (),
    ) -> StepPlan:
        """Return the plan of the next step.

        ``rows`` has slot -> number of tokens.  A row that reaches the end of its known tokens draws the next one.
        ``late``, ``host`` and ``held`` are slots: of rows whose masks come later, whose token the host chooses, and
        that draw nothing.  ``prompt`` has slot -> number of prompt tokens to score.  ``drafts`` has slot -> number of
        drafts after the newest token.  ``guided`` has (slot, slot of the guide, scale).  ``taps`` has (tap point,
        slot, first token to read).  ``pooled`` has (slot, first token, number of tokens) of rows that draw nothing.
        """
        drafts = drafts or {}
        slots = int32(sorted(rows, key=lambda slot: 2 * (rows[slot] != 1) + (slot in drafts)))
        computed = self.computed[slots]
        draft = np.empty(0, np.int32)
        if drafts:
            slots, _, draft = with_drafts(slots, np.array([drafts.get(slot, 0) for slot in slots.tolist()]))
            computed = self.computed[slots] + draft
        in_step = slots.tolist()
        self.computed[list(rows)] += int32(rows.values())
        draws = (self.computed[slots] == self.known[slots]) & ~np.isin(slots, [slot for slot, *_ in pooled])
        samples = int32(np.flatnonzero(draws))
        drawing = slots[samples].tolist()

        def drawing_rows(chosen: Sequence[int]) -> np.ndarray:
            return int32(i for i, slot in enumerate(drawing) if slot in chosen)

        self.known[[slot for slot in set(drawing) if slot not in (*host, *held)]] += 1
        self.steps += 1
        guides = [(drawing.index(slot), drawing.index(guide)) for slot, guide, _ in guided]
        scored = [(i, prompt[slot]) for i, slot in enumerate(in_step) if slot in prompt] if prompt else []
        return StepPlan(
            self.steps,
            slots,
            int32(rows[slot] for slot in in_step),
            computed.astype(np.int32),
            samples,
            topk,
            drawing_rows(late),
            drawing_rows(host),
            drawing_rows(held),
            int32(scored, -1, 2),
            prompt_topk,
            draft,
            delta=self._delta(),
            guided=int32(guides, -1, 2),
            scale=np.array([scale for *_, scale in guided], np.float32),
            **self._reads(in_step, taps, pooled),
        )

    def _reads(self, in_step: list[int], taps: Sequence[Any], pooled: Sequence[Any]) -> dict[str, np.ndarray]:
        """Return the fields ``taps``, ``steered`` and ``pooled`` of a plan.

        ``in_step`` has the slots of the step's rows.  The other arguments are those of ``plan``.
        """
        read = []
        for name, slot, first in taps:
            read.append((self.point(name), in_step.index(slot), first))
        read.sort()
        steered = {point for slot in in_step for point in self.steered.get(slot, ())}
        sums = [(in_step.index(slot), first, count) for slot, first, count in pooled]
        columns = {"taps": int32(read, -1, 3), "steered": int32(sorted(steered))}
        columns["pooled"] = int32(sums, -1, 3)
        return columns

    def drafted(self, slot: int, result: StepResult) -> int:
        """Append the accepted tokens of a row with drafts to its known tokens, and return their number."""
        n = int(result.count[result.slots == slot].sum())
        self.known[slot] += n - 1
        self.computed[slot] += n - 1
        return n

    def submit(self, rows: Mapping[int, int], **options: Any) -> StepPlan:
        """Submit the next step to the executor and return its plan; ``options`` are keyword arguments of ``plan``."""
        plan = self.plan(rows, **options)
        self.executor.submit(plan)
        return plan

    def _delta(self) -> Delta:
        """Return the changes since the last plan, and start a new list of changes."""
        delta = Delta(
            join=self._join() if self._joins else None,
            leave=int32(self._leave),
            fork=int32(self._forks, -1, 3),
            table=int32(self._table, -1, 4),
            copy=int32(self._copy, -1, 3),
            token=int32(self._tokens, -1, 2),
            keep=np.array(self._keep, np.int64).reshape(-1, 2),
        )
        self._start_delta()
        return delta

    def _join(self) -> Join:
        """Return the new sequences of the next plan in the form of the executor's contract."""
        joins = self._joins
        n = len(joins)
        prompt = int32(len(j.prompt) for j in joins)
        stop_ids = np.full((n, STOP_IDS), -1, np.int32)
        for row, j in zip(stop_ids, joins, strict=True):
            row[: len(j.stop)] = j.stop
        bound = []
        for processor in self.processors:
            rows = {}
            for i, joining in enumerate(joins):
                rows[i] = processor.bind_prompt(joining.params, int32(joining.prompt))
            kept = {i: row for i, row in rows.items() if row is not None}
            bound.append(kept)
        steer = [(i, self.point(name)) for i, j in enumerate(joins) for name in j.add]
        vectors = [vector for j in joins for vector in j.add.values()]
        return Join(
            slot=int32(j.slot for j in joins),
            known=int32(len(j.tokens) for j in joins),
            computed=np.zeros(n, np.int32),
            prompt=prompt,
            end=prompt + int32(j.out for j in joins),
            seed=np.zeros(n, np.int64),
            sample=np.zeros(n, np.int32),
            min_end=prompt,
            stop_ids=stop_ids,
            n_eos=np.zeros(n, np.int32),
            tokens=int32(token for j in joins for token in j.tokens),
            bound=tuple(bound),
            saved=np.array([j.saved for j in joins], np.int64),
            steer=int32(steer, -1, 2),
            vectors=np.array(vectors, np.float32).ravel(),
        )

    def generate(self, items: Sequence[Sequence[int]], n: int, ahead: int = 0, chunk: int = 7) -> list[list[int]]:
        """Return n greedy tokens after each prompt; prompt i is in slot i.

        ``ahead`` steps are in flight besides the newest one.  A step computes at most ``chunk`` tokens of a prompt.
        """
        for slot, prompt in enumerate(items):
            self.join(slot, prompt, n)
        slots = range(len(items))
        tokens: list[list[int]] = [[] for _ in items]
        while True:
            lengths = {}
            for s in slots:
                if self.known[s] < self.end[s]:
                    lengths[s] = int(self.known[s] - self.computed[s])
            if not lengths:
                break
            rows = {slot: min(length, chunk) for slot, length in lengths.items()}
            self.submit(rows)
            self._add_tokens(self.executor.collect(ahead), tokens)
        self._add_tokens(self.executor.collect(0), tokens)
        self.leave(*slots)
        return tokens

    def _add_tokens(self, results: Sequence[StepResult], tokens: list[list[int]]) -> None:
        """Append the tokens of some step results, none of which may have failed, to the token list of each slot."""
        for result in results:
            assert not result.errors, f"step {result.id} failed: {result.errors}"
            for slot, token, count in zip(result.slots, result.tokens, result.count, strict=True):
                tokens[slot] += [int(token)] * int(count)


def check_result(plan: StepPlan, result: StepResult, vocab: int) -> None:
    """Fail unless the result of a step has the shapes and value ranges that the contract demands for its plan."""
    n = len(plan.samples)
    step = f"step {plan.id}"
    assert result.id == plan.id, f"the result of step {result.id} came, expected step {plan.id}"
    for name in ("slots", "tokens", "count", "flags"):
        shape = np.shape(getattr(result, name))
        assert shape == (n,), f"{step}: {name} has shape {shape}, but {n} rows draw"
    assert (result.slots == plan.slots[plan.samples]).all(), f"{step}: slots {result.slots} are not the plan's"
    assert ((result.tokens >= 0) & (result.tokens < vocab)).all(), f"{step}: tokens {result.tokens}"
    logprobs = result.logprobs
    assert (logprobs is not None) == (plan.topk >= 0), f"{step}: topk={plan.topk}, but logprobs is {logprobs}"
    if logprobs is not None:
        columns = (logprobs.chosen, logprobs.rank, logprobs.top, logprobs.top_ids)
        complete = all(len(column) == n for column in columns)
        wide = all(table.shape[1] >= plan.topk for table in (logprobs.top, logprobs.top_ids))
        assert complete and wide, f"{step}: {n} rows draw, logprobs are {logprobs}"
    assert np.isin(result.count, (0, 1)).all(), f"{step}: count {result.count}, expected 0 or 1"


def check_logprobs(
    plans: Sequence[StepPlan],
    results: Sequence[StepResult],
    known: Sequence[list[int]],
    vocab: int,
    after: Callable[[Sequence[int]], torch.Tensor],
) -> None:
    """Fail unless the log-probabilities of greedy rows are those that the model computes.

    ``known`` has the tokens of each slot before the steps.  ``after`` returns the logits after some tokens.
    """
    for plan, result in zip(plans, results, strict=True):
        check_result(plan, result, vocab)
        for row, slot in enumerate(result.slots.tolist()):
            expected = after(known[slot]).log_softmax(-1)
            token = int(result.tokens[row])
            known[slot].append(token)
            if result.logprobs is not None:
                place = f"step {plan.id}, row {row}, slot {slot}"
                assert result.logprobs.rank[row] == 1, f"{place}: {result.logprobs}; the token must have rank 1"
                check_scores(result.logprobs, row, expected, token, plan.topk, place)


def check_scores(scores: Any, row: int, expected: torch.Tensor, token: int, k: int, place: str) -> None:
    """Fail unless a row of ``scores`` has the log-probabilities of one token and of the k best tokens.

    ``expected`` has the log-probabilities of all tokens, float32 [V].  ``place`` names the row in messages.
    """
    best = expected.topk(k)
    chosen = expected[token]
    assert abs(scores.chosen[row] - chosen) < NEAR, f"{place}: {scores}; expected {chosen} for token {token}"
    ids = scores.top_ids[row, :k].tolist()
    assert ids == best.indices.tolist(), f"{place}: the best tokens are {ids}; expected {best.indices.tolist()}"
    top = scores.top[row, :k]
    assert np.allclose(top, best.values, atol=NEAR), f"{place}: log-probabilities {top}; expected {best.values}"


def check_error(result: StepResult, scope: str, plugin: str, words: str) -> None:
    """Fail unless a step result has exactly one error, with the given scope and plug-in name.

    Its message must contain ``words``, the text of the plug-in's exception.
    """
    assert len(result.errors) == 1, f"step {result.id} has the errors {result.errors}: expected one"
    error = result.errors[0]
    assert error.scope == scope, f"scope {error.scope!r}: expected {scope!r}"
    assert plugin in error.plugin, f"plugin {error.plugin!r}: expected the name of the plug-in that raised, {plugin}"
    assert words in error.message, f"message {error.message!r}: expected the words of the exception, {words!r}"


def by_slot(result: StepResult, field: str = "tokens") -> dict[int, int]:
    """Return slot -> value of a field, for the rows of a step result."""
    values = getattr(result, field).tolist()
    return dict(zip(result.slots.tolist(), values, strict=True))


def belongings() -> dict[str, Counter]:
    """Count the resources of this process: threads, child processes, open files, shared memory and GPU memory."""
    found = {"threads": Counter(thread.name for thread in threading.enumerate())}
    found["files"] = Counter()
    fds = Path("/proc/self/fd")
    for fd in fds.iterdir() if fds.is_dir() else ():
        # the open descriptor that listed the folder is closed by now, so it cannot be read
        with contextlib.suppress(OSError):
            found["files"][os.readlink(fd)] += 1
    children = []
    for name, parent in _processes().values():
        if parent == os.getpid():
            children.append(name)
    found["processes"] = Counter(children)
    shm = Path("/dev/shm")
    if shm.is_dir():
        found["shared memory"] = Counter(path.name for path in shm.iterdir())
    else:
        found["shared memory"] = Counter()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        found["bytes of GPU memory"] = Counter({"": torch.cuda.memory_allocated()})
    return found


def _processes() -> dict[int, tuple[str, int]]:
    """Return process id -> (name, id of the parent process) for all processes of this machine."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has ended meanwhile cannot be read
            name, _, fields = stat.read_text().partition(" (")[2].rpartition(") ")
            found[int(stat.parent.name)] = name, int(fields.split()[1])
    return found


def profile_ended() -> bool:
    """End torch's profiler of this process, which would trace all later code, and return whether it was running."""
    running = torch.autograd._profiler_enabled()
    if running:
        torch.autograd._disable_profiler()
    return running


def left_behind(before: dict[str, Counter], patience: float = 3.0) -> dict[str, Any]:
    """Return the resources of this process that were not in ``before``, a result of ``belongings``.

    Wait up to ``patience`` seconds for them to disappear, because a thread needs a moment to end.
    """
    end = time.monotonic() + patience
    while True:
        now = belongings()
        more = {kind: dict(now[kind] - before[kind]) for kind in now}
        if more["shared memory"]:
            foreign = of_others(more["shared memory"], os.getpid())
        else:
            foreign = set()
        more["shared memory"] = {name: 1 for name in more["shared memory"] if name not in foreign}
        more = {kind: names for kind, names in more.items() if names}
        if not more or time.monotonic() > end:
            return more
        time.sleep(0.02)


def of_others(names: Iterable[str], process: int) -> set[str]:
    """Return the files of /dev/shm among ``names`` that an unrelated process has mapped, such as another test.

    A process is related if it is ``process``, was started by it, or has lost its parent, because ``process`` may have
    started it.
    """
    parents = {pid: parent for pid, (_, parent) in _processes().items()}
    found: set[str] = set()
    for pid, parent in parents.items():
        ancestors = [pid]
        while ancestors[-1] in parents:
            ancestors.append(parents[ancestors[-1]])
        if process in ancestors or parent <= 1:
            continue
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found.update(name for name in names if f"/dev/shm/{name}" in maps)
    return found
