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
from minivllm.errors import ModelError

from .forms import Numbers
from .packed import CheckpointQuantizer, PartLayout, Share, Want
from .scaled_bytes import by_row

STATE = "weight.quant_state.bitsandbytes__"
STORED = {"U8": 1, "I8": 1, "BF16": 2, "F16": 2, "F32": 4}  # bytes per element of dtypes that may hold codes
BLOCK, NESTED = 64, 256


class FourBits(PartLayout):
    def __init__(self, share: Share, kind: str, nested: bool, has: Mapping[str, Any] | None, note: Any) -> None:
        super().__init__(share)
        self.kind, self.nested, self.note = kind, nested, note
        count = share.outputs * share.inputs
        if count % 2:
            raise ModelError(f"{share.outputs} outputs and {share.inputs} inputs of 4 bits do not fill whole bytes")
        stored = "U8" if has is None or has["weight"][1] not in STORED else has["weight"][1]
        sizes = {"weight.absmax": (-(-count // BLOCK),), "weight.nested_absmax": (-(-count // BLOCK // NESTED),)}
        if has is not None:  # the quantization state, which is read later, has the number of blocks
            sizes = {name: has[name][0] if name in has else shape for name, shape in sizes.items()}
        self.want = {
            "weight": Want((stored,), ((count // 2 // STORED[stored], 1),)),
            "weight.absmax": Want(("U8",) if nested else ("F32",), (sizes["weight.absmax"],)),
            "weight.quant_map": Want(("F32",), ((16,),)),
            STATE + kind: Want(("U8",), (has[STATE + kind][0],) if has is not None else ()),
        }
        if nested:
            self.want["weight.nested_absmax"] = Want(("F32",), (sizes["weight.nested_absmax"],))
            self.want["weight.nested_quant_map"] = Want(("F32",), ((256,),))

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers | Tensor:
        share = self.share
        block, sizes = self._sizes(given)
        table = given["weight.quant_map"].to(share.device)
        raw = given["weight"].contiguous().view(torch.uint8)
        if share.inputs % block:
            self.note(f"blocks of {block} numbers do not end with the rows: unpacked to {share.dtype}")
            codes = _codes(raw.flatten().to(share.device))
            scale = sizes.repeat_interleave(block)[: len(codes)]
            weight = (table[codes.long()] * scale).view(share.outputs, share.inputs)
            return weight[share.rows, share.columns].to(share.dtype).contiguous()
        codes = _codes(raw.view(share.outputs, -1)[share.rows].to(share.device))
        scale = sizes.view(share.outputs, -1)[share.rows]
        return Numbers(codes[:, share.columns], scale, None, share.group_of(block), 4, table=table)

    def _sizes(self, given: Mapping[str, Tensor]) -> tuple[int, Tensor]:
        """Return the number of codes in a block, and the largest number of each block, f32."""
        share = self.share
        try:
            state = json.loads(bytes(given[STATE + self.kind].tolist()))
            block, shape = int(state["blocksize"]), list(state["shape"])
            nested = (int(state["nested_blocksize"]), float(state["nested_offset"])) if self.nested else (1, 0.0)
        except (ValueError, KeyError, TypeError) as e:
            raise ModelError(f"the state of the quantization is broken ({e}); download it again") from None
        sizes = given["weight.absmax"].to(share.device)
        count = share.outputs * share.inputs
        if shape != [share.outputs, share.inputs] or block < 1 or len(sizes) != -(-count // block):
            raise ModelError(
                f"its state says shape {shape} in blocks of {block} with {len(sizes)} blocks; expected "
                f"{[share.outputs, share.inputs]}; config.json and the weights do not belong together"
            )
        if not self.nested:
            return block, sizes
        outer = given["weight.nested_absmax"].to(share.device)
        if nested[0] < 1 or len(outer) != -(-len(sizes) // nested[0]):
            raise ModelError(f"its state says nested blocks of {nested[0]}, but the checkpoint has {len(outer)}")
        values = given["weight.nested_quant_map"].to(share.device)[sizes.long()]
        return block, values * outer.repeat_interleave(nested[0])[: len(sizes)] + nested[1]


def _codes(raw: Tensor) -> Tensor:
    """Unpack bytes u8 [..., n] to codes [..., 2 n], the high half first."""
    return torch.stack((raw >> 4, raw & 15), dim=-1).flatten(-2)


class EightBits(PartLayout):
    def __init__(self, share: Share, has: Mapping[str, Any] | None) -> None:
        super().__init__(share)
        self.scale = "weight.SCB" if has is not None and "weight.SCB" in has else "SCB"
        self.want = {
            "weight": Want(("I8",), ((share.outputs, share.inputs),)),
            self.scale: Want(("F32",), ((share.outputs,),)),
        }
        self.order = next((n for n in ("weight_format", "weight.weight_format") if has is not None and n in has), "")
        if self.order:
            self.want[self.order] = Want(("U8",), ((), (1,)))

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers:
        share = self.share
        if self.order and int(given[self.order]) != 0:
            raise ModelError(f"{self.order}={int(given[self.order])}: expected 0, rows as they lie")
        codes = given["weight"][share.rows, share.columns].to(share.device, copy=True)
        return Numbers(codes, by_row(given[self.scale], share, 1) / 127, None, share.group_of(share.inputs))


class BitsAndBytes(CheckpointQuantizer):
    """The quantizer for modules with a quantization state, or with ``SCB``."""

    method, packed_by = "bitsandbytes", (STATE + "nf4", "SCB")

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        self.eight = self.settings.flag("load_in_8bit")
        self.settings.flag("load_in_4bit")
        self.kind = self.settings.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        self.nested = self.settings.flag("bnb_4bit_use_double_quant")

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        def note(what: str) -> None:
            self.tell(what, m.name)

        if source is None:
            return EightBits(share, None) if self.eight else FourBits(share, self.kind, self.nested, None, note)
        has = source.tensors
        if "SCB" in has or "weight.SCB" in has:
            return EightBits(share, has)
        kind = next((name.removeprefix(STATE) for name in has if name.startswith(STATE)), None)
        if kind is None:
            return None
        if "weight" not in has:
            raise ModelError(f"the checkpoint lacks {source.name}.weight; download it again or check config.json")
        return FourBits(share, kind, "weight.nested_absmax" in has, has, note)
