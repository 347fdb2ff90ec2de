"""Rows of a step as the engine lays them out, for the suites of processors and samplers.

slot      0     1     2     3          columns and token histories are by slot, in any order of rows;
rows      -    row2  row0  row1        what lies at or after a row's position is stale and may be anything
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.sampling import Column, Draw, Processor, Row, Rows
from minivllm.device.worker.state import ProcessorState
from minivllm.errors import shown

from .waiting import waits

MAX_LEN = 48
LONGEST = 1024  # tokens of a history; a longer sequence has only its number of tokens
NUMBERS = ("slots", "position", "prompt", "seed", "sample")  # of Rows, a tensor [N] each
LARGE = 151_936  # a vocabulary that no 16-bit number counts
STALE = (-1, 2**30, 3, -(2**31), 0)  # what may lie in a history beyond its end
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "encoder_repetition_penalty")
DRAWS = ("temperature", "top_k", "top_p", "min_p")
BANS = ("bad_words", "allowed_token_ids", "no_repeat_ngram_size")
LOGITS = (*PENALTIES, "logit_bias", *BANS, "temperature_schedule")  # what processors do
STANDARD = (*LOGITS, *DRAWS, "typical_p", "mirostat_tau", "mirostat_eta")
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"kind": "linear", "start": 1.7, "end": 0.3, "tokens": 20}, {"kind": "linear", "start": 0.5, "end": 2, "tokens": 1},
    {"kind": "cosine", "start": 0.4, "end": 1.9, "tokens": 31}, {"kind": "entropy", "low": 0.2, "high": 1.8},
    {"kind": "entropy", "low": 1.5, "high": 0.5, "exponent": 0.25},
)  # fmt: skip
GARBAGE = (None, "x", "", -1, 0.5, float("nan"), float("inf"), 10**30, [], [1], {}, {"a": 1}, True, b"x", object())


def values_of(name: str, vocab: int) -> st.SearchStrategy[Any]:
    """Values of a standard sampling parameter that change something."""
    token = st.integers(0, vocab - 1) | st.sampled_from([0, vocab - 1])
    if name == "logit_bias":
        bias = st.floats(-100, 100, width=32)
        by_id = st.dictionaries(st.integers(0, vocab - 1), bias, min_size=1, max_size=6)
        return by_id | by_id.map(lambda wanted: {str(token): b for token, b in wanted.items()})
    if name == "bad_words":
        return st.lists(st.lists(token, min_size=1, max_size=3), min_size=1, max_size=8)
    if name == "allowed_token_ids":
        return st.lists(token, min_size=1, max_size=12)
    return st.sampled_from(
        {
            "repetition_penalty": (1.3, 0.8, 1.0001, 5.0),
            "encoder_repetition_penalty": (1.3, 0.8, 1.0001, 5.0),
            "presence_penalty": (0.3, -1.5, 2.0, -2.0),
            "frequency_penalty": (0.3, -1.5, 2.0, -2.0),
            "temperature": (0.0, 0.31, 0.9, 1.9),
            "top_k": (1, 2, 5, 17, 40, 1000),
            "top_p": (0.913579, 0.5012345, 0.0123),
            "min_p": (0.0519, 0.3, 0.7071),
            "no_repeat_ngram_size": (1, 2, 3, 5),
            "temperature_schedule": SCHEDULES,
            "typical_p": (0.913579, 0.5012345, 0.2123),
            "mirostat_tau": (0.5, 1.7, 3.0),
        }[name]
    )


def wrong_values(name: str, vocab: int) -> Sequence[Any]:
    """Values of a standard parameter that ``SamplingParams`` lets through and that nobody can serve."""
    nan, inf = float("nan"), float("inf")
    linear = {"kind": "linear", "start": 1.0, "end": 0.5, "tokens": 9}
    return {
        "logit_bias": (
            {vocab: 1.0},
            {-1: 1.0},
            {"x": 1.0},
            {1.5: 1.0},
            {1: nan},
            {1: inf},
            {1: "a"},
            {1: None},
            [1],
            5,
            "x",
        ),
        "bad_words": ([[vocab]], [[-1]], [[]], [[1.5]], [["x"]], [[1], [2, vocab]], [None], 5, {1: 2}),
        "allowed_token_ids": ([vocab], [-1], [], [1.5], ["x"], [[1, 2]], [True, 3], 5, "x", {1: 2}),
        "temperature_schedule": (
            5,
            "linear",
            {},
            {"kind": "x"},
            {"kind": "linear"},
            {**linear, "start": nan},
            {**linear, "end": 0},
            {**linear, "tokens": -1},
            {**linear, "more": 1},
            {**linear, "start": "1"},
            {**linear, "start": inf},
        ),
    }.get(name, ())


@dataclass(frozen=True)
class SampledSeq:
    """One sequence in the middle of its life, and the logits of its next token."""

    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits: Tensor  # f32 [V]
    seed: int = 0
    sample: int = 0

    def __str__(self) -> str:
        neutral = SamplingParams()
        asked = {f.name: getattr(self.params, f.name) for f in fields(self.params)}
        asked = {k: v for k, v in asked.items() if v != getattr(neutral, k)}
        shown = lambda ids: ids if len(ids) <= MAX_LEN else f"{ids[:8]} and {len(ids) - 8} more"  # noqa: E731
        return f"a row with {asked or 'default parameters'}, prompt {shown(self.prompt)}, output {shown(self.output)}"


class RowSuite(Protocol):
    """What a stage needs of its suite: the plug-in, its claims and the size of its logits."""

    vocab: int

    def place(self) -> str: ...
    def make(self, vocab: int, max_len: int = MAX_LEN) -> Any: ...
    def claims(self, feature: str) -> bool: ...
    def own_logits(self, ids: Sequence[int], vocab: int) -> Tensor: ...


class Stage:
    """Slots of a small engine: its columns and token histories, and the plug-in, made twice as the engine does.

    ``fresh``: another instance serves each call; ``fused``: one instance binds and serves.  Neither may matter.
    ``history``: tokens of a slot at most.
    """

    def __init__(
        self,
        suite: RowSuite,
        slots: int,
        *,
        vocab: int = 0,
        fresh: bool = False,
        fused: bool = False,
        garbage: int = 0,
        max_len: int = MAX_LEN,
        history: int = LONGEST,
    ) -> None:
        self.suite, self.vocab, self.fresh, self.max_len = suite, vocab or suite.vocab, fresh, max_len
        self.device = torch.device(suite.place())
        self.host = suite.make(self.vocab, max_len)
        self._worker = self.host if fused else suite.make(self.vocab, max_len)
        self.commits = type(self.host).commit is not Processor.commit
        self.state = ProcessorState(self._worker, slots, self.device)
        rng = np.random.default_rng(garbage)
        shape = (slots, min(max_len, history) + 1)
        stale = rng.choice(STALE, shape) if garbage else np.zeros(shape)
        self.ahead: Any = 0  # of each row: how many drafts stand between its slot's known tokens and its own
        self.tokens = torch.tensor(stale, dtype=torch.int32, device=self.device)
        self.position, self.prompt, self.seed, self.sample = (np.zeros(slots, np.int64) for _ in range(4))
        self.waited: list[str] | None = None  # what would wait for a GPU in a call, where that is asked
        if garbage:
            self.poison(range(slots))

    @property
    def worker(self) -> Any:
        return self.suite.make(self.vocab, self.max_len) if self.fresh else self._worker

    def poison(self, slots: Sequence[int]) -> None:
        """What former owners left in the columns of some slots."""
        for column in self.state.columns.values():
            column[list(slots)] = 1e30 if column.dtype in (torch.float32, torch.float64) else 100

    def join(self, slots: Sequence[int], seqs: Sequence[SampledSeq]) -> None:
        """Sequences take slots; their outputs are accepted one token at a time."""
        at = np.asarray(slots)
        given = [(s.params, np.array(s.prompt, np.int32)) for s in seqs]
        bound = [check_row_type(self.host.bind_prompt(*one), str(one[0].extra or "")) for one in given]
        where = torch.tensor(at, dtype=torch.int64, device=self.device)
        self.state.join(at, where, {i: row for i, row in enumerate(bound) if row is not None})
        for slot, s in zip(at.tolist(), seqs, strict=True):
            self.tokens[slot, : len(s.prompt)] = torch.tensor(s.prompt, dtype=torch.int32, device=self.device)
            self.position[slot] = self.prompt[slot] = len(s.prompt)
            self.seed[slot], self.sample[slot] = s.seed, s.sample
        for i in range(max(len(s.output) for s in seqs)):
            on = [j for j, s in enumerate(seqs) if len(s.output) > i]
            self.accept(at[on], [[seqs[j].output[i]] for j in on])

    def fork(self, source: int, to: int) -> None:
        self.state.fork(np.array([source]), np.array([to]))
        self.tokens[to] = self.tokens[source]
        for column in (self.position, self.prompt, self.seed, self.sample):
            column[to] = column[source]

    def accept(self, slots: Sequence[int], tokens: Any, count: Any = None, variant: int = 0) -> None:
        """Tokens [N, k] come, of which ``count`` [N] are accepted (None: all); rejected ones stay in the history."""
        slots, tokens = np.asarray(slots), np.asarray(tokens, np.int64)
        count = np.full(len(slots), tokens.shape[1]) if count is None else np.asarray(count)
        new = torch.tensor(tokens, device=self.device)
        for slot, row in zip(slots.tolist(), new, strict=True):
            start = int(self.position[slot])
            self.tokens[slot, start : start + len(row)] = row.int()
        on = np.flatnonzero(self.state.active[slots])
        if self.commits and len(on):
            rows = self.rows(slots[on], variant)
            with torch.inference_mode(), unwritten(rows, "commit"):
                n = torch.tensor(count[on], dtype=torch.int32, device=self.device)
                self.worker.commit(new[torch.tensor(on, device=self.device)], n, rows, self.state.columns)
        self.position[slots] += count

    def rows(self, slots: np.ndarray, variant: int, max_position: int = 0) -> Rows:
        to = lambda array: torch.tensor(array[slots], device=self.device)  # noqa: E731
        at = self.position[slots] + self.ahead
        own = None
        if self.suite.claims("own_model"):
            ids = [self.tokens[slot, :n].tolist() for slot, n in zip(slots.tolist(), at.tolist(), strict=True)]
            own = torch.stack([self.suite.own_logits(row, self.vocab) for row in ids]).to(self.device)
        return Rows(
            torch.tensor(slots, device=self.device),
            torch.tensor(at, device=self.device),
            to(self.prompt),
            to(self.seed),
            to(self.sample),
            variant,
            self.tokens,
            max_position or int(at.max()),
            own,
        )

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Note what waits for the device in ``waited``, unless that is None."""
        if self.waited is None:
            yield
            return
        with waits(self.device.type) as found:
            yield
        self.waited += found

    def variant(self, slots: np.ndarray) -> int:
        return int(np.bitwise_or.reduce(self.state.variant[slots]))

    def apply(self, slots: Sequence[int], logits: Tensor, max_position: int = 0) -> Tensor:
        """Logits [N, V] after the processor, which sees the rows that bound."""
        slots, logits = np.asarray(slots), logits.to(self.device, copy=True)
        on = np.flatnonzero(self.state.active[slots])
        if len(on):
            at = torch.tensor(on, device=self.device)
            part, rows = logits[at], self.rows(slots[on], self.variant(slots[on]), max_position)
            with torch.inference_mode(), unwritten(rows, "apply"), self._watched():
                self.worker.apply(part, rows, self.state.columns)
            logits[at] = part
        return logits

    def draw(self, slots: Sequence[int], logits: Tensor, max_position: int = 0) -> Tensor:
        """Tokens i64 [N]; a sampler sees every row, bound or not."""
        slots = np.asarray(slots)
        rows = self.rows(slots, self.variant(slots), max_position)
        out = Draw(torch.full((len(slots),), -1, dtype=torch.int64, device=self.device))
        tokens, worker, given = out.tokens, self.worker, logits.to(self.device, copy=True)
        with torch.inference_mode(), unwritten(rows, "draw"), self._watched():
            worker.draw(given, rows, self.state.columns, out)
        assert out.tokens is tokens, "put another tensor into out.tokens: the engine may hold the first, write into it"
        if worker.keeps_logits:
            same = torch.equal(given.nan_to_num(), logits.to(self.device).nan_to_num())
            assert same, (
                "draw writes to the logits although keeps_logits is True: log-probabilities may be made of them"
            )
        if out.peaks is not None:
            ends = (math.inf, math.inf, -math.inf)
            got, want = (t.to(self.device).nan_to_num(*ends).amax(dim=1) for t in (out.peaks, logits))
            assert torch.equal(got, want), f"the largest of out.peaks are {got}: want those of the logits, {want}"
        return tokens

    def columns(self, slots: Sequence[int]) -> dict[str, Tensor]:
        """Copies of the columns' values at some slots."""
        return {name: column[list(slots)].clone() for name, column in self.state.columns.items()}


