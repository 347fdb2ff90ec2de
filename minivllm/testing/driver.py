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
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minivllm.core.interfaces.executor import Capacity, Executor, Wiring
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.plan import STOP_IDS, Delta, Join, LateInputs, StepPlan, StepResult, with_drafts
from minivllm.device.worker.build import make_processors

from .tiny import tiny_dir

torch.set_num_threads(1)  # use one thread, because several threads only wait for each other on tiny tensors
SLOTS = 8
BLOCK = 4  # number of tokens of a block
MAX_LEN = 96  # most tokens of a sequence
Vectors = Mapping[str, Sequence[float]]  # tap point of the model -> vector that is added there
NOTHING: Vectors = {}
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
    folder = Path(keep.name)
    path, _, model = tiny_dir(folder, "qwen2", seed=seed, **LAYERS)
    return Tiny(keep, path, model)


@lru_cache(maxsize=4096)
def logits_after(tokens: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return the logits of the next token by transformers, float32 [V].

    ``tokens`` are all tokens before it, and ``seed`` chooses the weights of the small model.
    """
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        logits = tiny(seed).model(ids).logits
        return logits[0, -1]


@torch.inference_mode()
def output_of(tokens: Sequence[int]) -> Any:
    """Return the output of transformers for some tokens, with its logits and hidden states; a batch of one row."""
    ids = torch.tensor([list(tokens)])
    return tiny().model(ids, output_hidden_states=True)


def greedy(prompt: Sequence[int], n: int, seed: int = 0) -> list[int]:
    """Return the n most likely tokens after a prompt, one after another, computed by transformers."""
    tokens = list(prompt)
    for _ in range(n):
        logits = logits_after(tuple(tokens), seed)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def prompts(*lengths: int) -> list[list[int]]:
    """Return a different prompt for each of the lengths."""
    found = []
    for n in lengths:
        prompt = [(7 * i + 11 * n) % 58 + 3 for i in range(n)]
        found.append(prompt)
    return found


def int32(values: Iterable[Any], *shape: int) -> np.ndarray:
    """Return values as an int32 array of a shape, which is one-dimensional if none is given."""
    array = np.array(list(values), np.int32)
    return array.reshape(*shape or (-1,))


def blocks_of(tokens: int) -> int:
    """Return the number of blocks that a number of tokens fills or begins."""
    return -(-tokens // BLOCK)


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
    add: Vectors

    @property
    def tokens(self) -> list[int]:
        """Return the prompt and the generated tokens."""
        return self.prompt + self.drawn


@dataclass(frozen=True)
class StepOptions:
    """The options of a step plan of ``Driver``: the rows that do more than compute their tokens and draw the next one.

    ``late``, ``host`` and ``held`` are slots.
    """

    late: Sequence[int] = ()  # rows whose masks come after the plan
    host: Sequence[int] = ()  # rows whose token the host chooses
    held: Sequence[int] = ()  # rows that draw nothing
    topk: int = -1
    prompt: Mapping[int, int] = field(default_factory=dict)  # slot -> number of prompt tokens to score
    prompt_topk: int = 0
    drafts: Mapping[int, int] = field(default_factory=dict)  # slot -> number of drafts after the newest token
    guided: Sequence[tuple[int, int, float]] = ()  # (slot, slot of the guide, scale)
    taps: Sequence[tuple[str, int, int]] = ()  # (tap point, slot, first token to read)
    pooled: Sequence[tuple[int, int, int]] = ()  # (slot, first token, number of tokens) of rows that draw nothing


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
        add: Vectors = NOTHING,
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
        self.known[slot] = len(joining.tokens)
        self.computed[slot] = 0
        end = len(prompt) + out
        self.end[slot] = end
        if blocks is None:
            blocks = blocks_of(end)
        self.give(slot, range(blocks), pile)

    def point(self, name: str) -> int:
        """Return the index of a tap point of the model in ``Capacity.taps``."""
        points = self.capacity.taps or ()
        return list(points).index(name)

    def block(self, group: int, pile: int, i: int) -> int:
        """Return the number of the i-th block of a pile in a KV group."""
        last = self.capacity.blocks[group] - 1
        return last - pile * blocks_of(MAX_LEN) - i

    def give(self, slot: int, indices: Sequence[int], pile: int | None = None) -> None:
        """Set entries of a slot's block table to blocks of a pile, in all KV groups.

        ``indices`` are the positions in the table and in the pile.  ``pile`` None means the pile with the slot's
        number.
        """
        source = slot if pile is None else pile
        for group in range(len(self.capacity.blocks)):
            for i in indices:
                block = self.block(group, source, i)
                self._table.append((group, slot, i, block))

    def copy(self, source: int, to: int, blocks: int) -> None:
        """Make the next plan copy the first ``blocks`` blocks of pile ``source`` to pile ``to``."""
        for group in range(len(self.capacity.blocks)):
            for i in range(blocks):
                old = self.block(group, source, i)
                new = self.block(group, to, i)
                self._copy.append((group, old, new))

    def fork(self, source: int, slot: int, sample: int) -> None:
        """Make the next plan start a branch of the sequence in slot ``source`` in another slot, with copied blocks.

        ``sample`` is the branch's sample number.
        """
        self._forks.append((source, slot, sample))
        for column in (self.known, self.computed, self.end):
            column[slot] = column[source]
        self.steered[slot] = self.steered[source]
        needed = blocks_of(int(self.end[slot]))
        self.give(slot, range(needed))
        computed = blocks_of(int(self.computed[source]))
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

    def plan(self, rows: Mapping[int, int], **options: Any) -> StepPlan:
        """Return the plan of the next step.

        ``rows`` has slot -> number of tokens.  A row that reaches the end of its known tokens draws the next one.
        ``options`` are fields of ``StepOptions``.
        """
        chosen = StepOptions(**options)
        slots, computed, draft = self._order(rows, chosen.drafts)
        in_step = slots.tolist()
        self.computed[list(rows)] += int32(rows.values())
        complete = self.computed[slots] == self.known[slots]
        pooling = [slot for slot, *_ in chosen.pooled]
        draws = complete & ~np.isin(slots, pooling)
        samples = int32(np.flatnonzero(draws))
        drawing = slots[samples].tolist()
        waiting = {*chosen.host, *chosen.held}
        self.known[list(set(drawing) - waiting)] += 1
        self.steps += 1
        return StepPlan(
            self.steps,
            slots,
            int32(rows[slot] for slot in in_step),
            computed,
            samples,
            chosen.topk,
            prompt_topk=chosen.prompt_topk,
            draft=draft,
            delta=self._delta(),
            **_of_drawing_rows(drawing, chosen),
            **self._reads(in_step, chosen),
        )

    def _order(self, rows: Mapping[int, int], drafts: Mapping[int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the slot, the number of computed tokens and the number of the draft of each row of a step.

        Rows of one token come first, and rows with drafts after other rows of one token.
        """

        def place(slot: int) -> int:
            if rows[slot] != 1:
                return 2
            return int(slot in drafts)

        slots = int32(sorted(rows, key=place))
        if not drafts:
            no_draft = np.empty(0, np.int32)
            return slots, self.computed[slots], no_draft
        counts = [drafts.get(slot, 0) for slot in slots.tolist()]
        slots, _, draft = with_drafts(slots, np.array(counts))
        computed = self.computed[slots] + draft
        return slots, computed.astype(np.int32), draft

    def _reads(self, in_step: list[int], chosen: StepOptions) -> dict[str, np.ndarray]:
        """Return the fields ``prompt``, ``taps``, ``steered`` and ``pooled`` of a plan.

        ``in_step`` has the slots of the step's rows.
        """
        scored = []
        for row, slot in enumerate(in_step):
            if slot in chosen.prompt:
                scored.append((row, chosen.prompt[slot]))
        read = []
        for name, slot, first in chosen.taps:
            point = self.point(name)
            row = in_step.index(slot)
            read.append((point, row, first))
        read.sort()
        steered: set[int] = set()
        for slot in in_step:
            steered.update(self.steered.get(slot, ()))
        sums = []
        for slot, first, count in chosen.pooled:
            row = in_step.index(slot)
            sums.append((row, first, count))
        columns = {"prompt": int32(scored, -1, 2)}
        columns["taps"] = int32(read, -1, 3)
        columns["steered"] = int32(sorted(steered))
        columns["pooled"] = int32(sums, -1, 3)
        return columns

    def drafted(self, slot: int, result: StepResult) -> int:
        """Append the accepted tokens of a row with drafts to its known tokens, and return their number."""
        rows = result.slots == slot
        n = int(result.count[rows].sum())
        self.known[slot] += n - 1
        self.computed[slot] += n - 1
        return n

    def submit(self, rows: Mapping[int, int], **options: Any) -> StepPlan:
        """Submit the next step to the executor and return its plan; ``options`` are keyword arguments of ``plan``."""
        plan = self.plan(rows, **options)
        self.executor.submit(plan)
        return plan

    def supply(self, plan: StepPlan, masks: np.ndarray) -> None:
        """Send the token masks of a step, which come after its plan."""
        self.executor.supply(plan.id, LateInputs(masks))

    def collect(self) -> list[StepResult]:
        """Return the results of all steps that were not collected yet."""
        return list(self.executor.collect(0))

    def _delta(self) -> Delta:
        """Return the changes since the last plan, and start a new list of changes."""
        arrays = {"leave": int32(self._leave)}
        arrays["fork"] = int32(self._forks, -1, 3)
        arrays["table"] = int32(self._table, -1, 4)
        arrays["copy"] = int32(self._copy, -1, 3)
        arrays["token"] = int32(self._tokens, -1, 2)
        keep = np.array(self._keep, np.int64)
        arrays["keep"] = keep.reshape(-1, 2)
        join = self._join() if self._joins else None
        self._start_delta()
        return Delta(join=join, **arrays)

    def _join(self) -> Join:
        """Return the new sequences of the next plan in the form of the executor's contract."""
        joins = self._joins
        slot = int32(j.slot for j in joins)
        known = int32(len(j.tokens) for j in joins)
        prompt = int32(len(j.prompt) for j in joins)
        out = int32(j.out for j in joins)
        saved = np.array([j.saved for j in joins], np.int64)
        tokens: list[int] = []
        steer = []
        vectors: list[float] = []
        for i, j in enumerate(joins):
            tokens += j.tokens
            for name, vector in j.add.items():
                steer.append((i, self.point(name)))
                vectors += vector
        zeros = np.zeros_like(slot)
        return Join(
            slot=slot,
            known=known,
            computed=zeros,
            prompt=prompt,
            end=prompt + out,
            seed=zeros.astype(np.int64),
            sample=zeros,
            min_end=prompt,
            stop_ids=_stop_ids(joins),
            n_eos=zeros,
            tokens=int32(tokens),
            bound=self._bound(),
            saved=saved,
            steer=int32(steer, -1, 2),
            vectors=np.array(vectors, np.float32),
        )

    def _bound(self) -> tuple[dict[int, Any], ...]:
        """Return the rows that each processor has for the new sequences of the next plan, by index of the sequence."""
        bound = []
        for processor in self.processors:
            rows = {}
            for i, joining in enumerate(self._joins):
                row = processor.bind_prompt(joining.params, int32(joining.prompt))
                if row is not None:
                    rows[i] = row
            bound.append(rows)
        return tuple(bound)

    def generate(self, items: Sequence[Sequence[int]], n: int, ahead: int = 0, chunk: int = 7) -> list[list[int]]:
        """Return n greedy tokens after each prompt; prompt i is in slot i.

        ``ahead`` steps are in flight besides the newest one.  A step computes at most ``chunk`` tokens of a prompt.
        """
        for slot, prompt in enumerate(items):
            self.join(slot, prompt, n)
        slots = range(len(items))
        tokens: list[list[int]] = [[] for _ in items]
        while True:
            rows = {}
            for slot in slots:
                if self.known[slot] < self.end[slot]:
                    missing = int(self.known[slot] - self.computed[slot])
                    rows[slot] = min(missing, chunk)
            if not rows:
                break
            self.submit(rows)
            results = self.executor.collect(ahead)
            self._add_tokens(results, tokens)
        self._add_tokens(self.collect(), tokens)
        self.leave(*slots)
        return tokens

    def _add_tokens(self, results: Sequence[StepResult], tokens: list[list[int]]) -> None:
        """Append the tokens of some step results, none of which may have failed, to the token list of each slot."""
        for result in results:
            assert not result.errors, f"step {result.id} failed: {result.errors}"
            counts = result.count.tolist()
            rows = zip(result.slots, result.tokens, counts, strict=True)
            for slot, token, count in rows:
                tokens[slot] += [int(token)] * count


def _stop_ids(joins: Sequence[Joining]) -> np.ndarray:
    """Return the stop ids of some sequences, int32 [n, STOP_IDS], padded with -1."""
    stop_ids = np.full((len(joins), STOP_IDS), -1, np.int32)
    for row, j in zip(stop_ids, joins, strict=True):
        row[: len(j.stop)] = j.stop
    return stop_ids


def _of_drawing_rows(drawing: list[int], chosen: StepOptions) -> dict[str, np.ndarray]:
    """Return the fields of a plan that name rows by their place among the rows that draw.

    ``drawing`` has the slots of these rows.
    """
    columns = {}
    for name in ("late", "host", "held"):
        slots = getattr(chosen, name)
        columns[name] = int32(i for i, slot in enumerate(drawing) if slot in slots)
    pairs = []
    scales = []
    for slot, guide, scale in chosen.guided:
        pairs.append((drawing.index(slot), drawing.index(guide)))
        scales.append(scale)
    columns["guided"] = int32(pairs, -1, 2)
    columns["scale"] = np.array(scales, np.float32)
    return columns


def check_result(plan: StepPlan, result: StepResult, vocab: int) -> None:
    """Fail unless the result of a step has the shapes and value ranges that the contract demands for its plan."""
    n = len(plan.samples)
    step = f"step {plan.id}"
    assert result.id == plan.id, f"the result of step {result.id} came, expected step {plan.id}"
    for name in ("slots", "tokens", "count", "flags"):
        shape = np.shape(getattr(result, name))
        assert shape == (n,), f"{step}: {name} has shape {shape}, but {n} rows draw"
    own = result.slots == plan.slots[plan.samples]
    assert own.all(), f"{step}: slots {result.slots} are not the plan's"
    tokens = result.tokens
    valid = (tokens >= 0) & (tokens < vocab)
    assert valid.all(), f"{step}: tokens {tokens}"
    logprobs = result.logprobs
    wanted = plan.topk >= 0
    assert (logprobs is not None) == wanted, f"{step}: topk={plan.topk}, but logprobs is {logprobs}"
    if logprobs is not None:
        best = (logprobs.top, logprobs.top_ids)
        columns = (logprobs.chosen, logprobs.rank, *best)
        complete = all(len(column) == n for column in columns)
        wide = all(table.shape[1] >= plan.topk for table in best)
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
        logprobs = result.logprobs
        for row, slot in enumerate(result.slots.tolist()):
            logits = after(known[slot])
            expected = logits.log_softmax(-1)
            token = int(result.tokens[row])
            known[slot].append(token)
            if logprobs is None:
                continue
            place = f"step {plan.id}, row {row}, slot {slot}"
            assert logprobs.rank[row] == 1, f"{place}: {logprobs}; the token must have rank 1"
            check_scores(logprobs, row, expected, token, plan.topk, place)


def check_scores(scores: Any, row: int, expected: torch.Tensor, token: int, k: int, place: str) -> None:
    """Fail unless a row of ``scores`` has the log-probabilities of one token and of the k best tokens.

    ``expected`` has the log-probabilities of all tokens, float32 [V].  ``place`` names the row in messages.
    """
    chosen = expected[token]
    difference = abs(scores.chosen[row] - chosen)
    assert difference < NEAR, f"{place}: {scores}; expected {chosen} for token {token}"
    best = expected.topk(k)
    best_ids = best.indices.tolist()
    ids = scores.top_ids[row, :k].tolist()
    assert ids == best_ids, f"{place}: the best tokens are {ids}; expected {best_ids}"
    top = scores.top[row, :k]
    near = np.allclose(top, best.values, atol=NEAR)
    assert near, f"{place}: log-probabilities {top}; expected {best.values}"


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
    slots = result.slots.tolist()
    values = getattr(result, field).tolist()
    return dict(zip(slots, values, strict=True))


def belongings() -> dict[str, Counter]:
    """Count the resources of this process: threads, child processes, open files, shared memory and GPU memory."""
    found = {"threads": Counter(thread.name for thread in threading.enumerate())}
    found["files"] = Counter()
    for fd in _entries("/proc/self/fd"):
        # the open descriptor that listed the folder is closed by now, so it cannot be read
        with contextlib.suppress(OSError):
            found["files"][os.readlink(fd)] += 1
    own = os.getpid()
    children = []
    for name, parent in _processes().values():
        if parent == own:
            children.append(name)
    found["processes"] = Counter(children)
    shared = _entries("/dev/shm")
    found["shared memory"] = Counter(path.name for path in shared)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_allocated()
        found["bytes of GPU memory"] = Counter({"": allocated})
    return found


def _entries(folder: str) -> list[Path]:
    """Return the entries of a folder; none if it does not exist."""
    path = Path(folder)
    if not path.is_dir():
        return []
    return list(path.iterdir())


def _processes() -> dict[int, tuple[str, int]]:
    """Return process id -> (name, id of the parent process) for all processes of this machine."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has ended meanwhile cannot be read
            _, _, text = stat.read_text().partition(" (")
            name, _, rest = text.rpartition(") ")
            process = int(stat.parent.name)
            parent = int(rest.split()[1])
            found[process] = name, parent
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
        shared = more["shared memory"]
        foreign = of_others(shared, os.getpid()) if shared else set()
        more["shared memory"] = {name: 1 for name in shared if name not in foreign}
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
            above = parents[ancestors[-1]]
            ancestors.append(above)
        orphan = parent <= 1
        if orphan or process in ancestors:
            continue
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            mapped = {name for name in names if f"/dev/shm/{name}" in maps}
            found |= mapped
    return found
