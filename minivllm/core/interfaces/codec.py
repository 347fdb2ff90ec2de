"""Plans, late inputs and results as bytes, for an executor whose worker is in another process or on another machine.

    head      magic, version, kind, bytes in all                       24 bytes
    numbers   scalars, and the length of each column                   as many as the kind has
    columns   those of 8 bytes an item, of 4, of 1; no gaps            lengths as above
    rest      JSON (names and messages), behind it the arrays of rows that processors bound, at multiples of 8

Only numbers, text and arrays: nothing that is read is run.  Both sides have the same version of minivllm, so bytes of
another ``VERSION`` are refused, as are foreign ones and those that end too early or too late: ``CodecError``.  What is
decoded lies in the bytes that were given, and its arrays can be written to if those can.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from .plan import (
    STOP_IDS,
    Delta,
    Join,
    LateInputs,
    LogProbs,
    StepError,
    StepPlan,
    StepResult,
)
from .sampling import Row

VERSION = 3
MAGIC = b"mvllmstp"
PLAN, LATE, RESULT = 1, 2, 3  # kinds
HEAD = struct.Struct("<8sIIQ")
I8, I4, F4, U1 = (np.dtype(name) for name in ("<i8", "<i4", "<f4", "u1"))
ALIGN = 8


class CodecError(ValueError):
    """Bytes that no encoder of this version has made, or a value that has no place in them."""


class ColumnSpec(NamedTuple):
    """An array ``name`` of the object ``of``: its first dimension is count ``length``, its second ``width`` items, if
    that is not 0."""

    of: str
    name: str
    dtype: np.dtype
    length: str
    width: int = 0


def _columns(of: str, dtype: np.dtype, length: str, names: str, width: int = 0) -> list[ColumnSpec]:
    return [ColumnSpec(of, name, dtype, length or name, width) for name in names.split()]


def _own(of: str, names: Sequence[tuple[str, int]], dtype: np.dtype = I4) -> list[ColumnSpec]:
    """Columns that have a length of their own, under their names."""
    return [ColumnSpec(of, name, dtype, f"{of}.{name}", width) for name, width in names]


class Layout:
    """The numbers and columns of one kind."""

    def __init__(self, kind: int, scalars: str, columns: Sequence[ColumnSpec]) -> None:
        """``scalars``: their struct codes."""
        self.kind = kind
        self.columns = sorted(columns, key=lambda c: -c.dtype.itemsize)
        self.lengths = tuple(dict.fromkeys(c.length for c in self.columns))
        # the last: bytes of the JSON
        self.numbers = struct.Struct(f"<{scalars}{len(self.lengths)}QQ")
        self.start = HEAD.size + -(-self.numbers.size // ALIGN) * ALIGN
        # most columns of a step are empty, and numpy takes 1 us to make one
        self.empty: dict[str, dict[str, np.ndarray]] = {}
        for c in self.columns:
            nothing = np.empty((0, c.width) if c.width else 0, c.dtype)
            self.empty.setdefault(c.of, {})[c.name] = nothing

    def encode(
        self,
        of: Mapping[str, Any],
        scalars: Sequence[Any],
        rest: bytes,
        arrays: Sequence[np.ndarray],
    ) -> list:
        """``of``: the objects that have the columns, None: none of them."""
        counts: dict[str, int] = {}
        parts: list[Any] = [b"", b""]
        for owner, name, dtype, length, width in self.columns:
            if (thing := of[owner]) is None:
                continue
            column = getattr(thing, name)
            n = len(column)
            known = counts.setdefault(length, n)
            if column.dtype != dtype or known != n or (width and column.shape[1] != width):
                want = f"{dtype} [{known}{f', {width}' if width else ''}]"
                raise CodecError(f"{name}: {column.dtype} {list(column.shape)}; want {want}")
            if n:
                parts.append(column.tobytes())
        if rest:
            parts.append(rest)
        size = self.start + sum(map(len, parts))
        for array in arrays:
            pad = -size % ALIGN
            parts += [bytes(pad), array.tobytes()]
            size += pad + array.nbytes
        numbers = self.numbers.pack(
            *scalars, *(counts.get(length, 0) for length in self.lengths), len(rest)
        )
        parts[0] = HEAD.pack(MAGIC, VERSION, self.kind, size)
        parts[1] = numbers.ljust(self.start - HEAD.size, b"\0")
        return parts

    def decode(
        self, data: bytearray | bytes | memoryview
    ) -> tuple[tuple, dict[str, dict[str, Any]], Any, int]:
        """Scalars; columns by object and name; the JSON; where the arrays behind it begin."""
        if len(data) < self.start:
            raise CodecError(f"{len(data)} bytes; want at least {self.start}")
        magic, version, kind, size = HEAD.unpack_from(data)
        if (magic, version, kind) != (MAGIC, VERSION, self.kind):
            raise CodecError(
                f"bytes of {magic!r} {version}, kind {kind}; want {MAGIC!r} {VERSION}, kind {self.kind}"
            )
        if size != len(data):
            raise CodecError(f"{len(data)} bytes; want the {size} that their head tells of")
        numbers = self.numbers.unpack_from(data, HEAD.size)
        at, end = self.start, len(data) - numbers[-1]
        counts = dict(zip(self.lengths, numbers[-1 - len(self.lengths) : -1], strict=True))
        found: dict[str, dict[str, Any]] = {of: dict(empty) for of, empty in self.empty.items()}
        for owner, name, dtype, length, width in self.columns:
            n = counts[length] * (width or 1)
            if n == 0:
                continue
            if n * dtype.itemsize > end - at:
                raise CodecError(
                    f"{name}: {n} items; want no more than the {end - at} bytes that are left"
                )
            column = np.frombuffer(data, dtype, n, at)
            found[owner][name] = column.reshape(-1, width) if width else column
            at += n * dtype.itemsize
        text = bytes(data[at : at + numbers[-1]])
        try:
            rest = json.loads(text) if text else None
        except (ValueError, RecursionError) as e:
            raise CodecError(f"its JSON cannot be read: {e}") from e
        return numbers[: -1 - len(self.lengths)], found, rest, at + len(text)


# ---- plans -----------------------------------------------------------------------------------------------------------

_PLAN = Layout(
    PLAN,
    "qiiB",
    [
        *_columns("plan", I4, "rows", "slots q_len computed"),
        *_own(
            "plan",
            [("samples", 0), ("late", 0), ("host", 0), ("held", 0), ("prompt", 2), ("draft", 0)],
        ),
        *_own("plan", [("guided", 2), ("taps", 3), ("steered", 0)]),
        *_own("plan", [("scale", 0)], F4),
        *_own(
            "delta",
            [("leave", 0), ("fork", 3), ("table", 4), ("trim", 4), ("copy", 3), ("token", 2)],
        ),
        *_own("delta", [("keep", 2), ("forget", 0)], I8),
        *_columns("join", I4, "joins", "slot known computed prompt end sample min_end n_eos"),
        *_columns("join", I4, "joins", "stop_ids", STOP_IDS),
        *_columns("join", I8, "joins", "seed"),
        *_own("join", [("saved", 0)], I8),
        *_own("join", [("tokens", 0), ("steer", 2)]),
        *_own("join", [("vectors", 0)], F4),
    ],
)


def encode_plan(plan: StepPlan) -> list[bytes]:
    """Its bytes, in parts.  CodecError names a column of another dtype or shape than ``StepPlan`` says."""
    join = plan.delta.join
    rest, arrays = (b"", []) if join is None else _encode_rows(join.bound)
    scalars = plan.id, plan.topk, plan.prompt_topk, join is not None
    return _PLAN.encode({"plan": plan, "delta": plan.delta, "join": join}, scalars, rest, arrays)


def decode_plan(data: bytearray | bytes) -> StepPlan:
    (step, topk, prompt_topk, joined), found, rest, at = _PLAN.decode(data)
    join = None
    if joined:
        join = Join(**found["join"], bound=_decode_rows(rest, data, at))
    elif at != len(data):
        raise CodecError(f"{len(data) - at} bytes too many")
    return StepPlan(
        id=step,
        topk=topk,
        prompt_topk=prompt_topk,
        **found["plan"],
        delta=Delta(join=join, **found["delta"]),
    )


def _encode_rows(bound: Sequence[Mapping[int, Row]]) -> tuple[bytes, list[np.ndarray]]:
    """What processors bound: numbers and names as JSON, values as arrays in the same order."""
    if not any(bound):
        return json.dumps(len(bound)).encode(), []
    told, arrays = [], []
    for rows in bound:
        mine: list[Any] = []
        for i, row in rows.items():
            values = []
            for name, value in row.values.items():
                array = np.ascontiguousarray(value)
                if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
                    raise CodecError(
                        f"column {name} is bound to {array.dtype}; want numbers of up to 8 bytes"
                    )
                values.append([name, array.dtype.newbyteorder("<").str, *np.shape(value)])
                arrays.append(array.astype(array.dtype.newbyteorder("<"), copy=False))
            mine.append([int(i), int(row.variant), values])
        told.append(mine)
    return json.dumps(told).encode(), arrays


def _decode_rows(told: Any, data: bytearray | bytes, at: int) -> tuple[dict[int, Row], ...]:
    try:
        if type(told) is int and told >= 0:
            bound: tuple[dict[int, Row], ...] = tuple({} for _ in range(told))
        else:
            made: list[dict[int, Row]] = []
            for rows in told:
                mine = {}
                for i, variant, values in rows:
                    columns = {}
                    for name, dtype, *shape in values:
                        columns[name], at = _array(data, at, np.dtype(dtype), shape)
                    mine[i] = Row(columns, variant)
                made.append(mine)
            bound = tuple(made)
    except (TypeError, ValueError, AttributeError) as e:
        raise CodecError(f"its rows cannot be read: {e}") from e
    if at != len(data):
        raise CodecError(f"{len(data) - at} bytes too many")
    return bound


def _array(
    data: bytearray | bytes, at: int, dtype: np.dtype, shape: Sequence[int]
) -> tuple[np.ndarray, int]:
    at += -at % ALIGN
    n = math.prod(shape)
    if dtype.kind not in "biuf" or n < 0 or n * dtype.itemsize > len(data) - at:
        raise CodecError(f"an array of {n} {dtype}; want numbers within the {len(data)} bytes")
    return np.frombuffer(data, dtype, n, at).reshape(shape), at + n * dtype.itemsize


# ---- late inputs -----------------------------------------------------------------------------------------------------

_LATE = Layout(LATE, "qI", _own("late", [("mask", 0)]))


def encode_late(step: int, late: LateInputs) -> list[bytes]:
    mask = np.ascontiguousarray(late.mask)
    return _LATE.encode(
        {"late": SimpleNamespace(mask=mask.reshape(-1))}, (step, mask.shape[1]), b"", []
    )


def decode_late(data: bytearray | bytes) -> tuple[int, LateInputs]:
    (step, words), found, _, at = _LATE.decode(data)
    flat = found["late"]["mask"]
    if at != len(data) or words == 0 or len(flat) % words:
        raise CodecError(
            f"masks of {len(flat)} words in rows of {words}, {len(data) - at} bytes too many"
        )
    return step, LateInputs(flat.reshape(-1, words))


# ---- results ---------------------------------------------------------------------------------------------------------

_TABLES = [("chosen", F4), ("rank", I4), ("top_ids", I4), ("top", F4)]
_RESULT = Layout(
    RESULT,
    "qdiiq",
    [
        *_columns("result", I4, "rows", "slots tokens count"),
        *_columns("result", U1, "rows", "flags"),
        *_own("result", [("drafted", 0)]),
        *_own("result", [("taps", 0)], F4),
        *(
            ColumnSpec(of, name, dtype, f"{of}.{name}")
            for of in ("logprobs", "prompt")
            for name, dtype in _TABLES
        ),
        ColumnSpec("logits", "logits", F4, "logits.logits"),
    ],
)


def encode_result(result: StepResult) -> list[bytes]:
    """Its bytes, in parts.  CodecError names a column of another dtype or shape than ``StepResult`` says."""
    of = {
        "result": result,
        "logprobs": _flat(result.logprobs),
        "prompt": _flat(result.prompt),
        "logits": None
        if result.logits is None
        else SimpleNamespace(logits=result.logits.reshape(-1)),
    }
    k = [-1 if lp is None else lp.top.shape[1] for lp in (result.logprobs, result.prompt)]
    vocab = -1 if result.logits is None else result.logits.shape[1]
    told: Any = None
    if result.errors or result.seams:
        told = [
            [[e.scope, e.plugin, e.message, list(map(int, e.rows))] for e in result.errors],
            dict(result.seams),
        ]
    rest = b"" if told is None else json.dumps(told).encode()
    return _RESULT.encode(of, (result.id, result.device_ms, *k, vocab), rest, [])


def decode_result(data: bytearray | bytes) -> StepResult:
    (step, ms, k, prompt_k, vocab), found, rest, at = _RESULT.decode(data)
    if at != len(data):
        raise CodecError(f"{len(data) - at} bytes too many")
    try:
        errors, seams = rest or ((), {})
        told = tuple(
            StepError(scope, plugin, message, tuple(rows))
            for scope, plugin, message, rows in errors
        )
        return StepResult(
            id=step,
            **found["result"],
            logprobs=_tables(found["logprobs"], k),
            errors=told,
            device_ms=ms,
            seams=seams,
            prompt=_tables(found["prompt"], prompt_k),
            logits=None if vocab < 0 else found["logits"]["logits"].reshape(-1, vocab),
        )
    except (TypeError, ValueError) as e:
        raise CodecError(f"its parts do not fit: {e}") from e


def _flat(lp: LogProbs | None) -> LogProbs | None:
    return (
        None
        if lp is None
        else LogProbs(lp.chosen, lp.rank, lp.top_ids.reshape(-1), lp.top.reshape(-1))
    )


def _tables(found: Mapping[str, np.ndarray], k: int) -> LogProbs | None:
    if k < 0:
        return None
    n = len(found["chosen"])
    return LogProbs(
        found["chosen"], found["rank"], found["top_ids"].reshape(n, k), found["top"].reshape(n, k)
    )