class WatchedProcessor(Tensor):
    """Notes in ``used`` that anybody asked for more than its form."""

    used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (Tensor.device.__get__, Tensor.shape.__get__, Tensor.dtype.__get__):
            for tensor in (a for a in args if isinstance(a, WatchedProcessor)):
                tensor.used = True
        return super().__torch_function__(func, types, args, kwargs or {})


@contextmanager
def unwritten(rows: Rows, call: str) -> Iterator[None]:
    """That a call leaves the rows as they are: the engine hands the same ones to what comes after it.  What it does to
    token histories a test of its own sees."""
    before, variant, most = {name: getattr(rows, name) for name in NUMBERS}, rows.variant, rows.max_position
    values, history = {name: tensor.clone() for name, tensor in before.items()}, rows.tokens
    yield
    words = "; rows are the engine's, work with dataclasses.replace(rows, ...)"
    for name, tensor in before.items():
        assert torch.equal(tensor, values[name]), f"{call} writes to rows.{name}{words}"
        assert getattr(rows, name) is tensor, f"{call} puts another tensor into rows.{name}{words}"
    same = (rows.variant, rows.max_position) == (variant, most) and rows.tokens is history
    assert same, f"{call} changes rows.variant, max_position or tokens{words}"


def some_prompt(n: int, vocab: int) -> np.ndarray:
    """Token ids i32 [n] as a plug-in is given them: read-only."""
    ids = np.random.default_rng(n).integers(0, vocab, n, np.int32)
    ids.flags.writeable = False
    return ids


