"""Weights of GGUF files, kept in the bytes of the file (ggml's ggml-common.h) as a row of blocks for each output.

    Q8_0   32 inputs   d f16, 32 x int8                          w = q d
    Q4_0   32 inputs   d f16, 16 bytes                           w = (q - 8) d; byte j has inputs j and 16 + j
    Q4_K   256 inputs  d f16, dmin f16, 12 bytes, 128 bytes      w = q d s_b - dmin m_b, b of 8 times 32 inputs
    Q6_K   256 inputs  128 bytes, 64 bytes, 16 x int8, d f16     w = (q - 32) d s_b, b of 16 times 16 inputs

In Q4_K the 12 bytes hold 8 scales and 8 minima of 6 bits, and 32 bytes hold 64 inputs, the first 32 in low halves.  In
Q6_K 128 inputs take 64 bytes of low halves and 32 bytes of pairs of high bits.  Other types are converted to the dtype
of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource
from minivllm.errors import ModelError

from .forms import Numbers
from .packed import CheckpointQuantizer, PartLayout, Share, Want

HALF = 2  # bytes of a float16


class Decoded(NamedTuple):
    """Decoded rows of blocks: codes u8 or int8 [rows, k], scale and zero f32 [rows, groups]."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    centre: int = 0


class Blocks(NamedTuple):
    inputs: int  # of a block
    bytes: int
    decode: Callable[[Tensor], Decoded]  # function that decodes u8 [rows, blocks, bytes]


def _halves(raw: Tensor, at: int) -> Tensor:
    """Return the float16 that begins at the byte ``at`` of each block, as float32 [rows, blocks]."""
    stop = at + HALF
    both_bytes = raw[..., at:stop].contiguous()
    numbers = both_bytes.view(torch.float16)
    return numbers[..., 0].float()


def _q8_0(raw: Tensor) -> Decoded:
    codes = raw[..., HALF:].contiguous().view(torch.int8)
    scale = _halves(raw, 0)
    return Decoded(codes.flatten(1), scale, None, 8)


def _q4_0(raw: Tensor) -> Decoded:
    packed = raw[..., HALF:]
    codes = torch.cat((packed & 15, packed >> 4), dim=-1)
    scale = _halves(raw, 0)
    return Decoded(codes.flatten(1), scale, None, 4, centre=8)


def _q4_k(raw: Tensor) -> Decoded:
    low, middle, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    d = _halves(raw, 0)
    dmin = _halves(raw, HALF)
    steps = _six_bits(low, high & 15) * d[..., None]
    least = _six_bits(middle, high >> 4) * dmin[..., None]
    packed = raw[..., 16:].unflatten(-1, (4, 1, 32))
    codes = torch.cat((packed & 15, packed >> 4), dim=-2)  # [rows, blocks, 4 pairs, 2 groups, 32 codes]
    flat = steps == 0  # equal numbers -m have steps of 0 and are stored as (code - zero) * scale = (0 - 1) * m
    flat_pairs = flat.unflatten(-1, (4, 2))
    codes = torch.where(flat_pairs[..., None], 0, codes)
    divisor = torch.where(flat, 1.0, steps)
    zero = torch.where(flat, 1.0, least / divisor)
    scale = torch.where(flat, least, steps)
    whole = codes.to(torch.uint8).flatten(1)
    return Decoded(whole, scale.flatten(1), zero.flatten(1), 4)


def _six_bits(first: Tensor, last: Tensor) -> Tensor:
    """Return 8 numbers of 6 bits, f32 [..., 8].

    ``first`` u8 [..., 4] has the first four numbers in its low 6 bits, and the high 2 bits of the other four numbers in
    its high bits.  ``last`` has the low 4 bits of the other four numbers.
    """
    high = first >> 6
    others = last | high << 4
    numbers = torch.cat((first & 63, others), dim=-1)
    return numbers.float()


def _q6_k(raw: Tensor) -> Decoded:
    low = raw[..., :128].unflatten(-1, (2, 2, 32))
    lows = torch.cat((low & 15, low >> 4), dim=-2)  # [rows, blocks, 2 halves, 4 groups, 32 codes]
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32))
    pairs = [high >> at & 3 for at in (0, 2, 4, 6)]
    highs = torch.cat(pairs, dim=-2)
    codes = lows | highs << 4
    signed = codes.view(torch.int8) - 32
    factors = raw[..., 192:208].contiguous().view(torch.int8)
    d = _halves(raw, 208)
    scales = factors.float() * d[..., None]
    return Decoded(signed.flatten(1), scales.flatten(1), None, 8)


KEPT: Mapping[str, Blocks] = {
    "q8_0": Blocks(32, 34, _q8_0),
    "q4_0": Blocks(32, 18, _q4_0),
    "q4_k": Blocks(256, 144, _q4_k),
    "q6_k": Blocks(256, 210, _q6_k),
}


class GgufLayout(PartLayout):
    """The layout of a weight of a GGUF type; ``kind`` is the name of the type in lower case, such as "q4_k"."""

    def __init__(self, share: Share, kind: str, note: Callable[[str], None]) -> None:
        super().__init__(share)
        self.kind = kind
        self.note = note
        inputs, size = _block(kind)
        if share.inputs % inputs:
            raise ModelError(f"{share.inputs} inputs of {kind.upper()}: expected a multiple of {inputs}")
        row_bytes = share.inputs // inputs * size
        self.want = {kind: Want("U8", (share.outputs, row_bytes))}

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers | Tensor:
        share = self.share
        rows = given[self.kind][share.rows]
        if self.kind not in KEPT:
            return self._unpacked(rows)
        kept = KEPT[self.kind]
        blocks = rows.to(share.device).unflatten(1, (-1, kept.bytes))
        found = kept.decode(blocks)
        group = found.codes.shape[1] // found.scale.shape[1]
        codes = found.codes[:, share.columns]
        return Numbers(codes, found.scale, found.zero, share.group_of(group), found.bits, found.centre)

    def _unpacked(self, rows: Tensor) -> Tensor:
        """Convert rows of blocks to numbers in the dtype of the run, and return this process's columns."""
        import gguf
        import numpy as np

        share = self.share
        name = self.kind.upper()
        dtype = str(share.dtype).removeprefix("torch.")
        self.note(f"{name} is unpacked to {dtype}")
        kind = gguf.GGMLQuantizationType[name]
        try:
            with np.errstate(all="ignore"):  # the result is checked below
                whole = gguf.dequantize(rows.cpu().numpy(), kind)
        except NotImplementedError:
            raise ModelError(f"type {name}: the package gguf cannot unpack it; use another file") from None
        if not np.isfinite(whole).all():
            raise ModelError(f"scales of {name} that are inf or NaN, expected numbers: the file is damaged")
        mine = torch.from_numpy(whole)[:, share.columns]
        return mine.to(share.device, share.dtype).contiguous()


def _block(kind: str) -> tuple[int, int]:
    """Return the number of inputs and the number of bytes of a block."""
    if kind in KEPT:
        kept = KEPT[kind]
        return kept.inputs, kept.bytes
    import gguf

    number = gguf.GGMLQuantizationType[kind.upper()]
    return gguf.GGML_QUANT_SIZES[number]


class Gguf(CheckpointQuantizer):
    """The quantizer for modules with a parameter that has the name of a GGUF type."""

    method = "gguf"
    packed_by = tuple(KEPT)

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        def note(what: str) -> None:
            self.note(what, m.name)

        kinds = ["q8_0"]
        if source is not None:
            kinds = [name for name in source.tensors if name not in ("weight", "bias")]
        return GgufLayout(share, kinds[0], note) if kinds else None
