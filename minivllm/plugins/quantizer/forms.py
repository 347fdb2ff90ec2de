"""The forms in which weights of quantized checkpoints are stored, and the choice of a form for a weight.

    int4      up to 4 bits, scales of 32, 64 or 128 neighbouring inputs         Int4Rows, by its kernels
    rows      8 bits around 0 or float8, a scale for each output                ByteRows, by its kernels
    grouped   8 bits or float8, scales of 8 to 128 neighbouring inputs          GroupedBytes, by its kernels
    table     codes of 4 bits for 16 numbers, scales of 32 or more inputs       TableRows, converted to numbers
    plain     all other weights, converted to numbers while they are loaded     PlainRows

A group of a checkpoint may be longer than the group of a form, or end within one.  Its scale is then stored several
times.  If the inputs of a scale are not neighbours (act-order), the inputs and x are sorted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight, WeightScheme

from .fast import grouped_kernels_of
from .int4 import BLOCK, CENTRE, Int4Rows
from .int4 import pack as pack_int4
from .int8 import ByteRows
from .tiled import Tiled, WholeWeight

GROUPS = (128, 64, 32, 16, 8)
INT4_LEAST, BYTES_LEAST = 32, 8  # least number of inputs that share a scale
ROWS_AT_ONCE = 1024
WITHOUT_KERNELS = 1 << 24  # elements that are converted in one part on a GPU without these kernels


class Numbers(NamedTuple):
    """The weight of one part, w[n, k] = (codes[n, k] - zero[n, g]) * scale[n, g] with g = group_of[k]."""

    codes: Tensor  # u8, int8, float8 [n, k]
    scale: Tensor  # f32 [n, groups]
    zero: Tensor | None  # f32 [n, groups]; None means ``centre``
    group_of: Tensor  # i64 [k] on the CPU
    bits: int = 8
    centre: int = 0
    table: Tensor | None = None  # f32 [16], the number of each code, in place of codes - zero


class HeldRows(NamedTuple):
    """Some rows of a weight in one of the forms."""

    form: str
    weight: Tensor
    scale: Tensor | None = None  # f32 [n, k / group], or [n] for scales of whole rows
    zero: Tensor | None = None  # as ``scale``
    group: int = 0
    order: Tensor | None = None  # i32 [k], the input of x that each column multiplies
    table: Tensor | None = None  # f32 [16]


def fields(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` fields of each row of words i32 [rows, W], as u8.

    Fields start at the low bits and continue across words.
    """
    # the flat view comes first, because a single column is contiguous with any stride
    raw = words.contiguous().view(-1).view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return raw[:, :count]
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        each = [(raw >> at) & mask for at in range(0, 8, bits)]
        return torch.stack(each, dim=-1).flatten(1)[:, :count]
    at = torch.arange(count, device=raw.device) * bits
    low, high = raw[:, at // 8].int(), raw[:, (at // 8 + 1).clamp(max=raw.shape[1] - 1)].int()
    return ((low | high << 8) >> at % 8 & mask).to(torch.uint8)


def fields_within(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` fields of each row of words i32 [rows, W], as u8 [rows, count].

    A word holds 32 // ``bits`` fields, the first one in its lowest bits.  Its highest bits are unused if ``bits`` does
    not divide 32."""
    at = torch.arange(32 // bits, device=words.device, dtype=torch.int32) * bits
    found = (words.unsqueeze(-1) >> at) & ((1 << bits) - 1)
    return found.flatten(1)[:, :count].to(torch.uint8)


def piece_of(part: Numbers, dtype: torch.dtype) -> HeldRows:
    """Return the form with the fewest bits that holds these numbers exactly.  Only ``plain`` rounds, to ``dtype``."""
    if part.zero is not None and bool((part.zero == part.centre).all()):
        part = part._replace(zero=None)
    unit, order = arranged(part.group_of, INT4_LEAST) if part.bits <= 4 else (0, None)
    form = "int4" if unit else "grouped"
    if part.table is not None:
        form = "table"
    elif not unit and part.zero is None and bool((part.group_of == part.group_of[0]).all()):
        return HeldRows("rows", _signed(part), part.scale[:, part.group_of[0]].contiguous())
    if not unit and part.table is None:
        unit, order = arranged(part.group_of, BYTES_LEAST)
    if not unit:
        return HeldRows("plain", dequantized(part, dtype))
    codes, groups = part.codes, part.group_of[::unit]
    if order is not None:
        codes, groups = codes[:, order.to(codes.device)], part.group_of[order][::unit]
        order = order.int().to(codes.device)
    groups = groups.to(codes.device)
    scale, zero = part.scale[:, groups], None if part.zero is None else part.zero[:, groups]
    if form == "table":
        return HeldRows(form, pack_int4(codes.contiguous()), scale, None, unit, order, part.table)
    if form == "int4":
        weight = pack_int4((codes if zero is not None else codes + (CENTRE - part.centre)).contiguous())
    else:
        weight = codes.contiguous() if zero is not None else _signed(part._replace(codes=codes))
    return HeldRows(form, weight, scale, zero, unit, order)


def _signed(part: Numbers) -> Tensor:
    """Return codes as signed numbers.  Unsigned codes are reduced by ``centre``."""
    if part.codes.dtype != torch.uint8:
        return part.codes.contiguous()
    return (part.codes ^ 128).view(torch.int8) + (128 - part.centre)


def arranged(group_of: Tensor, least: int) -> tuple[int, Tensor | None]:
    """Return the number of neighbouring inputs that share a scale, and the order of inputs in which they do.

    The order None means that no reordering is needed.  Return (0, None) if fewer than ``least`` inputs share a scale in
    any order.
    """
    unit = _unit(group_of)
    if unit >= least:
        return unit, None
    order = torch.argsort(group_of, stable=True)
    unit = _unit(group_of[order])
    return (unit, order) if unit >= least else (0, None)


def _unit(group_of: Tensor) -> int:
    """Return the largest of GROUPS that divides the length of every run of equal numbers, 0 if none does."""
    ends = (group_of[1:] != group_of[:-1]).nonzero().flatten() + 1
    common = math.gcd(len(group_of), *ends.tolist())
    return next((n for n in GROUPS if common % n == 0), 0)


def dequantized(part: Numbers, dtype: torch.dtype) -> Tensor:
    """Return the numbers [n, k], computed in float32 and rounded to ``dtype``."""
    out = torch.empty(part.codes.shape, dtype=dtype, device=part.codes.device)
    at = part.group_of.to(part.codes.device)
    for i in range(0, len(out), ROWS_AT_ONCE):
        rows = slice(i, i + ROWS_AT_ONCE)
        zero = part.centre if part.zero is None else part.zero[rows][:, at]
        codes = part.codes[rows]
        steps = codes.float() - zero if part.table is None else part.table[codes.long()]
        out[rows] = (steps * part.scale[rows][:, at]).to(dtype)
    return out


def merged(pieces: Sequence[HeldRows]) -> HeldRows | None:
    """Join pieces along their rows.  Return None if they differ in more than the number of their scales."""
    first = pieces[0]
    for one in pieces[1:]:
        if (one.form, one.weight.dtype) != (first.form, first.weight.dtype):
            return None
        if (one.order is None) != (first.order is None):
            return None
        if one.order is not None and first.order is not None and not torch.equal(one.order, first.order):
            return None
        if one.table is not None and not torch.equal(one.table, first.table):  # type: ignore[arg-type]
            return None
    if len(pieces) == 1:
        return first
    weight = torch.cat([one.weight for one in pieces])
    if first.form == "plain":
        return HeldRows("plain", weight)
    group = min(one.group for one in pieces)
    scale = torch.cat([_repeated(one.scale, one.group, group) for one in pieces])
    zero = None
    if any(one.zero is not None for one in pieces):
        zero = torch.cat([_repeated(_zero(one), one.group, group) for one in pieces])
    return HeldRows(first.form, weight, scale, zero, group, first.order, first.table)


def _zero(piece: HeldRows) -> Tensor:
    """Return the zero points of a piece.  Without its own, they are 8 in int4 and 0 in signed bytes."""
    assert piece.scale is not None
    none = CENTRE if piece.form == "int4" else 0
    return torch.full_like(piece.scale, none) if piece.zero is None else piece.zero


def _repeated(x: Tensor | None, group: int, wanted: int) -> Tensor:
    assert x is not None
    return x if group == wanted else x.repeat_interleave(group // wanted, dim=1)


class GroupedBytes(Tiled):
    """``weight`` u8, int8 or float8 [out, in] with ``scale`` float32 [out, in / group].

    If there are zero points, ``zero`` has the shape of ``scale``.
    """

    elsewhere = WITHOUT_KERNELS

    def __init__(self, info: ModuleInfo, weight: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        super().__init__(info, weight=weight, scale=scale, zero=zero)
        self.weight, self.scale, self.zero = weight, scale, zero

    def finish(self) -> None:
        self.kernels = grouped_kernels_of(self.weight, self.scale, self.zero)

    def stored(self) -> StoredWeight:
        return StoredWeight(self.weight, self.scale, self.zero, self.weight.shape[1] // self.scale.shape[1])

    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        scale = self.scale[rows]
        steps = self.weight[rows].float().view(*scale.shape, -1)
        if self.zero is not None:
            steps.sub_(self.zero[rows][..., None])
        return steps.mul_(scale[..., None]).to(dtype).flatten(1)


class TableRows(Tiled):
    """``weight`` u8 [out, in / 2] in the order of ``int4.pack``, with ``scale`` float32 [out, in / group].

    ``table`` f32 [16] has the number of each code.
    """

    elsewhere = WITHOUT_KERNELS

    def __init__(self, info: ModuleInfo, weight: Tensor, scale: Tensor, table: Tensor) -> None:
        super().__init__(info, weight=weight, scale=scale, table=table)
        self.weight, self.scale, self.table = weight, scale, table

    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        scale = self.scale[rows]
        halves = self.weight[rows].view(len(scale), -1, 1, BLOCK // 2)
        codes = torch.cat((halves & 15, halves >> 4), dim=2).view(*scale.shape, -1)
        return self.table[codes.int()].mul_(scale[..., None]).to(dtype).flatten(1)


class PlainRows(WholeWeight):
    """``weight`` [out, in] in the dtype of the activations."""

    def __init__(self, info: ModuleInfo, weight: Tensor) -> None:
        super().__init__(info, weight=weight)
        self.weight = weight

    def finish(self) -> None:
        self.native = self.native_product(StoredWeight(self.weight))

    def stored(self) -> StoredWeight:
        return StoredWeight(self.weight)

    def _product(self, x: Tensor, rows: slice, out: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight[rows])
        return y if out is None else out.copy_(y)


def scheme_of(piece: HeldRows, info: ModuleInfo) -> WeightScheme:
    """Return the scheme that multiplies by a piece that has all rows of ``info``."""
    given: Any = piece
    if piece.form == "int4":
        return Int4Rows(info, given.weight, given.scale.contiguous(), _whole(given.zero), given.group)
    if piece.form == "rows":
        return ByteRows(info, given.weight, given.scale)
    if piece.form == "table":
        return TableRows(info, given.weight, given.scale.contiguous(), given.table)
    if piece.form == "grouped":
        return GroupedBytes(info, given.weight, given.scale.contiguous(), _whole(given.zero))
    return PlainRows(info, given.weight)


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
