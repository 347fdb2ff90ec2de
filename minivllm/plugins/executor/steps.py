"""The encoding of steps of ``process``, which sends only the differences to the preceding plan.

    NEXT    head, computed i32 [R], ``Delta.table`` and ``.trim``     other columns are those of the preceding plan
    PLAIN   head, form i32 [3], seconds of the seams f64 [S],         slots are those of the plan; seams have the names
            tokens i32 [N], count i32 [N], flags u8 [N]               of the last whole result that had any

Other plans and results are sent whole, in the encoding of ``core.interfaces.codec``, whose version and error are used
here too.  Both ends keep the objects to which later messages refer, because messages arrive in the order of writing.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from operator import is_, itemgetter

import numpy as np

from minivllm.core.interfaces import codec
from minivllm.core.interfaces.codec import F4, I4, U1, CodecError
from minivllm.core.interfaces.plan import NO_CHANGE, Delta, StepPlan, StepResult

PLAN, NEXT = 2, 11  # kinds of messages
RESULT, PLAIN = 8, 12
# for both: magic, version, step, device_ms, rows; the numbers of entries of two further columns, or for a result the
# number of seams and ``StepResult.shared``
HEAD = struct.Struct("<4sIqdIII")
FORM = struct.Struct("<iiii")  # form of a result as three numbers (``codec.form_numbers``), and a 0 for alignment
MAGICS = {NEXT: b"mvlN", PLAIN: b"mvlP"}
NAMES = tuple(StepPlan.__dataclass_fields__)
# Function that returns the fields of a plan that ``StepPlan.further`` hands on unchanged.
_kept = itemgetter(*(name for name in NAMES if name not in ("id", "computed", "delta")))
_changes = itemgetter(*(name for name in Delta.__dataclass_fields__ if name not in ("join", "table", "trim")))
WIDTH = 4  # number of columns of ``Delta.table`` and ``.trim``
NO_TABLE, NO_DRAFTS, NO_TAPS = np.empty((0, WIDTH), I4), np.empty(0, I4), np.empty(0, F4)


def _head(kind: int, data: bytearray | bytes) -> tuple[int, float, int, int, int]:
    """Return the step id, the device's milliseconds, the number of rows and two further counts from the head of a
    message.
    """
    if len(data) < HEAD.size:
        raise CodecError(f"{len(data)} bytes; expected at least {HEAD.size}")
    magic, version, *rest = HEAD.unpack_from(data)
    if magic != MAGICS[kind] or version != codec.VERSION:
        raise CodecError(f"bytes of {magic!r} {version}; expected {MAGICS[kind]!r} {codec.VERSION}")
    return tuple(rest)  # type: ignore[return-value]


def _whole(data: bytearray | bytes, size: int) -> None:
    if len(data) != size:
        raise CodecError(f"{len(data)} bytes; expected {size}, the size in their head")


class Plans:
    """Encodes the step plans of a connection at one end, and decodes them at the other."""

    def __init__(self) -> None:
        self._last: StepPlan | None = None

    def encode(self, plan: StepPlan) -> tuple[int, Sequence[bytes]]:
        """Return the kind and the parts of a plan's message.

        Raise CodecError, which names the column, for a column of an unexpected dtype or shape.
        """
        last = self._last
        delta = plan.delta
        computed = plan.computed
        if last is None or computed.shape != last.computed.shape or computed.dtype != I4:
            return self._encode(plan)
        if not all(map(is_, _kept(last.__dict__), _kept(plan.__dict__))):
            return self._encode(plan)
        moved = [b"", b""]
        if delta is not NO_CHANGE:
            if delta.join is not None or any(map(len, _changes(delta.__dict__))):
                return self._encode(plan)
            for i, column in enumerate((delta.table, delta.trim)):
                if column.dtype != I4 or column.ndim != 2 or column.shape[1] != WIDTH:
                    return self._encode(plan)
                moved[i] = column.tobytes()
        self._last = plan
        head = HEAD.pack(MAGICS[NEXT], codec.VERSION, plan.id, 0.0, len(computed), len(delta.table), len(delta.trim))
        return NEXT, [head, computed.tobytes(), *moved]

    def _encode(self, plan: StepPlan) -> tuple[int, Sequence[bytes]]:
        parts = codec.encode_plan(plan)
        self._last = plan
        return PLAN, parts

    def decode(self, kind: int, data: bytearray | bytes) -> StepPlan:
        """Return the plan of a message.  Raise CodecError for data that no encoder has written."""
        self._last = codec.decode_plan(data) if kind == PLAN else self._next(data)
        return self._last

    def _next(self, data: bytearray | bytes) -> StepPlan:
        step, _, rows, n_table, n_trim = _head(NEXT, data)
        if self._last is None or rows != len(self._last.computed):
            there = "none" if self._last is None else f"one of {len(self._last.computed)} rows"
            raise CodecError(f"a plan of {rows} rows that refers to the preceding plan, which is {there}")
        _whole(data, HEAD.size + 4 * (rows + WIDTH * (n_table + n_trim)))
        computed = np.frombuffer(data, I4, rows, HEAD.size)
        delta = NO_CHANGE
        if n_table or n_trim:
            moved = np.frombuffer(data, I4, offset=HEAD.size + 4 * rows).reshape(-1, WIDTH)
            delta = Delta(table=moved[:n_table] if n_table else NO_TABLE, trim=moved[n_table:] if n_trim else NO_TABLE)
        return self._last.further(step, computed, delta)


class StepResults:
    """Encodes the step results of a connection at one end, and decodes them at the other.  ``slots`` i32 in both
    methods are the slots of the step's plan."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()  # of the seams

    def encode(self, result: StepResult, slots: np.ndarray) -> tuple[int, Sequence[bytes]]:
        """Return the kind and the parts of a result's message.

        Raise CodecError, which names the column, for a column of an unexpected dtype or shape.
        """
        r = result
        n = len(slots)
        scored = r.logprobs is not None or r.prompt is not None or r.logits is not None
        if r.slots is not slots or scored or r.errors or r.lost:
            return self._encode(r)
        more = r.drafted, r.taps, r.pooled, r.kept
        if any(map(len, more)) or tuple(r.seams) != self._names:
            return self._encode(r)
        columns = r.tokens, r.count, r.flags
        for column, dtype in zip(columns, (I4, I4, U1), strict=True):
            if column.shape != (n,) or column.dtype != dtype:
                return self._encode(r)
        n_seams = len(r.seams)
        head = HEAD.pack(MAGICS[PLAIN], codec.VERSION, r.id, r.device_ms, n, n_seams, r.shared)
        form = FORM.pack(*codec.form_numbers(r.form), 0)
        seams = struct.pack(f"<{n_seams}d", *r.seams.values())
        return PLAIN, [head, form, seams, *(column.tobytes() for column in columns)]

    def _encode(self, result: StepResult) -> tuple[int, Sequence[bytes]]:
        parts = codec.encode_result(result)
        self._learn(result.seams)
        return RESULT, parts

    def _learn(self, seams: Mapping[str, float]) -> None:
        if seams:
            self._names = tuple(seams)

    def decode(self, kind: int, data: bytearray | bytes, slots: np.ndarray | None) -> StepResult:
        """Return the result of a message; ``slots`` None means that no plan waits for its result.

        Raise CodecError for data that no encoder has written.
        """
        if kind == PLAIN:
            return self._plain(data, slots)
        result = codec.decode_result(data)
        self._learn(result.seams)
        return result

    def _plain(self, data: bytearray | bytes, slots: np.ndarray | None) -> StepResult:
        step, device_ms, n, n_seams, shared = _head(PLAIN, data)
        if slots is None or n != len(slots) or n_seams not in (0, len(self._names)):
            rows = "no plan" if slots is None else f"a plan of {len(slots)} rows"
            raise CodecError(f"a result of {n} rows and {n_seams} seams for {rows} and {len(self._names)} seams")
        first = HEAD.size + FORM.size
        _whole(data, first + 8 * n_seams + 9 * n)
        *numbers, _ = FORM.unpack_from(data, HEAD.size)
        form = codec.form_of(*numbers)
        seconds = struct.unpack_from(f"<{n_seams}d", data, first)
        seams = dict(zip(self._names, seconds, strict=False))
        at = first + 8 * n_seams
        tokens = np.frombuffer(data, I4, 2 * n, at)
        flags = np.frombuffer(data, U1, n, at + 8 * n)
        return StepResult(
            id=step,
            slots=slots,
            tokens=tokens[:n],
            count=tokens[n:],
            flags=flags,
            device_ms=device_ms,
            drafted=NO_DRAFTS,
            taps=NO_TAPS,
            seams=seams,
            form=form,
            shared=shared,
        )
