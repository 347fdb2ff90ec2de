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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, StoredWeight, WeightScheme

from .fast import grouped_kernels_of
from .int4 import CENTRE, Int4Rows
from .int4 import pack as pack_int4
from .int4 import unpack as unpack_int4
from .int8 import ByteRows
from .tiled import Tiled, WholeWeight

GROUPS = (128, 64, 32, 16, 8)
# smallest number of inputs that share a scale, in the form int4 and in the form grouped
INT4_LEAST, BYTES_LEAST = 32, 8
ROWS_AT_ONCE = 1024
WITHOUT_KERNELS = 1 << 24  # number of elements that are converted together on a GPU, by the forms without kernels


class Numbers(NamedTuple):
    """The quantized weight of one part of a module: w[n, k] = (codes[n, k] - zero[n, g]) * scale[n, g] with g =
    group_of[k].
    """

    codes: Tensor  # u8, int8, float8 [n, k]
    scale: Tensor  # f32 [n, groups]
    zero: Tensor | None  # f32 [n, groups]; None means that all are equal to ``centre``
    group_of: Tensor  # i64 [k] on the CPU, index of the group (inputs with a common scale) of each input
    bits: int = 8
    centre: int = 0
    table: Tensor | None = None  # f32 [16] the number that each code stands for, which replaces codes - zero


class HeldRows(NamedTuple):
    """Some rows of a weight, stored in one of the forms of this module (``form`` is its name)."""

    form: str
    weight: Tensor
    scale: Tensor | None = None  # f32 [n, k / group], or [n] for scales of whole rows
    zero: Tensor | None = None  # as ``scale``
    group: int = 0
    # i32 [k], for each column of the weight the input of x by which it is multiplied; None means the order of x
    order: Tensor | None = None
    table: Tensor | None = None  # f32 [16]


