"""Checkpoints of GPTQ (arXiv:2210.17323) in the format of AutoGPTQ and GPTQModel, with 2, 3, 4 or 8 bits per weight.

    qweight  i32 [in * bits / 32, out]      fields of the inputs of one output, low first
    qzeros   i32 [groups, out * bits / 32]  fields of outputs, z - 1 in "gptq" (v1) and z in "gptq_v2"
    scales   f16 [groups, out]
    g_idx    i32 [in]                       the group of each input, in any order with act-order (``desc_act``)
    weight   w[n, k] = (q - z) * scales[g_idx[k], n]

v1 cannot store z = 0.  Its field is then the largest value, which also takes 1 from the neighbouring field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource
from minivllm.errors import ModelError, shown

from . import forms
from .forms import Numbers
from .packed import FLOATS, MARLIN, CheckpointQuantizer, PartLayout, Settings, Share, Want, holds_words

BITS = (2, 3, 4, 8)
FORMATS = ("gptq", "gptq_v2")
OVERFLOWED = (
    "v1 zero points are at their largest, as of a 0 that v1 cannot store: output may be poor; use the checkpoint as "
    "checkpoint_format=gptq_v2"
)
MISNAMED = (
    "sym=true, and all zero points are in the middle as v2 stores them, though config.json says v1: read as gptq_v2"
)


class GptqKind(NamedTuple):
    """The quantization of a set of modules."""

    bits: int
    group_size: int  # -1: all inputs
    act_order: bool
    symmetric: bool | None = None  # None means that the configuration does not have the field

    @staticmethod
    def of(settings: Settings, default: GptqKind | None = None) -> GptqKind:
        bits, size, order, symmetric = default or (None, -1, False, None)
        return GptqKind(
            settings.one_of("bits", BITS, bits),
            settings.group("group_size", size),
            settings.flag("desc_act", order),
            settings.flag("sym") if "sym" in settings.given else symmetric,
        )


class GptqLayout(PartLayout):
    def __init__(self, share: Share, kind: GptqKind, old: bool, indexed: bool, tell: Any) -> None:
        super().__init__(share)
        self.kind, self.old, self.tell = kind, old, tell
        bits, size = kind.bits, share.inputs if kind.group_size == -1 else kind.group_size
        self.size, groups = size, -(-share.inputs // size)
        self.why = f" with bits={bits}, group_size={kind.group_size}"
        for what, n in (("inputs", share.inputs), ("outputs", share.outputs)):
            if n * bits % 32:
                raise ModelError(f"{n} {what} of {bits} bits do not fill whole words: expected a multiple of 32 bits")
        self.want = {
            "qweight": Want(("I32",), ((share.inputs * bits // 32, share.outputs),)),
            "qzeros": Want(("I32",), ((groups, share.outputs * bits // 32),)),
            "scales": Want(FLOATS, ((groups, share.outputs),)),
        }
        if indexed:
            self.want["g_idx"] = Want(("I32", "I64"), ((share.inputs,),))
        self.groups = groups

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers:
        share, bits = self.share, self.kind.bits
        codes = share.taken(given["qweight"][:, share.rows].to(share.device).t(), bits)
        zero = forms.fields(given["qzeros"].to(share.device), bits, share.outputs)[:, share.rows].t()
        scale = given["scales"][:, share.rows].to(share.device).t().float()
        centre, largest = 1 << (bits - 1), (1 << bits) - 1
        if self.old and self.kind.symmetric and bool((zero == centre).all()):
            self.tell(MISNAMED)
        elif self.old:
            if bool((zero == largest).any()):
                self.tell(OVERFLOWED)
            zero = (zero + 1) & largest
        group_of = share.group_of(self.size)
        if "g_idx" in given:
            index = given["g_idx"].long().cpu()
            # Older tools wrote zeros if the inputs are in order.
            if self.kind.act_order or bool(index.any()):
                self._check_groups(index)
                group_of = index[share.columns]
        return Numbers(codes, scale, zero.float(), group_of, bits, centre)

    def _check_groups(self, index: Tensor) -> None:
        """Raise ModelError for groups without a scale, and for groups with an unexpected number of inputs."""
        if bool(((index < 0) | (index >= self.groups)).any()):
            raise ModelError(f"g_idx has groups beyond 0 to {self.groups - 1}: expected as many as there are scales")
        counts = torch.bincount(index, minlength=self.groups)
        wanted = torch.full_like(counts, self.size)
        wanted[-1] = len(index) - self.size * (self.groups - 1)
        if not torch.equal(counts, wanted):
            at = int((counts != wanted).nonzero()[0])
            raise ModelError(f"g_idx gives group {at} {int(counts[at])} inputs: expected {int(wanted[at])}{self.why}")


class Gptq(CheckpointQuantizer):
    """The quantizer for modules with ``qweight``.  ``dynamic`` changes the settings of the modules that it names."""

    method, packed_by, beside = "gptq", ("qweight",), ("qzeros", "scales", "g_idx")

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        given = self.settings.given  # "format" is the key of tools that write no checkpoint_format
        written = given.get("checkpoint_format") or given.get("format") or "gptq"
        if given.get("is_marlin_format"):
            written = "marlin"
        if written not in FORMATS:
            instead = (
                MARLIN if "marlin" in str(written) else f"expected {' or '.join(FORMATS)}, as GPTQModel writes them"
            )
            raise ModelError(f"the checkpoint is GPTQ of checkpoint_format={shown(written)}: {instead}")
        self.old = written == "gptq"
        self.kind = GptqKind.of(self.settings)
        self.head = self.settings.flag("lm_head")
        self.dynamic = [_override(key, self.settings.part("dynamic"), self.kind) for key in _keys(self.settings)]

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        kind: GptqKind | None = self.kind
        if source is not None:
            kind = next((kind for pattern, kind in self.dynamic if pattern.match(source.name)), self.kind)
            if not holds_words(source, self.beside):
                return None
            if kind is None:
                raise ModelError(
                    f"the checkpoint has {source.name}.qweight, but a pattern of dynamic excludes it from quantization"
                )
        elif self.dynamic:
            raise ModelError(
                "dynamic names modules by patterns, and this architecture does not give the names of its modules"
            )
        assert kind is not None
        indexed = source is None or "g_idx" in source.tensors
        if kind.act_order and not indexed and kind.group_size != -1:
            raise ModelError(f"the checkpoint lacks {source.name}.g_idx, which desc_act=true needs")  # type: ignore[union-attr]
        return GptqLayout(share, kind, self.old, indexed, lambda what: self.tell(what, m.name))


def _keys(settings: Settings) -> list[str]:
    return list(settings.part("dynamic").given)


def _override(key: str, dynamic: Settings, default: GptqKind) -> tuple[re.Pattern[str], GptqKind | None]:
    """Return the pattern of names of a key of GPTQModel, and the quantization of these modules, None for modules left
    out.

    "-:" before a pattern leaves its modules out; "+:" or no sign includes them.
    """
    try:
        pattern = re.compile(key.removeprefix("-:").removeprefix("+:"))
    except re.error as e:
        raise dynamic.refuse(key, f"a regular expression as its name ({e})") from None
    return pattern, None if key.startswith("-:") else GptqKind.of(dynamic.part(key), default)
