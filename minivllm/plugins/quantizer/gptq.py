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
    """The settings of GPTQ for a set of modules: bits, inputs per scale, order of the inputs, and symmetry."""

    bits: int
    group_size: int  # -1: all inputs
    act_order: bool
    symmetric: bool | None = None  # None means that the configuration does not have the field

    @staticmethod
    def of(settings: Settings, default: GptqKind | None = None) -> GptqKind:
        """Return the quantization that some settings describe, with the values of ``default`` for missing keys."""
        bits, size, order, symmetric = default or (None, -1, False, None)
        bits = settings.one_of("bits", BITS, bits)
        size = settings.group("group_size", size)
        order = settings.flag("desc_act", order)
        if "sym" in settings.given:
            symmetric = settings.flag("sym")
        return GptqKind(bits, size, order, symmetric)


class GptqLayout(PartLayout):
    def __init__(self, share: Share, kind: GptqKind, old: bool, indexed: bool, note: Any) -> None:
        super().__init__(share)
        self.kind = kind
        self.old = old
        self.note = note
        bits = kind.bits
        self.why = f" with bits={bits}, group_size={kind.group_size}"
        for what, count in (("inputs", share.inputs), ("outputs", share.outputs)):
            if count * bits % 32:
                raise ModelError(
                    f"{count} {what} of {bits} bits do not fill whole words: expected a multiple of 32 bits"
                )
        self.size = share.inputs if kind.group_size == -1 else kind.group_size
        self.groups = -(-share.inputs // self.size)
        input_words = share.inputs * bits // 32
        output_words = share.outputs * bits // 32
        self.want = {"qweight": Want("I32", (input_words, share.outputs))}
        self.want["qzeros"] = Want("I32", (self.groups, output_words))
        self.want["scales"] = Want(FLOATS, (self.groups, share.outputs))
        if indexed:
            self.want["g_idx"] = Want(("I32", "I64"), (share.inputs,))

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers:
        share = self.share
        bits = self.kind.bits
        words = given["qweight"][:, share.rows].to(share.device)
        codes = share.taken(words.t(), bits)
        zero_words = given["qzeros"].to(share.device)
        zeros = forms.fields(zero_words, bits, share.outputs)
        zero = zeros[:, share.rows].t()
        scales = given["scales"][:, share.rows].to(share.device)
        scale = scales.t().float()
        centre = 1 << (bits - 1)
        largest = (1 << bits) - 1
        in_the_middle = bool((zero == centre).all())
        if self.old and self.kind.symmetric and in_the_middle:
            self.note(MISNAMED)
        elif self.old:
            if bool((zero == largest).any()):
                self.note(OVERFLOWED)
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
        """Raise ModelError if ``index``, the group of each input, has a group without a scale, or a group of an
        unexpected size.
        """
        outside = (index < 0) | (index >= self.groups)
        if bool(outside.any()):
            raise ModelError(f"g_idx has groups beyond 0 to {self.groups - 1}: expected as many as there are scales")
        counts = torch.bincount(index, minlength=self.groups)
        wanted = torch.full_like(counts, self.size)
        wanted[-1] = len(index) - self.size * (self.groups - 1)
        if not torch.equal(counts, wanted):
            group = int((counts != wanted).nonzero()[0])
            raise ModelError(
                f"g_idx gives group {group} {int(counts[group])} inputs: expected {int(wanted[group])}{self.why}"
            )


class Gptq(CheckpointQuantizer):
    """The quantizer for modules with ``qweight``.  ``dynamic`` changes the settings of the modules that it names."""

    method = "gptq"
    packed_by = ("qweight",)
    beside = ("qzeros", "scales", "g_idx")

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        given = self.settings.given  # "format" is the key of tools that write no checkpoint_format
        written = given.get("checkpoint_format") or given.get("format") or "gptq"
        if given.get("is_marlin_format"):
            written = "marlin"
        if written not in FORMATS:
            instead = f"expected {' or '.join(FORMATS)}, as GPTQModel writes them"
            if "marlin" in str(written):
                instead = MARLIN
            raise ModelError(f"the checkpoint is GPTQ of checkpoint_format={shown(written)}: {instead}")
        self.old = written == "gptq"
        self.kind = GptqKind.of(self.settings)
        self.head = self.settings.flag("lm_head")
        dynamic = self.settings.part("dynamic")
        self.dynamic = [_override(key, dynamic, self.kind) for key in dynamic.given]

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        def note(what: str) -> None:
            self.note(what, m.name)

        if source is None:
            if self.dynamic:
                raise ModelError(
                    "dynamic names modules by patterns, and this architecture does not give the names of its modules"
                )
            return GptqLayout(share, self.kind, self.old, True, note)
        if not holds_words(source, self.beside):
            return None
        fitting = [kind for pattern, kind in self.dynamic if pattern.match(source.name)]
        kind = fitting[0] if fitting else self.kind
        if kind is None:
            raise ModelError(
                f"the checkpoint has {source.name}.qweight, but a pattern of dynamic excludes it from quantization"
            )
        indexed = "g_idx" in source.tensors
        if kind.act_order and not indexed and kind.group_size != -1:
            raise ModelError(f"the checkpoint lacks {source.name}.g_idx, which desc_act=true needs")
        return GptqLayout(share, kind, self.old, indexed, note)


def _override(key: str, dynamic: Settings, default: GptqKind) -> tuple[re.Pattern[str], GptqKind | None]:
    """Return the pattern of names of a key of GPTQModel, and the quantization of these modules, None for modules left
    out.

    "-:" before a pattern leaves its modules out; "+:" or no sign includes them.
    """
    text = key.removeprefix("-:").removeprefix("+:")
    try:
        pattern = re.compile(text)
    except re.error as e:
        raise dynamic.refuse(key, f"a regular expression as its name ({e})") from None
    if key.startswith("-:"):
        return pattern, None
    return pattern, GptqKind.of(dynamic.part(key), default)
