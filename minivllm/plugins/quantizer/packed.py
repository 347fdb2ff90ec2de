"""Weights that are quantized in the checkpoint, converted part by part to the forms that products use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo, PartSource, Quantizer, Shard, StoredWeight, WeightScheme
from minivllm.device.layers.linear import joined_by, no_adapter, part_rows, stored_by
from minivllm.errors import ModelError, shown

from . import forms
from .forms import HeldRows, Numbers

DTYPES = {
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FLOATS = ("F16", "BF16", "F32", "F64")
WHERE = "quantization_config of config.json"
MARLIN = "use the same model as checkpoint_format=gptq, which GPTQModel writes with format=gptq"


class Want:
    """The expected dtypes and shapes of a tensor of a checkpoint.

    ``dtypes`` are names as in safetensors, such as "F16".  The tensor has one of these dtypes and one of ``shapes``.
    """

    def __init__(self, dtypes: str | tuple[str, ...], *shapes: tuple[int, ...]) -> None:
        self.dtypes = (dtypes,) if isinstance(dtypes, str) else dtypes
        self.shapes = shapes

    def refuse(self, shape: tuple[int, ...], dtype: str, why: str) -> None:
        """Raise ModelError for a tensor of another shape or dtype.

        ``why`` is a text for the message: the settings from which the expected shapes follow.
        """
        if shape in self.shapes and dtype in self.dtypes:
            return
        shapes = " or ".join(str(list(one)) for one in self.shapes)
        dtypes = " or ".join(self.dtypes)
        raise ModelError(
            f"shape {list(shape)} of {dtype}, expected {shapes} of {dtypes}{why}; config.json and the weights do not "
            "belong together"
        )


@dataclass(frozen=True)
class Share:
    """This process's share of a part of a module: the rows and columns of the checkpoint's tensor that it stores.

    ``outputs`` and ``inputs`` are the numbers of rows and columns of the whole tensor.
    """

    outputs: int
    inputs: int
    rows: slice | Tensor  # i64 indices as a tensor if the rows of the part are not consecutive
    columns: slice
    dtype: torch.dtype
    device: str
    fused: bool = False  # whether the checkpoint's tensor also has other parts, as a tensor of q, k and v

    @staticmethod
    def of(m: ModuleInfo, part: str) -> Share:
        """Return this process's share of a part of a module."""
        own = part_rows(m, part)
        rows = own.stop - own.start
        names = _beside(m, part)
        outputs = {name: _outputs_of_all(m, name) for name in names}
        total = sum(outputs.values())
        earlier = names[: names.index(part)]
        before = sum(outputs[name] for name in earlier)
        rank = m.share(part).rank if m.split == "column" else 0
        first = before + rank * rows
        where: slice | Tensor = slice(first, first + rows)
        fused = len(names) > 1
        groups = m.sources[part].groups if fused and m.sources is not None else 1
        if groups > 1:
            by_group = torch.arange(total).view(groups, -1)
            start, stop = before // groups, (before + outputs[part]) // groups
            of_part = by_group[:, start:stop].flatten()
            where = of_part[rank * rows : (rank + 1) * rows]
        processes = 1
        start = 0
        if m.split == "row":
            processes = m.shard.size
            start = m.shard.rank * m.in_features
        columns = slice(start, start + m.in_features)
        dtype = getattr(torch, m.dtype)
        return Share(total, m.in_features * processes, where, columns, dtype, m.device, fused)

    def taken(self, words: Tensor, bits: int) -> Tensor:
        """Unpack rows of packed words i32 [rows, W], and return this process's columns, u8 [rows, columns].

        A row of words has one field of ``bits`` bits for each of the ``inputs`` of all processes.
        """
        at = 0  # index of the input to which the first unpacked field belongs
        if 32 % bits == 0:
            first = self.columns.start * bits // 32
            last = -(-self.columns.stop * bits // 32)
            words = words[:, first:last]
            at = first * 32 // bits
        found = forms.fields(words.to(self.device), bits, self.columns.stop - at)
        return found[:, self.columns.start - at :]

    def group_of(self, size: int) -> Tensor:
        """Return, for each of this process's inputs, the index of its group of ``size`` consecutive inputs."""
        return torch.arange(self.columns.start, self.columns.stop) // size


def _beside(m: ModuleInfo, part: str) -> list[str]:
    """Return the names of the parts that are in one tensor of the checkpoint with ``part``, in their order."""
    sources = m.sources
    if sources is None or part not in sources:
        return [part]
    tensor = sources[part].name
    return [name for name, _ in m.parts if name in sources and sources[name].name == tensor]


def _outputs_of_all(m: ModuleInfo, part: str) -> int:
    """Return the number of outputs of a part in all processes together."""
    rows = m.rows[part]
    count = rows.stop - rows.start
    return count * m.share(part).size if m.split == "column" else count


class PartLayout(ABC):
    """The layout of one part in a checkpoint.

    ``want`` has the required tensors, and ``why`` the settings that require them.
    """

    why = ""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.want: dict[str, Want] = {}

    @abstractmethod
    def numbers(self, given: Mapping[str, Tensor]) -> Numbers | Tensor:
        """Return this process's share of a part on its device: quantized numbers, or a plain weight (a Tensor)."""


class PlainLayout(PartLayout):
    """The layout of a part that is not quantized, in a module with quantized parts."""

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        self.want = {"weight": Want(FLOATS, (share.outputs, share.inputs))}

    def numbers(self, given: Mapping[str, Tensor]) -> Tensor:
        share = self.share
        mine = given["weight"][share.rows, share.columns]
        return mine.to(share.device, share.dtype).clone()


@dataclass
class _Held:
    """Some rows of the module, and the scheme (stored weight with its products) that multiplies by them."""

    parts: tuple[str, ...]
    rows: slice
    scheme: WeightScheme
    order: Tensor | None

    def inputs(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(1, self.order)


@dataclass(eq=False)
class PackedWeight(WeightScheme):
    """A weight whose parts are loaded from tensors in any order.

    The parts are stored as one weight if their forms agree, else each by itself.  ``note(what, module)`` is called if
    the numbers of a part cannot be packed and are unpacked to the module's dtype.
    """

    cuts_parts = True  # a tensor with several parts is loaded as a whole, once for each part
    # a tensor whose outputs are ordered by groups, so that the rows of a part are not consecutive, is also loaded as a
    # whole for each part
    cuts_groups = True

    info: ModuleInfo
    layouts: Mapping[str, PartLayout]
    note: Callable[[str, str], None]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._given: dict[str, dict[str, Tensor]] = {part: {} for part in self.layouts}
        self._pieces: dict[str, HeldRows] = {}
        self._held: list[_Held] = []

    def params(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for part in self.layouts:
            found |= self.params_of(part)
        return found

    def params_of(self, part: str) -> dict[str, tuple[int, ...]]:
        layout = self.layouts[part]
        share = layout.share
        found = {name: want.shapes[0] for name, want in layout.want.items()}
        if found.get("weight") == (share.outputs, share.inputs) and not share.fused:
            # the loader compares a complete, unsplit weight with the shape of the whole module
            found["weight"] = (self.info.out_features, self.info.in_features)
        return found

    def slice(self, param: str, tensor: Tensor, split: str | None, shard: Shard) -> Tensor:
        """Return the whole tensor, because ``load`` selects this process's share of its codes and scales."""
        return tensor

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        part_rows(self.info, part)
        layout = self.layouts[part]
        if param not in layout.want:
            raise ModelError(f"{self.info.name} takes no {param}, expected {', '.join(layout.want)}")
        dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
        layout.want[param].refuse(tuple(tensor.shape), dtype, layout.why)
        if param == "bias" and bool(tensor.any()):
            raise ModelError("a bias that is not 0, but this architecture has no bias here")
        given = self._given[part]
        given[param] = tensor
        if len(given) < len(layout.want):
            return
        self._pieces[part] = self._piece(layout, given)
        self._given[part] = {}
        if len(self._pieces) == len(self.layouts):
            self._hold()

    def _piece(self, layout: PartLayout, given: Mapping[str, Tensor]) -> HeldRows:
        """Return the rows of a part whose tensors are all loaded."""
        found = layout.numbers(given)
        if isinstance(found, Tensor):
            return HeldRows("plain", found)
        numbers = {"scales": found.scale, "zero points": found.zero, "values of codes": found.table}
        for what, values in numbers.items():
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ModelError(f"{self.info.name}: {what} that are inf or NaN, expected numbers: the file is damaged")
        piece = forms.piece_of(found, layout.share.dtype)
        if piece.form == "plain":
            message = f"inputs that share a scale do not fill blocks of 8: unpacked to {self.info.dtype}"
            self.note(message, self.info.name)
        return piece

    def _hold(self) -> None:
        """Store the pieces of all parts, as one weight if they have the same form."""
        parts = tuple(name for name, _ in self.info.parts)
        pieces = {name: self._pieces[name] for name in parts}
        self._pieces = {}
        whole = forms.merged(list(pieces.values()))
        if whole is not None:
            rows = slice(0, self.info.out_features)
            scheme = forms.scheme_of(whole, self.info)
            self._keep("", _Held(parts, rows, scheme, whole.order))
            return
        for name, rows in self.info.rows.items():
            size = rows.stop - rows.start
            info = replace(self.info, parts=((name, size),), experts=0)
            scheme = forms.scheme_of(pieces[name], info)
            self._keep(f"{name}.", _Held((name,), rows, scheme, pieces[name].order))

    def _keep(self, prefix: str, held: _Held) -> None:
        """Add the stored weight of some rows of the module, and its tensors under their names behind ``prefix``."""
        self._held.append(held)
        for name, tensor in held.scheme.tensors.items():
            self.tensors[prefix + name] = tensor
        if held.order is not None:
            self.tensors[prefix + "order"] = held.order

    def finish(self) -> None:
        for held in self._held:
            held.scheme.finish()

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        if len(self._held) == 1:
            whole = self._held[0]
            return whole.scheme.apply(whole.inputs(x), out)
        y = x.new_empty(len(x), self.info.out_features) if out is None else out
        for held in self._held:
            held.scheme.apply(held.inputs(x), y[:, held.rows])
        return y

    def expert(self, x: Tensor, e: int) -> Tensor:
        if len(self._held) == 1:
            whole = self._held[0]
            return whole.scheme.expert(whole.inputs(x), e)
        each = len(self._held) // self.info.experts
        first = e * each
        outputs = []
        for held in self._held[first : first + each]:
            output = held.scheme.apply(held.inputs(x))
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def stored(self) -> StoredWeight | None:
        whole = self._whole()
        return None if whole is None else stored_by(whole)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        whole = self._whole()
        return None if whole is None else joined_by(whole, bias, mode, activation)

    def _whole(self) -> WeightScheme | None:
        """Return the scheme that holds the whole module and multiplies x without reordering, None if there is none."""
        if len(self._held) != 1 or self._held[0].order is not None:
            return None
        return self._held[0].scheme


def holds_words(source: PartSource, beside: tuple[str, ...]) -> bool:
    """Return whether a part has a ``qweight``.

    ModelError for a part that lacks it but has a tensor of ``beside``, such as scales.
    """
    tensors = source.tensors
    if "qweight" in tensors:
        return True
    present = [name for name in beside if name in tensors]
    if present and "weight" not in tensors:
        raise ModelError(
            f"the checkpoint has {source.name}.{present[0]} and lacks {source.name}.qweight; expected both: download "
            "it again"
        )
    if {"B", "s"} <= tensors.keys():
        raise ModelError(f"the checkpoint has {source.name}.B, which is Marlin's order: {MARLIN}")
    return False


class Settings:
    """Access to ``quantization_config``, or a part of it, that checks values."""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self.given = given
        self.where = where

    def refuse(self, key: str, wanted: str) -> ModelError:
        """Return the error for the value of a key; ``wanted`` describes the accepted values."""
        value = shown(self.given.get(key))
        return ModelError(f"{WHERE}: {self.where}{key}={value}: expected {wanted}")

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any, instead: str = "") -> Any:
        """Return the value of a key, one of ``allowed``, or ``default`` without the key.

        Values of another type, such as True for 1, are refused, with the end ``instead`` of the message.
        """
        value = self.given.get(key, default)
        for one in allowed:
            if type(value) is type(one) and value == one:
                return value
        wanted = " or ".join("null" if one is None else shown(one) for one in allowed)
        raise self.refuse(key, wanted + instead)

    def flag(self, key: str, default: bool = False) -> bool:
        return self.one_of(key, (True, False), default)

    def group(self, key: str, default: int | None = None) -> int:
        """Return the number of inputs that share a scale, -1 for all inputs; ``default`` replaces a missing key."""
        value = self.given.get(key, default)
        if type(value) is not int or (value != -1 and value < 1):
            raise self.refuse(key, "a number of inputs, or -1 for all")
        return value

    def pair(self, key: str) -> tuple[int, int]:
        """Return the outputs and inputs of a block that shares a scale."""
        value = self.given.get(key)
        if not isinstance(value, (list, tuple)) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
            raise self.refuse(key, "two numbers, of outputs and inputs that share a scale")
        outputs, inputs = value
        return outputs, inputs

    def names(self, key: str) -> tuple[str, ...]:
        value = self.given.get(key) or ()
        if not isinstance(value, (list, tuple)) or any(not isinstance(one, str) for one in value):
            raise self.refuse(key, "a list of names")
        return tuple(value)

    def part(self, key: str) -> Settings:
        value = self.given.get(key) or {}
        if not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return Settings(value, f"{self.where}{key}.")


class CheckpointQuantizer(Quantizer):
    """A quantizer for modules that are packed in the checkpoint.

    The tensors of a module decide whether it is packed, and config.json has the settings.
    """

    method = ""
    packed_by: tuple[str, ...] = ()  # names of tensors that show that a part is quantized
    head = False  # whether the output head is quantized, if no checkpoint was read

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        written = checkpoint or {}
        method = written.get("quant_method", "no method")
        if method != self.method:
            raise ModelError(f"the checkpoint is quantized with {method}: expected {self.method} for this quantizer")
        self.settings = Settings(written)
        self._met: dict[str, list[str]] = {}
        self._modules_seen = 0
        self._found = 0

    @abstractmethod
    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        """Return the layout of a part, None if it is not quantized.

        ``source`` None means that no checkpoint was read.
        """

    def scheme(self, m: ModuleInfo) -> WeightScheme | None:
        if m.kind == "embedding":
            return None
        self._modules_seen += m.sources is not None
        layouts: dict[str, PartLayout] = {}
        quantized = False
        for part, _ in m.parts:
            share = Share.of(m, part)
            layout = self._layout(m, part, share)
            quantized |= layout is not None
            layouts[part] = layout or PlainLayout(share)
        if not quantized:
            return None
        self._found += 1
        return PackedWeight(m, layouts, self.note)

    def _layout(self, m: ModuleInfo, part: str, share: Share) -> PartLayout | None:
        """Return the layout of a part, None if it is not quantized.

        Raise ModelError if the tensors of the checkpoint differ from the layout.
        """
        if m.sources is None:
            packed = m.kind in ("linear", "experts") or (m.kind == "lm_head" and self.head)
            return self.layout(m, None, share) if packed else None
        source = m.sources.get(part)
        if source is None:
            return None
        made = self.layout(m, source, share)
        if made is None:
            _check_plain(source)
            return None
        if not m.bias and "bias" in source.tensors:
            made.want["bias"] = Want(FLOATS, (share.outputs,))
        for param, want in made.want.items():
            name = f"{source.name}.{param}"
            if param not in source.tensors:
                raise ModelError(f"the checkpoint lacks {name}; download it again or check config.json")
            shape, dtype = source.tensors[param]
            try:
                want.refuse(shape, dtype, made.why)
            except ModelError as e:
                raise ModelError(f"tensor {shown(name)}: {e}") from None
        return made

    def note(self, what: str, module: str) -> None:
        """Add a note for the user, once for all modules that it concerns."""
        modules = self._met.setdefault(what, [])
        modules.append(module)
        self.notes[:] = [f"{message}: {_listed(modules)}" for message, modules in self._met.items()]

    def finish(self) -> None:
        if self._modules_seen and not self._found:
            raise ModelError(
                f"{WHERE}: quant_method={shown(self.method)}, but no module of the checkpoint has this format: "
                f"expected tensors named {' or '.join(self.packed_by)}, or config.json without it"
            )


def _check_plain(source: PartSource) -> None:
    """Raise ModelError if the weight of a part (such as q) without a quantized layout is not floating-point."""
    if "weight" not in source.tensors:
        return
    dtype = source.tensors["weight"][1]
    if dtype not in FLOATS:
        raise ModelError(
            f"the checkpoint has {source.name}.weight of {dtype} and no scales for it; download it again or check "
            "config.json"
        )


def _listed(modules: list[str]) -> str:
    """Return the first two names in one text, and the number of further names."""
    names = list(dict.fromkeys(modules))
    text = ", ".join(names[:2])
    more = len(names) - 2
    return f"{text} and {more} more" if more > 0 else text
