"""Rows of a step in the engine's layout, for the suites of processors and samplers.

slot      0     1     2     3          columns and token histories are by slot, in any order of rows;
rows      -    row2  row0  row1        entries at or after a row's position are stale and may hold any number
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
LONGEST = 1024  # largest number of stored tokens of a history; of a longer sequence only the position is stored
NUMBERS = ("slots", "position", "prompt", "seed", "sample")  # fields of Rows that are tensors with an entry per row
LARGE = 151_936  # size of a vocabulary whose token ids do not fit 16 bits
STALE = (-1, 2**30, 3, -(2**31), 0)  # numbers that may stand after the end of a history
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "encoder_repetition_penalty")
DRAWS = ("temperature", "top_k", "top_p", "min_p")
BANS = ("bad_words", "allowed_token_ids", "no_repeat_ngram_size")
LOGITS = (*PENALTIES, "logit_bias", *BANS, "temperature_schedule")  # parameters of processors
STANDARD = (*LOGITS, *DRAWS, "typical_p", "mirostat_tau", "mirostat_eta")
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"kind": "linear", "start": 1.7, "end": 0.3, "tokens": 20}, {"kind": "linear", "start": 0.5, "end": 2, "tokens": 1},
    {"kind": "cosine", "start": 0.4, "end": 1.9, "tokens": 31}, {"kind": "entropy", "low": 0.2, "high": 1.8},
    {"kind": "entropy", "low": 1.5, "high": 0.5, "exponent": 0.25},
)  # fmt: skip
NAN = float("nan")
INFINITE = float("inf")
ENORMOUS = 10**30
NO_NUMBER = object()
GARBAGE = (None, "x", "", -1, 0.5, NAN, INFINITE, ENORMOUS, [], [1], {}, {"a": 1}, True, b"x", NO_NUMBER)
Slots = Sequence[int]
VALUES: dict[str, tuple] = {  # standard parameter -> values that have an effect
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
}


def values_of(name: str, vocab: int) -> st.SearchStrategy[Any]:
    """Return a hypothesis strategy for values of a standard sampling parameter that change something."""
    ids = st.integers(0, vocab - 1)
    token = ids | st.sampled_from([0, vocab - 1])
    if name == "logit_bias":
        bias = st.floats(-100, 100, width=32)
        by_id = st.dictionaries(ids, bias, min_size=1, max_size=6)
        return by_id | by_id.map(_by_text)
    if name == "bad_words":
        word = st.lists(token, min_size=1, max_size=3)
        return st.lists(word, min_size=1, max_size=8)
    if name == "allowed_token_ids":
        return st.lists(token, min_size=1, max_size=12)
    return st.sampled_from(VALUES[name])


def _by_text(biases: Mapping[int, float]) -> dict[str, float]:
    """Return biases by the text of token ids, as JSON has them."""
    return {str(token): bias for token, bias in biases.items()}


def wrong_values(name: str, vocab: int) -> Sequence[Any]:
    """Return values of a standard parameter that ``SamplingParams`` accepts and every plug-in must refuse."""
    nan = math.nan
    inf = math.inf
    linear = {"kind": "linear", "start": 1.0, "end": 0.5, "tokens": 9}
    if name == "logit_bias":
        return (
            {vocab: 1.0}, {-1: 1.0}, {"x": 1.0}, {1.5: 1.0}, {1: nan}, {1: inf}, {1: "a"}, {1: None}, [1], 5, "x",
        )  # fmt: skip
    if name == "bad_words":
        return ([[vocab]], [[-1]], [[]], [[1.5]], [["x"]], [[1], [2, vocab]], [None], 5, {1: 2})
    if name == "allowed_token_ids":
        return ([vocab], [-1], [], [1.5], ["x"], [[1, 2]], [True, 3], 5, "x", {1: 2})
    if name == "temperature_schedule":
        return (
            5, "linear", {}, {"kind": "x"}, {"kind": "linear"}, {**linear, "start": nan}, {**linear, "end": 0},
            {**linear, "tokens": -1}, {**linear, "more": 1}, {**linear, "start": "1"}, {**linear, "start": inf},
        )  # fmt: skip
    return ()


def normal_logits(rng: np.random.Generator, spread: float, *shape: int) -> Tensor:
    """Return normally distributed logits, float32, with this standard deviation."""
    logits = rng.normal(0, spread, shape)
    return torch.tensor(logits, dtype=torch.float32)


@dataclass(frozen=True)
class SampledSeq:
    """A sequence in the middle of its output, with the logits of its next token."""

    params: SamplingParams
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logits: Tensor  # f32 [V]
    seed: int = 0
    sample: int = 0

    def __str__(self) -> str:
        neutral = SamplingParams()
        changed = {}
        for f in fields(self.params):
            value = getattr(self.params, f.name)
            if value != getattr(neutral, f.name):
                changed[f.name] = value
        prompt = _shorten(self.prompt)
        output = _shorten(self.output)
        return f"a row with {changed or 'default parameters'}, prompt {prompt}, output {output}"


def _shorten(ids: tuple[int, ...]) -> str:
    if len(ids) <= MAX_LEN:
        return str(ids)
    return f"{ids[:8]} and {len(ids) - 8} more"


def stack_logits(seqs: Sequence[SampledSeq]) -> Tensor:
    """Stack the logits of some sequences, f32 [N, V]."""
    return torch.stack([s.logits for s in seqs])


class RowSuite(Protocol):
    """The attributes of a suite that ``Stage`` uses: the plug-in, its claims and the width of the logits."""

    vocab: int

    def place(self) -> str: ...
    def make(self, vocab: int, max_len: int = MAX_LEN) -> Any: ...
    def claims(self, feature: str) -> bool: ...
    def own_logits(self, ids: Sequence[int], vocab: int) -> Tensor: ...


class Stage:
    """The slots of a small engine with their columns and token histories, and two instances of the plug-in.

    As in the engine, one instance binds requests and the other works on rows.  ``fresh`` makes a new instance for each
    call.  A passed ``instance`` does both.  Neither may change results.  ``history`` is the largest number of tokens
    that is stored of a slot.  ``garbage`` is a seed for stale numbers, and 0 means zeros.
    """

    def __init__(
        self,
        suite: RowSuite,
        slots: int,
        *,
        vocab: int = 0,
        fresh: bool = False,
        instance: Any = None,
        garbage: int = 0,
        max_len: int = MAX_LEN,
        history: int = LONGEST,
    ) -> None:
        self.suite = suite
        self.vocab = vocab or suite.vocab
        self.fresh = fresh
        self.max_len = max_len
        self.device = torch.device(suite.place())
        if instance is None:
            self.host = suite.make(self.vocab, max_len)
            self._worker = suite.make(self.vocab, max_len)
        else:
            self.host = self._worker = instance
        self.commits = type(self.host).commit is not Processor.commit
        self.state = ProcessorState(self._worker, slots, self.device)
        kept = min(max_len, history)
        shape = (slots, kept + 1)
        if garbage:
            rng = np.random.default_rng(garbage)
            stale = rng.choice(STALE, shape)
        else:
            stale = np.zeros(shape)
        # number of drafts between the known tokens of a slot and the row's own token: one number, or [N]
        self.ahead: Any = 0
        self.tokens = torch.tensor(stale, dtype=torch.int32, device=self.device)
        self.position = np.zeros(slots, np.int64)
        self.prompt = np.zeros(slots, np.int64)
        self.seed = np.zeros(slots, np.int64)
        self.sample = np.zeros(slots, np.int64)
        # names of calls that would wait for a GPU; None means that they are not recorded
        self.waited: list[str] | None = None
        if garbage:
            self.poison(range(slots))

    @property
    def worker(self) -> Any:
        """Return the instance of the plug-in that works on rows."""
        if self.fresh:
            return self.suite.make(self.vocab, self.max_len)
        return self._worker

    def poison(self, slots: Slots) -> None:
        """Fill the columns of some slots with numbers that an earlier sequence may have left there."""
        at = list(slots)
        for column in self.state.columns.values():
            if column.dtype in (torch.float32, torch.float64):
                column[at] = 1e30
            else:
                column[at] = 100

    def join(self, slots: Slots, seqs: Sequence[SampledSeq]) -> None:
        """Put sequences into slots, and commit their output tokens one at a time."""
        at = np.asarray(slots)
        bound = {}
        for i, s in enumerate(seqs):
            prompt = np.array(s.prompt, np.int32)
            row = self.host.bind_prompt(s.params, prompt)
            requested = str(s.params.extra or "")
            if check_row_type(row, requested) is not None:
                bound[i] = row
        self.state.join(at, self._on_device(at), bound)
        for slot, s in zip(at.tolist(), seqs, strict=True):
            n = len(s.prompt)
            known = torch.tensor(s.prompt, dtype=torch.int32, device=self.device)
            self.tokens[slot, :n] = known
            self.position[slot] = n
            self.prompt[slot] = n
            self.seed[slot] = s.seed
            self.sample[slot] = s.sample
        longest = max(len(s.output) for s in seqs)
        for i in range(longest):
            on = []
            tokens = []
            for j, s in enumerate(seqs):
                if len(s.output) > i:
                    on.append(j)
                    tokens.append([s.output[i]])
            self.accept(at[on], tokens)

    def _on_device(self, numbers: np.ndarray) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def fork(self, source: int, to: int) -> None:
        """Copy a sequence with its columns and history to another slot."""
        at_source = np.array([source])
        self.state.fork(at_source, np.array([to]))
        self.tokens[to] = self.tokens[source]
        for column in (self.position, self.prompt, self.seed, self.sample):
            column[to] = column[source]

    def accept(self, slots: Slots, tokens: Any, count: Any = None, variant: int = 0) -> None:
        """Write tokens [N, k] to the histories of slots, and commit the first ``count`` [N] of each row.

        A ``count`` of None means that all are accepted.  Rejected tokens stay in the history after its end.
        """
        slots = np.asarray(slots)
        new = self._on_device(np.asarray(tokens))
        if count is None:
            width = new.shape[1]
            count = np.full(len(slots), width)
        else:
            count = np.asarray(count)
        for slot, row in zip(slots.tolist(), new, strict=True):
            start = int(self.position[slot])
            end = start + len(row)
            self.tokens[slot, start:end] = row.int()
        on = np.flatnonzero(self.state.active[slots])
        if self.commits and len(on):
            rows = self.rows(slots[on], variant)
            with torch.inference_mode(), unwritten(rows, "commit"):
                accepted = self._on_device(count[on]).int()
                committed = new[self._on_device(on)]
                self.worker.commit(committed, accepted, rows, self.state.columns)
        self.position[slots] += count

    def rows(self, slots: np.ndarray, variant: int, max_position: int = 0) -> Rows:
        """Return the rows of a step for some slots; ``max_position`` 0 means the largest of their positions."""
        at = self.position[slots] + self.ahead
        own = None
        if self.suite.claims("own_model"):
            own = self._own_logits(slots, at)
        numbers = [slots, at]
        for by_slot in (self.prompt, self.seed, self.sample):
            numbers.append(by_slot[slots])
        on_device = [self._on_device(n) for n in numbers]
        longest = max_position or int(at.max())
        return Rows(*on_device, variant, self.tokens, longest, own)

    def _own_logits(self, slots: np.ndarray, at: np.ndarray) -> Tensor:
        """Return the logits [N, V] of a processor's own model for slots at some positions."""
        logits = []
        for slot, n in zip(slots.tolist(), at.tolist(), strict=True):
            ids = self.tokens[slot, :n].tolist()
            logits.append(self.suite.own_logits(ids, self.vocab))
        return torch.stack(logits).to(self.device)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Record in ``waited``, unless it is None, the calls in the block that would wait for the device."""
        if self.waited is None:
            yield
            return
        with waits(self.device.type) as found:
            yield
        self.waited += found

    def variant(self, slots: np.ndarray) -> int:
        """Return the variant bits of some slots, combined by or."""
        variants = self.state.variant[slots]
        return int(np.bitwise_or.reduce(variants))

    def apply(self, slots: Slots, logits: Tensor, max_position: int = 0) -> Tensor:
        """Return logits [N, V] after the processor, which gets only the rows for which ``bind`` returned a row."""
        slots = np.asarray(slots)
        logits = logits.to(self.device, copy=True)
        on = np.flatnonzero(self.state.active[slots])
        if len(on):
            at = self._on_device(on)
            part = logits[at]
            variant = self.variant(slots[on])
            rows = self.rows(slots[on], variant, max_position)
            with torch.inference_mode(), unwritten(rows, "apply"), self._watched():
                self.worker.apply(part, rows, self.state.columns)
            logits[at] = part
        return logits

    def draw(self, slots: Slots, logits: Tensor, max_position: int = 0) -> Tensor:
        """Return drawn tokens i64 [N]; a sampler gets every row, also if ``bind`` returned None for it."""
        slots = np.asarray(slots)
        variant = self.variant(slots)
        rows = self.rows(slots, variant, max_position)
        undrawn = np.full(len(slots), -1)
        tokens = self._on_device(undrawn)
        out = Draw(tokens)
        worker = self.worker
        logits = logits.to(self.device)
        passed = logits.clone()
        with torch.inference_mode(), unwritten(rows, "draw"), self._watched():
            worker.draw(passed, rows, self.state.columns, out)
        assert out.tokens is tokens, "put another tensor into out.tokens: write into the first, which the engine keeps"
        if worker.keeps_logits:
            same = torch.equal(passed.nan_to_num(), logits.nan_to_num())
            assert same, (
                "draw writes to the logits although keeps_logits is True: log-probabilities may be computed from them"
            )
        if out.peaks is not None:
            ends = (math.inf, math.inf, -math.inf)
            peaks = out.peaks.to(self.device).nan_to_num(*ends)
            finite = logits.to(self.device).nan_to_num(*ends)
            got = peaks.amax(dim=1)
            want = finite.amax(dim=1)
            assert torch.equal(got, want), f"the largest of out.peaks are {got}: expected those of the logits, {want}"
        return tokens

    def columns(self, slots: Slots) -> dict[str, Tensor]:
        """Return copies of the columns at some slots."""
        at = list(slots)
        return {name: column[at].clone() for name, column in self.state.columns.items()}


class WatchedProcessor(Tensor):
    """A tensor that sets ``used`` when code reads more of it than its device, shape and dtype."""

    used = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        harmless = (Tensor.device.__get__, Tensor.shape.__get__, Tensor.dtype.__get__)
        if func not in harmless:
            for tensor in args:
                if isinstance(tensor, WatchedProcessor):
                    tensor.used = True
        return super().__torch_function__(func, types, args, kwargs or {})


@contextmanager
def unwritten(rows: Rows, call: str) -> Iterator[None]:
    """Fail if code in the block changes ``rows``, which the engine passes on to the next plug-in.

    ``rows.tokens`` must only be the same tensor; another test compares its values.
    """
    tensors = {name: getattr(rows, name) for name in NUMBERS}
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    others = (rows.variant, rows.max_position)
    history = rows.tokens
    yield
    advice = "; rows belong to the engine, work with dataclasses.replace(rows, ...)"
    for name, tensor in tensors.items():
        assert torch.equal(tensor, values[name]), f"{call} writes to rows.{name}{advice}"
        assert getattr(rows, name) is tensor, f"{call} puts another tensor into rows.{name}{advice}"
    same = (rows.variant, rows.max_position) == others
    kept = rows.tokens is history
    assert same and kept, f"{call} changes rows.variant, max_position or tokens{advice}"


def some_prompt(n: int, vocab: int) -> np.ndarray:
    """Return n random token ids, int32, read-only as the engine passes them to a plug-in."""
    generator = np.random.default_rng(n)
    ids = generator.integers(0, vocab, n, np.int32)
    ids.flags.writeable = False
    return ids


def check_row_type(row: Any, requested: str) -> Row | None:
    """Return the result of ``bind``, or fail if it is neither a Row nor None; ``requested`` are its parameters."""
    assert row is None or isinstance(row, Row), (
        f"bind({requested}) returned {shown(row)} ({type(row).__name__}): expected a Row or None"
    )
    return row


def check_row(row: Row | None, columns: Mapping[str, Column], requested: str) -> None:
    """Fail unless the declared columns can hold the values of a row exactly."""
    if check_row_type(row, requested) is None:
        return
    fits = isinstance(row.variant, int) and 0 <= row.variant < 2**63
    assert fits, f"bind({requested}) returned variant={row.variant!r}: expected a whole number of at most 63 bits"
    for name, value in row.values.items():
        label = f"bind({requested}): column {name!r}"
        assert name in columns, f"{label} is not declared: columns() has {sorted(columns) or 'none'}"
        _check_value(value, columns[name], label)


def _check_value(value: Any, column: Column, label: str) -> None:
    """Fail unless a column can hold a value exactly; a float may be rounded."""
    array = np.asarray(value)
    assert array.dtype.kind in "biuf", f"{label} has value {value!r}: expected numbers"
    assert array.size == math.prod(column.shape), f"{label} has shape {array.shape}: expected {column.shape}"
    dtype = getattr(torch, column.dtype)
    held = torch.as_tensor(array).to(dtype)
    stored = held.double().numpy()
    assert not np.isnan(stored).any(), f"{label} is NaN: refuse the value with a RequestError"
    if column.dtype.startswith(("float", "bfloat")):
        same = np.isinf(stored) <= np.isinf(array)
    else:
        same = stored == array
    assert np.all(same), f"{label} has value {value!r}, which becomes {stored.tolist()} in {column.dtype}"


def same_rows(a: Row | None, b: Row | None) -> bool:
    """Return whether two results of ``bind`` have the same values and the same variant bits."""
    if a is None or b is None:
        return a is b
    if a.variant != b.variant or a.values.keys() != b.values.keys():
        return False
    return all(np.array_equal(value, b.values[name]) for name, value in a.values.items())


def captured(call: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
    """Capture a call in a CUDA graph; return its result, and a function that replays the graph and waits for it."""
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
