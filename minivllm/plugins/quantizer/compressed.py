"""Checkpoints of compressed-tensors (llm-compressor), whose groups of modules may be quantized in several ways.

    pack-quantized                    weight_packed      i32 [out, in * bits / 32]    fields of inputs, low first
                                      weight_scale       f16 [out, groups]
                                      weight_zero_point  i32 [out * bits / 32, groups]  fields of outputs
                                      weight_g_idx       i32 [in], of groups by activations
    int-, float-, naive-quantized     weight             int8, float8 [out, in]
                                      weight_scale       one, [out, 1], [out, groups], [out / rows, in / columns]

A field is q + 2 ** (bits - 1).  Fields of 3, 5, 6 and 7 bits continue across words.  Older versions of the library,
such as 0.9, store 32 // bits fields in each word and leave the other bits unused.  The number of words shows which form
it is.

Scales of activations are not used: products take activations as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource
from minivllm.errors import ModelError, shown

from . import forms
from .forms import Numbers
from .packed import FLOATS, CheckpointQuantizer, PartLayout, Settings, Share, Want
from .scaled_bytes import BytesLayout, by_row, group_of, scale_shapes, want_symmetric

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
STRATEGIES = ("tensor", "channel", "group", "block", None)
# keys of the settings for activations, keys and values
UNUSED = (
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "weight_zero_point",
)  # fmt: skip


class ConfigGroup(NamedTuple):
    """The quantization of the modules that ``targets`` names."""

    targets: tuple[str, ...]
    bits: int
    floating: bool
    symmetric: bool
    strategy: str
    rows: int  # outputs that share a scale; 0 means all
    columns: int  # inputs; 0: all
    packed: bool | None  # None means that the names of the tensors decide

    @property
    def why(self) -> str:
        return f" with num_bits={self.bits}, strategy={self.strategy}, group_size={self.columns or None}"

    def blocks(self, share: Share) -> tuple[int, int]:
        return self.rows or share.outputs, self.columns or share.inputs


def config_group(settings: Settings, outer: str) -> ConfigGroup | None:
    """Return the settings of a group of modules, None if its weights are not quantized."""
    written = settings.one_of("format", (None, *FORMATS), None) or outer
    if settings.given.get("weights") is None or written == "dense":
        return None
    weights = settings.part("weights")
    floating = weights.one_of("type", ("int", "float"), "int") == "float"
    bits = weights.one_of("num_bits", (8,) if floating else (2, 3, 4, 5, 6, 7, 8), 8)
    size = weights.given.get("group_size")
    strategy = weights.one_of("strategy", STRATEGIES, None)
    if strategy is None:
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    rows, columns = (0 if strategy == "tensor" else 1), 0
    if strategy == "group":
        columns = max(0, weights.group("group_size"))
    if strategy == "block":
        rows, columns = weights.pair("block_structure")
    packed = None if written in ("naive-quantized", "mixed-precision") else written == "pack-quantized"
    symmetric = weights.flag("symmetric", True)
    return ConfigGroup(settings.names("targets"), bits, floating, symmetric, strategy, rows, columns, packed)


def word_counts(fields: int, bits: int) -> tuple[int, ...]:
    """Return the numbers of words for ``fields`` fields, first if they continue across words, then if they do not."""
    return tuple(dict.fromkeys((-(-fields * bits // 32), -(-fields // (32 // bits)))))


class FieldsLayout(PartLayout):
    """The layout of ``weight_packed`` and its scales and zero points."""

    def __init__(self, share: Share, group: ConfigGroup, has: Mapping[str, Any] | None) -> None:
        super().__init__(share)
        self.group, self.why, bits = group, group.why, group.bits
        self.rows, self.columns = group.blocks(share)
        shapes = scale_shapes(share, self.rows, self.columns)
        self.want = {
            "weight_packed": Want(("I32",), tuple((share.outputs, n) for n in word_counts(share.inputs, bits))),
            "weight_scale": Want(FLOATS, shapes),
        }
        if has is None or "weight_shape" in has:
            self.want["weight_shape"] = Want(("I64", "I32"), ((2,),))
        self.fields = group.strategy in ("group", "channel")  # zero points are
        if not group.symmetric:
            groups = -(-share.inputs // self.columns)
            words = tuple((n, groups) for n in word_counts(share.outputs, bits))
            self.want["weight_zero_point"] = Want(("I32",), words) if self.fields else Want(("I8", "I32"), shapes)
        if has is not None and "weight_g_idx" in has:
            self.want["weight_g_idx"] = Want(("I32", "I64"), ((share.inputs,),))

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers:
        share, bits = self.share, self.group.bits
        shape = given["weight_shape"].tolist() if "weight_shape" in given else [share.outputs, share.inputs]
        if shape != [share.outputs, share.inputs]:
            raise ModelError(f"weight_shape says {shape}, expected {[share.outputs, share.inputs]}")
        words = given["weight_packed"][share.rows]
        if words.shape[1] == word_counts(share.inputs, bits)[0]:
            codes = share.taken(words, bits)
        else:
            codes = forms.fields_within(words.to(share.device), bits, share.columns.stop)[:, share.columns.start :]
        scale = by_row(given["weight_scale"], share, self.rows)
        return Numbers(codes, scale, self._zero(given), group_of(given, share, self.columns), bits, 1 << (bits - 1))

    def _zero(self, given: Mapping[str, Tensor]) -> Tensor | None:
        share, bits = self.share, self.group.bits
        if self.group.symmetric:
            words = given.get("weight_zero_point")
            if words is not None and words.dim() == 2 and len(words) in word_counts(share.outputs, bits):
                words = self._outputs(words).int() - (1 << (bits - 1))  # weights of other widths are not packed
            want_symmetric(words)
            return None
        zero = given["weight_zero_point"].to(share.device)
        if not self.fields:
            return by_row(zero, share, self.rows) + (1 << (bits - 1))
        return self._outputs(zero)[:, share.rows].t().float()

    def _outputs(self, words: Tensor) -> Tensor:
        """Return fields u8 [groups, outputs] of words [W, groups]."""
        bits, outputs = self.group.bits, self.share.outputs
        dense = len(words) == word_counts(outputs, bits)[0]
        return (forms.fields if dense else forms.fields_within)(words.t(), bits, outputs)


class CompressedTensors(CheckpointQuantizer):
    """The quantizer for ``config_groups``.  Modules that ``ignore`` names stay unquantized."""

    method, packed_by = "compressed-tensors", ("weight_packed", "weight_scale")

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        settings = self.settings
        outer = settings.one_of("format", (None, *FORMATS), None) or "mixed-precision"
        for key in ("sparsity_config", "transform_config"):
            given = settings.part(key).given
            if given and given.get("format") != "dense":
                raise settings.refuse(key, "none, because sparse or transformed weights are not supported")
        groups, self.cache_alone = settings.part("config_groups"), False
        if not groups.given:
            if not settings.given.get("kv_cache_scheme"):
                raise settings.refuse("config_groups", "an object of groups with targets and weights")
            self.cache_alone = True  # keys and values are quantized, but no weights
        found = (config_group(groups.part(name), outer) for name in groups.given)
        self.groups = [group for group in found if group is not None]
        self.ignore = settings.names("ignore")
        if settings.given.get("kv_cache_scheme"):
            what = "scales of keys and values are not used; kv_format=fp8 and int8 have their own"
            self.tell(what, "kv_cache_scheme")

    def finish(self) -> None:
        if not self.cache_alone:
            super().finish()

    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        group = self._group(m, None if source is None else source.name)
        has = None if source is None else source.tensors
        if has is not None and "weight_packed" not in has and "weight_scale" not in has:
            return None
        if group is None:
            if source is None:
                return None
            raise ModelError(
                f"the checkpoint has scales of {source.name}, but config_groups and ignore exclude it from quantization"
            )
        if group.packed if has is None else "weight_packed" in has:
            if group.floating:
                raise ModelError(f"the weights of {m.name} are packed floating numbers: expected type=int")
            made: PartLayout = FieldsLayout(share, group, has)
        else:
            dtype = "F8_E4M3" if group.floating else "I8"
            made = BytesLayout(share, dtype, *group.blocks(share), group.why, "weight_scale", not group.symmetric)
            if has is not None and "weight_g_idx" in has:
                made.want["weight_g_idx"] = Want(("I32", "I64"), ((share.inputs,),))
        for name in UNUSED:
            if has is not None and name in has and name not in made.want:
                made.want[name] = Want((has[name][1],), (has[name][0],))
        return made

    def _group(self, m: ModuleInfo, name: str | None) -> ConfigGroup | None:
        """Return the group of a module, None for a module that is not quantized.

        Groups that name modules precede groups with patterns, and both precede groups with classes.
        """
        if name is None:
            names = [one for group in self.groups for one in (*group.targets, *self.ignore)]
            if any(one.startswith("re:") or "." in one for one in names):
                raise ModelError(
                    "config_groups names modules, and this architecture does not give the names of its modules"
                )
            return next((g for g in self.groups if "Linear" in g.targets), None)
        if any(_names(target, name) for target in self.ignore):
            return None
        for fits in (lambda t: t == name, lambda t: _names(t, name), lambda t: t == "Linear"):
            for group in self.groups:
                if any(fits(target) for target in group.targets):
                    return group
        return None


def _names(target: str, name: str) -> bool:
    if not target.startswith("re:"):
        return target == name
    try:
        return re.match(target.removeprefix("re:"), name) is not None
    except re.error as e:
        raise ModelError(f"target {shown(target)} of {name}: expected a regular expression after re: ({e})") from None