def fields(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` fields of each row of words i32 [rows, W], as u8.

    Fields start at the low bits and continue across words.
    """
    # A tensor with a single column counts as contiguous with any stride, and then it cannot be viewed as bytes
    # directly.
    flat = words.contiguous().view(-1)
    raw = flat.view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return raw[:, :count]
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        each = [(raw >> at) & mask for at in range(0, 8, bits)]
        found = torch.stack(each, dim=-1).flatten(1)
        return found[:, :count]
    first_bit = torch.arange(count, device=raw.device) * bits
    byte = first_bit // 8
    last = raw.shape[1] - 1
    following = (byte + 1).clamp(max=last)
    low, high = raw[:, byte].int(), raw[:, following].int()
    both = low | high << 8
    found = both >> first_bit % 8 & mask
    return found.to(torch.uint8)


def fields_within(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first ``count`` fields of each row of words i32 [rows, W], as u8 [rows, count].

    A word holds 32 // ``bits`` fields, the first one in its lowest bits.  Its highest bits are unused if ``bits`` does
    not divide 32."""
    per_word = 32 // bits
    first_bit = torch.arange(per_word, device=words.device, dtype=torch.int32) * bits
    shifted = words.unsqueeze(-1) >> first_bit
    mask = (1 << bits) - 1
    found = (shifted & mask).flatten(1)
    return found[:, :count].to(torch.uint8)


def piece_of(part: Numbers, dtype: torch.dtype) -> HeldRows:
    """Return the form with the fewest bits that holds these numbers exactly.  Only ``plain`` rounds, to ``dtype``."""
    if part.zero is not None and bool((part.zero == part.centre).all()):
        part = part._replace(zero=None)
    form = "int4" if part.table is None else "table"
    unit, order = arranged(part.group_of, INT4_LEAST) if part.bits <= 4 else (0, None)
    if not unit and part.table is None:
        first = part.group_of[0]
        if part.zero is None and bool((part.group_of == first).all()):
            scale = part.scale[:, first].contiguous()
            return HeldRows("rows", _signed(part), scale)
        form = "grouped"
        unit, order = arranged(part.group_of, BYTES_LEAST)
    if not unit:
        return HeldRows("plain", dequantized(part, dtype))
    return _arranged_piece(part, form, unit, order)


def _arranged_piece(part: Numbers, form: str, unit: int, order: Tensor | None) -> HeldRows:
    """Store a part in the form "int4", "table" or "grouped".

    ``unit`` neighbouring inputs share a scale, after the inputs are sorted by ``order`` (None means that they are in
    order).
    """
    codes, group_of = part.codes, part.group_of
    if order is not None:
        group_of = group_of[order]
        order = order.to(codes.device)
        codes = codes[:, order]
        order = order.int()
    groups = group_of[::unit].to(codes.device)
    scale = part.scale[:, groups]
    zero = None if part.zero is None else part.zero[:, groups]
    if form == "grouped":
        weight = _signed(part._replace(codes=codes)) if zero is None else codes.contiguous()
    else:
        if form == "int4" and zero is None:
            codes = codes + (CENTRE - part.centre)
        weight = pack_int4(codes.contiguous())
    return HeldRows(form, weight, scale, zero, unit, order, part.table)


def _signed(part: Numbers) -> Tensor:
    """Return the codes of a part as signed numbers; ``centre`` is subtracted from unsigned codes."""
    codes = part.codes
    if codes.dtype != torch.uint8:
        return codes.contiguous()
    minus_128 = (codes ^ 128).view(torch.int8)
    return minus_128 + (128 - part.centre)


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
    changes = group_of[1:] != group_of[:-1]
    ends = changes.nonzero().flatten() + 1
    common = math.gcd(len(group_of), *ends.tolist())
    return next((n for n in GROUPS if common % n == 0), 0)


def dequantized(part: Numbers, dtype: torch.dtype) -> Tensor:
    """Return the weight of a part as numbers [n, k], computed in float32 and rounded to ``dtype``."""
    device = part.codes.device
    out = torch.empty(part.codes.shape, dtype=dtype, device=device)
    group_of = part.group_of.to(device)
    for i in range(0, len(out), ROWS_AT_ONCE):
        rows = slice(i, i + ROWS_AT_ONCE)
        codes = part.codes[rows]
        if part.table is not None:
            steps = part.table[codes.long()]
        elif part.zero is not None:
            steps = codes.float() - part.zero[rows][:, group_of]
        else:
            steps = codes.float() - part.centre
        scale = part.scale[rows][:, group_of]
        out[rows] = (steps * scale).to(dtype)
    return out


def merged(pieces: Sequence[HeldRows]) -> HeldRows | None:
    """Join pieces along their rows.  Return None if they differ in more than the number of their scales."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if not all(_fits(first, piece) for piece in pieces[1:]):
        return None
    weight = torch.cat([piece.weight for piece in pieces])
    if first.form == "plain":
        return HeldRows("plain", weight)
    group = min(piece.group for piece in pieces)
    scales = [_repeated(piece.scale, piece.group, group) for piece in pieces]
    zero = None
    if any(piece.zero is not None for piece in pieces):
        zeros = [_repeated(_zero(piece), piece.group, group) for piece in pieces]
        zero = torch.cat(zeros)
    return HeldRows(first.form, weight, torch.cat(scales), zero, group, first.order, first.table)


def _fits(first: HeldRows, other: HeldRows) -> bool:
    """Return whether two pieces have the same form, dtype, order of inputs and table."""
    if other.form != first.form or other.weight.dtype != first.weight.dtype:
        return False
    return _same(first.order, other.order) and _same(first.table, other.table)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors are equal, or both None."""
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


def _zero(piece: HeldRows) -> Tensor:
    """Return the zero points of a piece.  If it stores none, they are 8 in the form int4, and 0 for signed bytes."""
    if piece.zero is not None:
        return piece.zero
    assert piece.scale is not None
    return torch.full_like(piece.scale, CENTRE if piece.form == "int4" else 0)


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
        self.weight = weight
        self.scale = scale
        self.zero = zero

    def finish(self) -> None:
        self.kernels = grouped_kernels_of(self.weight, self.scale, self.zero)

    def stored(self) -> StoredWeight:
        group = self.weight.shape[1] // self.scale.shape[1]
        return StoredWeight(self.weight, self.scale, self.zero, group)

    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        scale = self.scale[rows]
        codes = self.weight[rows].float()
        steps = codes.view(*scale.shape, -1)
        if self.zero is not None:
            zero = self.zero[rows]
            steps.sub_(zero[..., None])
        steps.mul_(scale[..., None])
        return steps.to(dtype).flatten(1)


class TableRows(Tiled):
    """``weight`` u8 [out, in / 2] in the order of ``int4.pack``, with ``scale`` float32 [out, in / group].

    ``table`` f32 [16] has the number of each code.
    """

    elsewhere = WITHOUT_KERNELS

    def __init__(self, info: ModuleInfo, weight: Tensor, scale: Tensor, table: Tensor) -> None:
        super().__init__(info, weight=weight, scale=scale, table=table)
        self.weight = weight
        self.scale = scale
        self.table = table

    def numbers(self, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        scale = self.scale[rows]
        codes = unpack_int4(self.weight[rows], scale.shape[1])
        numbers = self.table[codes.int()]
        numbers.mul_(scale[..., None])
        return numbers.to(dtype).flatten(1)


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
    """Return the scheme (stored weight with its products) of a piece that has all rows of the module ``info``."""
    if piece.scale is None:
        return PlainRows(info, piece.weight)
    scale = piece.scale.contiguous()
    zero = None if piece.zero is None else piece.zero.contiguous()
    if piece.form == "int4":
        return Int4Rows(info, piece.weight, scale, zero, piece.group)
    if piece.form == "rows":
        return ByteRows(info, piece.weight, scale)
    if piece.table is not None:
        return TableRows(info, piece.weight, scale, piece.table)
    return GroupedBytes(info, piece.weight, scale, zero)
