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
from .scaled_bytes import BytesLayout, by_row, check_symmetric, group_of, scale_shapes

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
STRATEGIES = ("tensor", "channel", "group", "block", None)
# keys of tensors that may be present and are not read: scales of activations, keys and values
UNUSED = (
    "input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale", "weight_zero_point",
)  # fmt: skip


class ConfigGroup(NamedTuple):
    """The quantization that one group of ``config_groups`` defines for the modules that ``targets`` names."""

    targets: tuple[str, ...]
    bits: int
    floating: bool
    symmetric: bool
    strategy: str
    rows: int  # number of outputs that share a scale; 0 means all outputs
    columns: int  # inputs; 0: all
    packed: bool | None  # None means that the names of the tensors decide

    @property
    def why(self) -> str:
        return f" with num_bits={self.bits}, strategy={self.strategy}, group_size={self.columns or None}"

    def blocks(self, share: Share) -> tuple[int, int]:
        return self.rows or share.outputs, self.columns or share.inputs


def config_group(settings: Settings, outer: str) -> ConfigGroup | None:
    """Return the settings of a group of modules, None if its weights are not quantized.

    ``outer`` is the format of groups that do not state one.
    """
    written = settings.one_of("format", (None, *FORMATS), None) or outer
    if settings.given.get("weights") is None or written == "dense":
        return None
    weights = settings.part("weights")
    floating = weights.one_of("type", ("int", "float"), "int") == "float"
    widths = (8,) if floating else (2, 3, 4, 5, 6, 7, 8)
    bits = weights.one_of("num_bits", widths, 8)
    strategy = _strategy(weights)
    rows, columns = 1, 0
    if strategy == "tensor":
        rows = 0
    elif strategy == "group":
        columns = max(0, weights.group("group_size"))
    elif strategy == "block":
        rows, columns = weights.pair("block_structure")
    packed: bool | None = written == "pack-quantized"
    if written in ("naive-quantized", "mixed-precision"):
        packed = None
    symmetric = weights.flag("symmetric", True)
    targets = settings.names("targets")
    return ConfigGroup(targets, bits, floating, symmetric, strategy, rows, columns, packed)


def _strategy(weights: Settings) -> str:
    """Return the strategy of a group of modules; without this key it follows from the number of inputs per scale."""
    strategy = weights.one_of("strategy", STRATEGIES, None)
    if strategy is not None:
        return strategy
    size = weights.given.get("group_size")
    if size is None:
        return "tensor"
    return "channel" if size == -1 else "group"