def check_row_type(row: Any, asked: str) -> Row | None:
    """What ``bind`` returned, if it is a Row or None."""
    assert row is None or isinstance(row, Row), (
        f"bind({asked}) returned {shown(row)} ({type(row).__name__}): want a Row or None"
    )
    return row


def check_row(row: Row | None, columns: Mapping[str, Column], asked: str) -> None:
    """That the engine can put a row into its columns without changing what it says."""
    if check_row_type(row, asked) is None:
        return
    fits = isinstance(row.variant, int) and 0 <= row.variant < 2**63
    assert fits, f"bind({asked}) gave variant={row.variant!r}: want a whole number of at most 63 bits"
    for name, value in row.values.items():
        place = f"bind({asked}): column {name!r}"
        assert name in columns, f"{place} is not declared: columns() has {sorted(columns) or 'none'}"
        array, column = np.asarray(value), columns[name]
        assert array.dtype.kind in "biuf", f"{place} got {value!r}: want numbers"
        assert array.size == math.prod(column.shape), f"{place} got shape {array.shape}: want {column.shape}"
        stored = torch.as_tensor(array).to(getattr(torch, column.dtype)).double().numpy()
        assert not np.isnan(stored).any(), f"{place} got NaN: refuse the value with a RequestError"
        same = np.isinf(stored) <= np.isinf(array) if column.dtype.startswith(("float", "bfloat")) else stored == array
        assert np.all(same), f"{place} got {value!r}, which {column.dtype} cannot hold: it becomes {stored.tolist()}"


def same_rows(a: Row | None, b: Row | None) -> bool:
    if a is None or b is None:
        return a is b
    same = a.values.keys() == b.values.keys() and a.variant == b.variant
    return same and all(np.array_equal(np.asarray(a.values[k]), np.asarray(b.values[k])) for k in a.values)


def captured(call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """(what a call captured in a CUDA graph returns, what replays the graph and waits)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return result, replay
