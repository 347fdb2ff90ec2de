"""Checkpoints that bitsandbytes has quantized: NF4 and FP4 (arXiv:2305.14314), and int8 (arXiv:2208.07339).

    weight                 u8 [out * in / 2, 1]      row after row, two codes a byte, the first in the high half
    weight.absmax          f32 [blocks]              of every 64 codes, as they lie; nested: u8, codes of their own
    weight.quant_map       f32 [16]                  the number of each code, to be multiplied by absmax
    weight.nested_absmax   f32 [blocks / 256]        absmax = nested_quant_map[code] * nested_absmax + nested_offset
    weight.nested_quant_map  f32 [256]
    weight.quant_state.bitsandbytes__nf4             JSON as u8: blocksize, shape, nested_offset

    weight int8 [out, in], SCB f32 [out], weight_format 0          w = weight * SCB / 127

Activations stay as they are: int8's columns of outliers are a matter of activations that are rounded too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource
from minivllm.errors import ModelError, brief, shown

from .forms import Numbers
from .packed import CheckpointQuantizer, PartLayout, Share, Want
from .scaled_bytes import by_row

STATE = "weight.quant_state.bitsandbytes__"
STORED = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}  # dtype of a tensor of packed codes -> its bytes per element
BLOCK, NESTED = 64, 256


class FourBits(PartLayout):
    """The layout of a weight with 4 bits, ``kind`` "nf4" or "fp4".

    ``nested`` means that the scales are quantized too.  ``has`` has the shape and dtype of each tensor of the part, or
    is None if no checkpoint was read.
    """

    def __init__(self, share: Share, kind: str, nested: bool, has: Mapping[str, Any] | None, note: Any) -> None:
        super().__init__(share)
        self.kind = kind
        self.nested = nested
        self.note = note
        count = share.outputs * share.inputs
        if count % 2:
            raise ModelError(f"{share.outputs} outputs and {share.inputs} inputs of 4 bits do not fill whole bytes")
        blocks = -(-count // BLOCK)
        nested_blocks = -(-blocks // NESTED)
        state = STATE + kind
        # (shape, dtype) of each tensor; the tensors of the checkpoint decide, because the number of blocks is in a
        # state that is read later
        found: dict[str, Any] = {"weight": ((), "U8")}
        found["weight.absmax"] = ((blocks,), "F32")
        found["weight.nested_absmax"] = ((nested_blocks,), "F32")
        found |= has or {}
        stored = found["weight"][1]
        if stored not in STORED:
            stored = "U8"
        words = count // 2 // STORED[stored]
        self.want = {"weight": Want(stored, (words, 1))}
        self.want["weight.absmax"] = Want("U8" if nested else "F32", found["weight.absmax"][0])
        self.want["weight.quant_map"] = Want("F32", (16,))
        self.want[state] = Want("U8", found[state][0]) if state in found else Want("U8")
        if nested:
            self.want["weight.nested_absmax"] = Want("F32", found["weight.nested_absmax"][0])
            self.want["weight.nested_quant_map"] = Want("F32", (256,))

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers | Tensor:
        share = self.share
        block, sizes = self._sizes(given)
        table = given["weight.quant_map"].to(share.device)
        raw = given["weight"].contiguous().view(torch.uint8)
        if share.inputs % block:
            self.note(f"blocks of {block} numbers do not end with the rows: unpacked to {share.dtype}")
            codes = _codes(raw.flatten().to(share.device))
            scale = sizes.repeat_interleave(block)
            numbers = table[codes.long()] * scale[: len(codes)]
            if not bool(torch.isfinite(numbers).all()):
                raise ModelError("scales that are inf or NaN, expected numbers: the file is damaged")
            weight = numbers.view(share.outputs, share.inputs)
            mine = weight[share.rows, share.columns]
            return mine.to(share.dtype).contiguous()
        rows = raw.view(share.outputs, -1)[share.rows]
        codes = _codes(rows.to(share.device))
        scale = sizes.view(share.outputs, -1)[share.rows]
        group_of = share.group_of(block)
        return Numbers(codes[:, share.columns], scale, None, group_of, bits=4, table=table)

    def _sizes(self, given: Mapping[str, Tensor]) -> tuple[int, Tensor]:
        """Return the number of codes in a block, and the scale f32 of each block, which is its largest magnitude.

        Raise ModelError if the quantization state does not fit the tensors.
        """
        share = self.share
        wanted = [share.outputs, share.inputs]
        nested_block = 1
        offset = 0.0
        try:
            state = json.loads(bytes(given[STATE + self.kind].tolist()))
            block = _whole(state["blocksize"])
            shape = list(state["shape"])
            if self.nested:
                nested_block = _whole(state["nested_blocksize"])
                offset = float(state["nested_offset"])
        except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as e:
            why = brief(str(e))
            raise ModelError(f"the state of the quantization is broken ({why}); download it again") from None
        sizes = given["weight.absmax"].to(share.device)
        count = share.outputs * share.inputs
        if shape != wanted or not _fill(count, block, len(sizes)):
            raise ModelError(
                f"its state says shape {shown(shape)} in blocks of {block} with {len(sizes)} blocks; expected {wanted}"
                "; config.json and the weights do not belong together"
            )
        if not self.nested:
            return min(block, count), sizes
        outer = given["weight.nested_absmax"].to(share.device)
        if not _fill(len(sizes), nested_block, len(outer)):
            raise ModelError(f"its state says nested blocks of {nested_block}, but the checkpoint has {len(outer)}")
        table = given["weight.nested_quant_map"].to(share.device)
        factors = outer.repeat_interleave(min(nested_block, len(sizes)))[: len(sizes)]
        return min(block, count), table[sizes.long()] * factors + offset


def _whole(value: Any) -> int:
    """Return a number of a quantization state as an int.  ValueError for anything but a whole number."""
    if type(value) is not int and not (isinstance(value, float) and value.is_integer()):
        raise ValueError(f"{shown(value)} is no whole number")
    return int(value)


def _fill(count: int, block: int, blocks: int) -> bool:
    """Return whether ``count`` numbers in blocks of ``block`` numbers take ``blocks`` blocks."""
    return block >= 1 and blocks == -(-count // block)


def _codes(raw: Tensor) -> Tensor:
    """Unpack bytes u8 [..., n] to codes [..., 2 n], the high half first."""
    halves = torch.stack((raw >> 4, raw & 15), dim=-1)
    return halves.flatten(-2)


class EightBits(PartLayout):
    """The layout of an int8 weight with a scale for each output.

    ``has`` has the tensors of the part by name, or is None if no checkpoint was read.
    """

    def __init__(self, share: Share, has: Mapping[str, Any] | None) -> None:
        super().__init__(share)
        has = has or {}
        self.scale = "weight.SCB" if "weight.SCB" in has else "SCB"
        self.want = {"weight": Want("I8", (share.outputs, share.inputs))}
        self.want[self.scale] = Want("F32", (share.outputs,))
        self.order = ""
        for name in ("weight_format", "weight.weight_format"):
            if name in has and not self.order:
                self.order = name
                self.want[name] = Want("U8", (), (1,))

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers:
        share = self.share
        order = int(given[self.order]) if self.order else 0
        if order != 0:
            raise ModelError(f"{self.order}={order}: expected 0 (rows in their original order)")
        codes = given["weight"][share.rows, share.columns].to(share.device, copy=True)
        scale = by_row(given[self.scale], share, 1) / 127
        group_of = share.group_of(share.inputs)
        return Numbers(codes, scale, None, group_of)


class BitsAndBytes(CheckpointQuantizer):
    """The quantizer for modules with bitsandbytes' quantization state (4 bits) or its scales ``SCB`` (8 bits)."""

    method = "bitsandbytes"
    packed_by = (STATE + "nf4", "SCB")

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        settings = self.settings
        self.eight = settings.flag("load_in_8bit")
        settings.flag("load_in_4bit")
        self.kind = settings.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        self.nested = settings.flag("bnb_4bit_use_double_quant")

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        def note(what: str) -> None:
            self.note(what, m.name)

        if source is None:
            if self.eight:
                return EightBits(share, None)
            return FourBits(share, self.kind, self.nested, None, note)
        has = source.tensors
        if "SCB" in has or "weight.SCB" in has:
            return EightBits(share, has)
        kinds = [name.removeprefix(STATE) for name in has if name.startswith(STATE)]
        if not kinds:
            return None
        if "weight" not in has:
            raise ModelError(f"the checkpoint lacks {source.name}.weight; download it again or check config.json")
        nested = "weight.nested_absmax" in has
        return FourBits(share, kinds[0], nested, has, note)