def word_counts(fields: int, bits: int) -> tuple[int, ...]:
    """Return the numbers of words for ``fields`` fields, first if they continue across words, then if they do not.

    A single number means that both are equal.
    """
    across = -(-fields * bits // 32)
    within = -(-fields // (32 // bits))
    return (across,) if across == within else (across, within)


class FieldsLayout(PartLayout):
    """The layout of ``weight_packed`` and its scales and zero points.

    ``has`` has the tensors of the part by name, or is None if no checkpoint was read.
    """

    def __init__(self, share: Share, group: ConfigGroup, has: Mapping[str, Any] | None) -> None:
        super().__init__(share)
        self.group = group
        self.why = group.why
        bits = group.bits
        self.middle = 1 << (bits - 1)  # the stored field that stands for the code 0
        self.rows, self.columns = group.blocks(share)
        scales = scale_shapes(share, self.rows, self.columns)
        words = [(share.outputs, count) for count in word_counts(share.inputs, bits)]
        self.want = {"weight_packed": Want("I32", *words)}
        self.want["weight_scale"] = Want(FLOATS, *scales)
        if has is None or "weight_shape" in has:
            self.want["weight_shape"] = Want(("I64", "I32"), (2,))
        self.packed_zeros = group.strategy in ("group", "channel")
        if not group.symmetric:
            groups = -(-share.inputs // self.columns)
            zero_words = [(count, groups) for count in word_counts(share.outputs, bits)]
            zeros = Want("I32", *zero_words) if self.packed_zeros else Want(("I8", "I32"), *scales)
            self.want["weight_zero_point"] = zeros
        if has is not None and "weight_g_idx" in has:
            self.want["weight_g_idx"] = Want(("I32", "I64"), (share.inputs,))

    def numbers(self, given: Mapping[str, Tensor]) -> Numbers:
        share = self.share
        bits = self.group.bits
        wanted = [share.outputs, share.inputs]
        shape = given["weight_shape"].tolist() if "weight_shape" in given else wanted
        if shape != wanted:
            raise ModelError(f"weight_shape says {shape}, expected {wanted}")
        words = given["weight_packed"][share.rows]
        if words.shape[1] == word_counts(share.inputs, bits)[0]:
            codes = share.taken(words, bits)
        else:
            first, last = share.columns.start, share.columns.stop
            codes = forms.fields_within(words.to(share.device), bits, last)[:, first:]
        scale = by_row(given["weight_scale"], share, self.rows)
        zero = self._zero(given)
        groups = group_of(given, share, self.columns)
        return Numbers(codes, scale, zero, groups, bits, self.middle)

    def _zero(self, given: Mapping[str, Tensor]) -> Tensor | None:
        """Return the zero points f32 [this process's outputs, groups], None for a symmetric weight."""
        share = self.share
        if self.group.symmetric:
            zero = given.get("weight_zero_point")
            packed = word_counts(share.outputs, self.group.bits)
            if zero is not None and zero.dim() == 2 and len(zero) in packed:
                # zero points with one of the row counts of packed words are packed; with another row count they are
                # plain numbers
                zero = self._outputs(zero).int() - self.middle
            check_symmetric(zero)
            return None
        zero = given["weight_zero_point"].to(share.device)
        if not self.packed_zeros:
            return by_row(zero, share, self.rows) + self.middle
        mine = self._outputs(zero)[:, share.rows]
        return mine.t().float()

    def _outputs(self, words: Tensor) -> Tensor:
        """Return zero points u8 [groups, outputs], unpacked from words i32 [W, groups]."""
        bits = self.group.bits
        outputs = self.share.outputs
        across = len(words) == word_counts(outputs, bits)[0]
        unpack = forms.fields if across else forms.fields_within
        return unpack(words.t(), bits, outputs)


class CompressedTensors(CheckpointQuantizer):
    """The quantizer for ``config_groups``.  Modules that ``ignore`` names stay unquantized."""

    method = "compressed-tensors"
    packed_by = ("weight_packed", "weight_scale")

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        settings = self.settings
        outer = settings.one_of("format", (None, *FORMATS), None) or "mixed-precision"
        for key in ("sparsity_config", "transform_config"):
            given = settings.part(key).given
            if given and given.get("format") != "dense":
                raise settings.refuse(key, "no entry, because sparse or transformed weights are not supported")
        groups = settings.part("config_groups")
        quantizes_cache = bool(settings.given.get("kv_cache_scheme"))
        self.cache_alone = not groups.given  # keys and values are quantized, but no weights
        if self.cache_alone and not quantizes_cache:
            raise settings.refuse("config_groups", "an object of groups with targets and weights")
        self.groups = []
        for name in groups.given:
            group = config_group(groups.part(name), outer)
            if group is not None:
                self.groups.append(group)
        self.ignore = settings.names("ignore")
        if quantizes_cache:
            what = "scales of keys and values are not used; kv_format=fp8 and int8 have their own"
            self.note(what, "kv_cache_scheme")

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
        packed = group.packed if has is None else "weight_packed" in has
        if packed and group.floating:
            raise ModelError(f"the weights of {m.name} are packed floating numbers: expected type=int")
        made: PartLayout
        if packed:
            made = FieldsLayout(share, group, has)
        else:
            dtype = "F8_E4M3" if group.floating else "I8"
            rows, columns = group.blocks(share)
            made = BytesLayout(share, dtype, rows, columns, group.why, "weight_scale", not group.symmetric)
            if has is not None and "weight_g_idx" in has:
                made.want["weight_g_idx"] = Want(("I32", "I64"), (share.inputs,))
        for name in UNUSED:
            if has is not None and name in has and name not in made.want:
                shape, dtype = has[name]
                made.want[name] = Want(dtype, shape)
        return made

    def _group(self, m: ModuleInfo, name: str | None) -> ConfigGroup | None:
        """Return the group of a module, None for a module that is not quantized.

        Groups that name modules precede groups with patterns, and both precede groups with classes.
        """
        if name is None:
            names = [*self.ignore]
            for group in self.groups:
                names += group.targets
            if self.groups and any(one.startswith("re:") or "." in one for one in names):
                raise ModelError(
                    "config_groups names modules, and this architecture does not give the names of its modules"
                )
            return next((group for group in self.groups if "Linear" in group.targets), None)
        if any(_names(target, name) for target in self.ignore):
            return None
        for fits in (
            lambda target: target == name,
            lambda target: _names(target, name),
            lambda target: target == "Linear",
        ):
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
