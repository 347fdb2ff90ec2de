"""Encode plans, late inputs and results as bytes, for an executor whose worker is in another process or on another
machine.

A message has four parts::

    head      magic, version, kind, total size in bytes                    24 bytes
    numbers   the scalars, then the length of each column                  fixed for a kind
    columns   items of 8 bytes first, then of 4, then of 1; no gaps        lengths as above
    rest      JSON (names and messages), then the arrays that processors bound, each at a multiple of 8

Messages hold numbers, text and arrays only, so decoding never runs code.  Both sides must have the same version of
minivllm.  Bytes of another ``VERSION``, foreign bytes, and bytes that are too short or too long raise ``CodecError``.
Decoded arrays are views of the received bytes; they are writable if the bytes are.
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
    FORMS,
    STOP_IDS,
    Delta,
    Join,
    LateInputs,
    LogProbs,
    StepError,
    StepForm,
    StepPlan,
    StepResult,
    no_rows,
)
from .sampling import Row

VERSION = 11
MAGIC = b"mvllmstp"
PLAN, LATE, RESULT = 1, 2, 3  # kinds
HEAD = struct.Struct("<8sIIQ")
I8, I4, F8, F4, U1 = (np.dtype(name) for name in ("<i8", "<i4", "<f8", "<f4", "u1"))
ALIGN = 8


class CodecError(ValueError):
    """Raised for bytes that no encoder of this version has written, and for values that the format cannot represent."""


class ColumnSpec(NamedTuple):
    """One array of a message: the object ``owner`` to which it belongs, and its ``name`` there.

    ``length`` is the name of the count that gives its first dimension.  ``width`` is the size of its second dimension;
    0 means that the array has one dimension."""

    owner: str
    name: str
    dtype: np.dtype
    length: str
    width: int = 0


def _columns(
    owner: str, dtype: np.dtype, length: str, names: str, width: int = 0
) -> list[ColumnSpec]:
    """Return the specs of several columns (arrays of a message) whose first dimension is the count ``length``.
    ``names`` are their names, separated by spaces."""
    return [ColumnSpec(owner, name, dtype, length, width) for name in names.split()]


def _own(owner: str, names: Sequence[tuple[str, int]], dtype: np.dtype = I4) -> list[ColumnSpec]:
    """Return the specs of several columns (arrays of a message), each with a length of its own.  ``names`` has (name,
    width) pairs."""
    return [ColumnSpec(owner, name, dtype, f"{owner}.{name}", width) for name, width in names]


class Layout:
    """The order of the scalars and columns (arrays) in one kind of message."""

    def __init__(self, kind: int, scalars: str, columns: Sequence[ColumnSpec]) -> None:
        """Compute the positions in the message.  ``scalars`` are the ``struct`` codes of the scalars."""
        self.kind = kind
        self.columns = sorted(columns, key=lambda c: -c.dtype.itemsize)
        self.lengths = tuple(dict.fromkeys(c.length for c in self.columns))
        # The scalars of a message are followed by the length of each column and the size of the JSON in bytes.
        self.numbers = struct.Struct(f"<{scalars}{len(self.lengths)}QQ")
        self.start = HEAD.size + -(-self.numbers.size // ALIGN) * ALIGN
        # Empty arrays, which most columns of a step are.  They are shared, because numpy takes 1 us
        # to create an array.
        self.empty: dict[str, dict[str, np.ndarray]] = {}
        for c in self.columns:
            shape = (0, c.width) if c.width else 0
            self.empty.setdefault(c.owner, {})[c.name] = np.empty(shape, c.dtype)

    def encode(
        self,
        owners: Mapping[str, Any],
        scalars: Sequence[Any],
        rest: bytes,
        arrays: Sequence[np.ndarray],
    ) -> list:
        """Return a message as a list of byte strings.

        ``owners`` maps the owner names of the columns to the objects.  None means that the object is absent and its
        columns are empty.  ``rest`` is the JSON; ``arrays`` follow it.  CodecError for a column of a wrong dtype or
        shape.
        """
        counts: dict[str, int] = {}
        parts: list[Any] = [b"", b""]
        for owner, name, dtype, length, width in self.columns:
            source = owners[owner]
            if source is None:
                continue
            column = getattr(source, name)
            n = len(column)
            count = counts.setdefault(length, n)
            if column.dtype != dtype or count != n or (width and column.shape[1] != width):
                shape = [count, width] if width else [count]
                found = f"{column.dtype} {list(column.shape)}"
                raise CodecError(f"{name}: {found}; expected {dtype} {shape}")
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
        """Return (scalars, columns by owner and name, decoded JSON, offset of the arrays behind the JSON) of a message.

        CodecError if the bytes are not a complete message of this kind."""
        if len(data) < self.start:
            raise CodecError(f"the message has {len(data)} bytes; expected at least {self.start}")
        magic, version, kind, size = HEAD.unpack_from(data)
        if (magic, version, kind) != (MAGIC, VERSION, self.kind):
            raise CodecError(
                f"the message begins with {magic!r}, version {version}, kind {kind}; "
                f"expected {MAGIC!r}, version {VERSION}, kind {self.kind}"
            )
        if size != len(data):
            raise CodecError(
                f"the message has {len(data)} bytes; expected {size}, the size in its head"
            )
        numbers = self.numbers.unpack_from(data, HEAD.size)
        at = self.start
        end = len(data) - numbers[-1]
        counts = dict(zip(self.lengths, numbers[-1 - len(self.lengths) : -1], strict=True))
        found: dict[str, dict[str, Any]] = {
            owner: dict(columns) for owner, columns in self.empty.items()
        }
        for owner, name, dtype, length, width in self.columns:
            n = counts[length] * (width or 1)
            if n == 0:
                continue
            if n * dtype.itemsize > end - at:
                raise CodecError(
                    f"column {name} has {n} items of {dtype.itemsize} bytes, but the message has only "
                    f"{end - at} bytes left"
                )
            column = np.frombuffer(data, dtype, n, at)
            found[owner][name] = column.reshape(-1, width) if width else column
            at += n * dtype.itemsize
        text = bytes(data[at : at + numbers[-1]])
        try:
            rest = json.loads(text) if text else None
        except (ValueError, RecursionError) as e:
            raise CodecError(f"the JSON of the message cannot be read: {e}") from e
        return numbers[: -1 - len(self.lengths)], found, rest, at + len(text)


# ---- plans -----------------------------------------------------------------------------------------------------------

_PLAN = Layout(
    PLAN,
    "qiiB",
    [
        *_columns("plan", I4, "rows", "slots q_len computed"),
        *_own(
            "plan",
            [
                ("samples", 0),
                ("late", 0),
                ("host", 0),
                ("held", 0),
                ("prompt", 2),
                ("draft", 0),
                ("slack", 0),
                ("guided", 2),
                ("taps", 3),
                ("steered", 0),
                ("pooled", 3),
                ("observe", 3),
                ("sums", 0),
                ("given", 2),
                ("routes", 0),
            ],
        ),
        *_own("plan", [("scale", 0)], F4),
        *_own(
            "delta",
            [
                ("leave", 0),
                ("fork", 3),
                ("table", 4),
                ("trim", 4),
                ("copy", 3),
                ("token", 2),
                ("state", 2),
                ("save", 4),
                ("adapter", 2),
                ("compact", 5),
                ("image", 7),
                ("sources", 0),
                ("kept", 0),
            ],
        ),
        *_own("delta", [("pixels", 0)], U1),
        *_own("delta", [("keep", 2), ("forget", 0), ("store", 6), ("fill", 3)], I8),
        *_columns("join", I4, "joins", "slot known computed prompt end sample min_end n_eos"),
        *_columns("join", I4, "joins", "stop_ids", STOP_IDS),
        *_columns("join", I8, "joins", "seed"),
        *_own("join", [("saved", 0), ("owner", 0)], I8),
        *_own("join", [("tokens", 0), ("steer", 2), ("adapter", 0), ("image", 7)]),
        *_own("join", [("vectors", 0)], F4),
    ],
)


def encode_plan(plan: StepPlan) -> list[bytes]:
    """Return a plan encoded as a list of byte strings.  CodecError names a column whose dtype or shape is not that of
    ``StepPlan``."""
    join = plan.delta.join
    rest, arrays = (b"", []) if join is None else _encode_rows(join.bound)
    scalars = plan.id, plan.topk, plan.prompt_topk, join is not None
    return _PLAN.encode({"plan": plan, "delta": plan.delta, "join": join}, scalars, rest, arrays)


def decode_plan(data: bytearray | bytes) -> StepPlan:
    """Return the plan that ``encode_plan`` has encoded.  CodecError if the bytes are malformed."""
    (step, topk, prompt_topk, joined), found, rest, at = _PLAN.decode(data)
    join = None
    if joined:
        join = Join(**found["join"], bound=_decode_rows(rest, data, at))
    elif at != len(data):
        raise CodecError(
            f"the message has {len(data) - at} bytes after its last array; expected none"
        )
    return StepPlan(
        id=step,
        topk=topk,
        prompt_topk=prompt_topk,
        **found["plan"],
        delta=Delta(join=join, **found["delta"]),
    )


def _encode_rows(bound: Sequence[Mapping[int, Row]]) -> tuple[bytes, list[np.ndarray]]:
    """Encode the column values (Row) that processors returned from ``bind``.  Return the numbers and names as JSON, and
    the values as arrays in the same order.  CodecError for values that are not numbers of up to 8 bytes."""
    if not any(bound):
        return json.dumps(len(bound)).encode(), []
    described: list[Any] = []
    arrays: list[np.ndarray] = []
    for rows in bound:
        entries: list[Any] = []
        for i, row in rows.items():
            values = []
            for name, value in row.values.items():
                array = np.ascontiguousarray(value)
                if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
                    raise CodecError(
                        f"column {name} is bound to {array.dtype}; expected numbers of up to 8 bytes"
                    )
                stored = array.dtype.newbyteorder("<")
                values.append([name, stored.str, *np.shape(value)])
                arrays.append(array.astype(stored, copy=False))
            entries.append([int(i), int(row.variant), values])
        described.append(entries)
    return json.dumps(described).encode(), arrays


def _decode_rows(described: Any, data: bytearray | bytes, at: int) -> tuple[dict[int, Row], ...]:
    """Return the column values (Row) of processors that ``_encode_rows`` has encoded.  Their arrays begin at offset
    ``at`` of ``data``.

    ``described`` is the decoded JSON.  A number n instead of a list stands for n processors without values.  CodecError
    for malformed values, and for bytes after the last array."""
    bound: list[dict[int, Row]] = []
    try:
        if type(described) is int and described >= 0:
            described = [[]] * described
        for entries in described:
            rows = {}
            for i, variant, values in entries:
                columns = {}
                for name, dtype, *shape in values:
                    columns[name], at = _array(data, at, np.dtype(dtype), shape)
                rows[i] = Row(columns, variant)
            bound.append(rows)
    except (TypeError, ValueError, AttributeError) as e:
        raise CodecError(f"the rows of the message cannot be read: {e}") from e
    if at != len(data):
        raise CodecError(
            f"the message has {len(data) - at} bytes after its last array; expected none"
        )
    return tuple(bound)


def _array(
    data: bytearray | bytes, at: int, dtype: np.dtype, shape: Sequence[int]
) -> tuple[np.ndarray, int]:
    """Return (array, offset of its end) for the array in ``data`` that begins at ``at``, rounded up to a multiple of 8
    bytes.  CodecError if ``data`` is too short, or if ``dtype`` is not numeric."""
    at += -at % ALIGN
    n = math.prod(shape)
    size = n * dtype.itemsize
    if dtype.kind not in "biuf" or n < 0 or size > len(data) - at:
        raise CodecError(
            f"an array of {n} items of {dtype} at byte {at} does not fit into the message of {len(data)} bytes"
        )
    return np.frombuffer(data, dtype, n, at).reshape(shape), at + size


# ---- late inputs -----------------------------------------------------------------------------------------------------

_LATE = Layout(LATE, "qI", _own("late", [("mask", 0)]))


def encode_late(step: int, late: LateInputs) -> list[bytes]:
    """Return the late inputs (token masks) of step ``step`` encoded as a list of byte strings."""
    mask = np.ascontiguousarray(late.mask)
    flat = SimpleNamespace(mask=mask.reshape(-1))
    return _LATE.encode({"late": flat}, (step, mask.shape[1]), b"", [])


def decode_late(data: bytearray | bytes) -> tuple[int, LateInputs]:
    """Decode the bytes of ``encode_late``.  Return (number of the step, late inputs, which are token masks).
    CodecError if they are malformed."""
    (step, words), found, _, at = _LATE.decode(data)
    flat = found["late"]["mask"]
    if at != len(data) or words == 0 or len(flat) % words:
        raise CodecError(
            f"the message has {len(flat)} words of token masks and {len(data) - at} further bytes; "
            f"expected whole rows of {words} words, and no further bytes"
        )
    return step, LateInputs(flat.reshape(-1, words))


# ---- results ---------------------------------------------------------------------------------------------------------

NO_SUMS = no_rows(0, 0, dtype=np.float64)
_TABLES = [("chosen", F4), ("rank", I4), ("top_ids", I4), ("top", F4)]
_RESULT = Layout(
    RESULT,
    "qdiiqqiiqi",
    [
        *_columns("result", I4, "rows", "slots tokens count"),
        *_columns("result", U1, "rows", "flags"),
        *_own("result", [("drafted", 0), ("kept", 0)]),
        *_own("result", [("taps", 0)], F4),
        *(
            ColumnSpec(owner, name, dtype, f"{owner}.{name}")
            for owner in ("logprobs", "prompt")
            for name, dtype in _TABLES
        ),
        ColumnSpec("logits", "logits", F4, "logits.logits"),
        ColumnSpec("sums", "sums", F8, "sums.sums"),
    ],
)


def encode_result(result: StepResult) -> list[bytes]:
    """Return a result encoded as a list of byte strings.  CodecError names a column whose dtype or shape is not that of
    ``StepResult``."""
    k = [-1 if lp is None else lp.top.shape[1] for lp in (result.logprobs, result.prompt)]
    logits = None
    vocab = -1
    if result.logits is not None:
        logits = SimpleNamespace(logits=result.logits.reshape(-1))
        vocab = result.logits.shape[1]
    rest = b""
    if result.errors or result.seams or result.lost:
        errors = [[e.scope, e.plugin, e.message, list(map(int, e.rows))] for e in result.errors]
        rest = json.dumps([errors, dict(result.seams), list(result.lost.items())]).encode()
    owners = {
        "result": result,
        "logprobs": _flat(result.logprobs),
        "prompt": _flat(result.prompt),
        "logits": logits,
        "sums": SimpleNamespace(sums=result.pooled.reshape(-1)),
    }
    scalars = (
        result.id,
        result.device_ms,
        *k,
        vocab,
        result.pooled.shape[1],
        *form_numbers(result.form),
        result.shared,
    )
    return _RESULT.encode(owners, scalars, rest, [])


def decode_result(data: bytearray | bytes) -> StepResult:
    """Return the result that ``encode_result`` has encoded.  CodecError if the bytes are malformed."""
    (step, ms, k, prompt_k, vocab, hidden, *form, shared), found, rest, at = _RESULT.decode(data)
    if at != len(data):
        raise CodecError(
            f"the message has {len(data) - at} bytes after its last array; expected none"
        )
    try:
        described, seams, lost = rest or ((), {}, ())
        errors = tuple(
            StepError(scope, plugin, message, tuple(rows))
            for scope, plugin, message, rows in described
        )
        return StepResult(
            id=step,
            **found["result"],
            logprobs=_tables(found["logprobs"], k),
            errors=errors,
            device_ms=ms,
            seams=seams,
            lost={int(number): str(why) for number, why in lost},
            prompt=_tables(found["prompt"], prompt_k),
            logits=None if vocab < 0 else found["logits"]["logits"].reshape(-1, vocab),
            pooled=found["sums"]["sums"].reshape(-1, hidden) if hidden else NO_SUMS,
            form=form_of(*form),
            shared=shared,
        )
    except (TypeError, ValueError) as e:
        raise CodecError(f"the parts of the result do not match: {e}") from e


def form_numbers(form: StepForm) -> tuple[int, int, int]:
    """Return the form of a step (how its layers ran) as three numbers for ``form_of``.  CodecError for a kind that is
    not one of ``FORMS``."""
    if form.kind not in FORMS:
        known = ", ".join(map(repr, FORMS))
        raise CodecError(f"the step has the form {form.kind!r}; expected one of {known}")
    return FORMS.index(form.kind), form.rows, form.tokens


def form_of(kind: int, rows: int, tokens: int) -> StepForm:
    """Return the form of a step (how its layers ran) from three numbers of ``form_numbers``.  CodecError for an unknown
    kind."""
    if not 0 <= kind < len(FORMS):
        raise CodecError(
            f"the message has the number {kind} for the form of a step; expected 0 to {len(FORMS) - 1}"
        )
    return StepForm(FORMS[kind], rows, tokens)


def _flat(lp: LogProbs | None) -> LogProbs | None:
    """Return log-probabilities whose tables ``top_ids`` and ``top`` have one dimension; None for None."""
    if lp is None:
        return None
    return LogProbs(lp.chosen, lp.rank, lp.top_ids.reshape(-1), lp.top.reshape(-1))


def _tables(found: Mapping[str, np.ndarray], k: int) -> LogProbs | None:
    """Return decoded log-probabilities, with tables of ``k`` columns; None if k is negative."""
    if k < 0:
        return None
    chosen = found["chosen"]
    shape = len(chosen), k
    top_ids, top = found["top_ids"].reshape(shape), found["top"].reshape(shape)
    return LogProbs(chosen, found["rank"], top_ids, top)
