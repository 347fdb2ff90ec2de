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
    """Codes u8 or int8 [rows, k] of some rows of blocks, with scale and zero f32 [rows, groups]."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    bits: int
    centre: int = 0


class Blocks(NamedTuple):
    inputs: int  # of a block
    bytes: int
    decode: Callable[[Tensor], Decoded]  # u8 [rows, blocks, bytes]


def _halves(raw: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of each block, as float32 [rows, blocks]."""
    return raw[..., at : at + HALF].contiguous().view(torch.float16)[..., 0].float()


def _q8_0(raw: Tensor) -> Decoded:
    codes = raw[..., HALF:].contiguous().view(torch.int8)
    return Decoded(codes.flatten(1), _halves(raw, 0), None, 8)


def _q4_0(raw: Tensor) -> Decoded:
    codes = torch.cat((raw[..., HALF:] & 15, raw[..., HALF:] >> 4), dim=-1)
    return Decoded(codes.flatten(1), _halves(raw, 0), None, 4, 8)


def _q4_k(raw: Tensor) -> Decoded:
    d, least = _halves(raw, 0)[..., None], _halves(raw, HALF)[..., None]
    low, middle, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    steps = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=-1).float() * d
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 6 << 4)), dim=-1).float() * least
    bytes_of = raw[..., 16:].unflatten(-1, (4, 1, 32))
    codes = torch.cat((bytes_of & 15, bytes_of >> 4), dim=-2)  # [rows, blocks, 4 pairs, 2 groups, 32 codes]
    flat = steps == 0  # a group of equal numbers is stored as -1 step of that size from 1
    codes = torch.where(flat.unflatten(-1, (4, 2))[..., None], 0, codes)
    zero = torch.where(flat, 1.0, minima / torch.where(flat, 1.0, steps))
    steps = torch.where(flat, minima, steps)
    return Decoded(codes.flatten(1).to(torch.uint8), steps.flatten(1), zero.flatten(1), 4)


def _q6_k(raw: Tensor) -> Decoded:
    low, high = raw[..., :128].unflatten(-1, (2, 2, 32)), raw[..., 128:192].unflatten(-1, (2, 1, 32))
    lows = torch.cat((low & 15, low >> 4), dim=-2)  # [rows, blocks, 2 halves, 4 groups, 32 codes]
    highs = torch.cat([high >> at & 3 for at in (0, 2, 4, 6)], dim=-2)
    codes = (lows | highs << 4).view(torch.int8) - 32
    scales = raw[..., 192:208].contiguous().view(torch.int8).float() * _halves(raw, 208)[..., None]
    return Decoded(codes.flatten(1), scales.flatten(1), None, 8)


KEPT: Mapping[str, Blocks] = {
    "q8_0": Blocks(32, 34, _q8_0),
    "q4_0": Blocks(32, 18, _q4_0),
    "q4_k": Blocks(256, 144, _q4_k),
    "q6_k": Blocks(256, 210, _q6_k),
}


class GgufLayout(PartLayout):
    def __init__(self, share: Share, kind: str, tell: Callable[[str], None]) -> None:
        super().__init__(share)
        self.kind, self.tell = kind, tell
        inputs, size = _block(kind)
        if share.inputs % inputs:
            raise ModelError(f"{share.inputs} inputs of {kind.upper()}: expected a multiple of {inputs}")
        self.want = {kind: Want(("U8",), ((share.outputs, share.inputs // inputs * size),))}

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers | Tensor:
        share, raw = self.share, given[self.kind]
        if self.kind not in KEPT:
            import gguf

            self.tell(f"{self.kind.upper()} is unpacked to {share.dtype}".replace("torch.", ""))
            kind = gguf.GGMLQuantizationType[self.kind.upper()]
            try:
                whole = gguf.dequantize(raw[share.rows].cpu().numpy(), kind)
            except NotImplementedError:
                raise ModelError(f"type {kind.name}: the package gguf cannot unpack it; use another file") from None
            return torch.from_numpy(whole)[:, share.columns].to(share.device, share.dtype).contiguous()
        blocks = KEPT[self.kind]
        rows = raw[share.rows].to(share.device).unflatten(1, (-1, blocks.bytes))
        found = blocks.decode(rows)
        group_of = share.group_of(found.codes.shape[1] // found.scale.shape[1])
        return Numbers(found.codes[:, share.columns], found.scale, found.zero, group_of, found.bits, found.centre)


def _block(kind: str) -> tuple[int, int]:
    """Return the inputs and the bytes of a block."""
    if kind in KEPT:
        return KEPT[kind][:2]
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]


class Gguf(CheckpointQuantizer):
    """The quantizer for modules with a parameter that has the name of a GGUF type."""

    method, packed_by = "gguf", tuple(KEPT)

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        kinds = ["q8_0"] if source is None else [name for name in source.tensors if name not in ("weight", "bias")]
        if not kinds:
            return None
        return GgufLayout(share, kinds[0], lambda what: self.tell(what, m.name))
