"""Weights that are quantized in the checkpoint, converted part by part to the forms that products use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

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


class Want(NamedTuple):
    """The expected shapes and dtypes of a tensor of a checkpoint."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # one of these

    def refuse(self, shape: tuple[int, ...], dtype: str, why: str) -> None:
        """Raise ModelError for a tensor of another shape or dtype."""
        if shape not in self.shapes or dtype not in self.dtypes:
            shapes = " or ".join(str(list(s)) for s in self.shapes)
            raise ModelError(
                f"shape {list(shape)} of {dtype}, expected {shapes} of {' or '.join(self.dtypes)}{why}; config.json "
                "and the weights do not belong together"
            )


@dataclass(frozen=True)
class Share:
    """The outputs and inputs of a part in the checkpoint, and this process's share of them."""

    outputs: int
    inputs: int
    rows: slice | Tensor  # a tensor i64 if the rows of a part are not consecutive
    columns: slice
    dtype: torch.dtype
    device: str
    fused: bool = False  # whether the tensor contains the outputs of other parts too

    @staticmethod
    def of(m: ModuleInfo, part: str) -> Share:
        own = part_rows(m, part)
        rows, columns = own.stop - own.start, m.in_features
        names = _beside(m, part)
        whole = {name: m.rows[name].stop - m.rows[name].start for name in names}
        if m.split == "column":
            whole = {name: count * m.share(name).size for name, count in whole.items()}
        before = sum(whole[name] for name in names[: names.index(part)])
        rank = m.share(part).rank if m.split == "column" else 0
        first = before + rank * rows
        where: slice | Tensor = slice(first, first + rows)
        groups = m.sources[part].groups if len(names) > 1 and m.sources is not None else 1
        if groups > 1:
            table = torch.arange(sum(whole.values())).view(groups, -1)
            mine = table[:, before // groups : (before + whole[part]) // groups].flatten()
            where = mine[rank * rows : (rank + 1) * rows]
        start = m.shard.rank * columns if m.split == "row" else 0
        return Share(
            sum(whole.values()),
            columns * (m.shard.size if m.split == "row" else 1),
            where,
            slice(start, start + columns),
            getattr(torch, m.dtype),
            m.device,
            len(names) > 1,
        )

    def taken(self, words: Tensor, bits: int) -> Tensor:
        """Unpack rows of packed words i32 [rows, W], and return this process's columns, u8 [rows, columns].

        A row of words has one field of ``bits`` bits for each of the ``inputs`` of all processes.
        """
        first = self.columns.start * bits // 32
        last = -(-self.columns.stop * bits // 32)
        at = first * 32 // bits if 32 % bits == 0 else 0
        words = words[:, first:last] if 32 % bits == 0 else words
        found = forms.fields(words.to(self.device), bits, self.columns.stop - at)
        return found[:, self.columns.start - at :]

    def group_of(self, size: int) -> Tensor:
        """Return the group of each of this process's inputs; ``size`` consecutive inputs are a group."""
        return torch.arange(self.columns.start, self.columns.stop) // size


def _beside(m: ModuleInfo, part: str) -> list[str]:
    """Return the parts that share a tensor of the checkpoint, in their order."""
    if m.sources is None or part not in m.sources:
        return [part]
    mine = m.sources[part].name
    return [name for name, _ in m.parts if name in m.sources and m.sources[name].name == mine]


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
        """Return this process's share of the tensors, on its device, or the weight itself as a Tensor."""


class PlainLayout(PartLayout):
    """The layout of a part that is not quantized, in a module with quantized parts."""

    def __init__(self, share: Share) -> None:
        super().__init__(share)
        self.want = {"weight": Want(FLOATS, ((share.outputs, share.inputs),))}

    def numbers(self, given: Mapping[str, Tensor]) -> Tensor:
        share = self.share
        return given["weight"][share.rows, share.columns].to(share.device, share.dtype).clone()


@dataclass
class _Held:
    """Rows of the module, and the scheme that multiplies by them."""

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
    cuts_groups = True  # also if the rows of a part are not consecutive

    info: ModuleInfo
    layouts: Mapping[str, PartLayout]
    note: Callable[[str, str], None]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._given: dict[str, dict[str, Tensor]] = {part: {} for part in self.layouts}
        self._pieces: dict[str, HeldRows] = {}
        self._held: list[_Held] = []

    def params(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for part in self.layouts for name, shape in self.params_of(part).items()}

    def params_of(self, part: str) -> dict[str, tuple[int, ...]]:
        layout = self.layouts[part]
        found = {name: want.shapes[0] for name, want in layout.want.items()}
        if found.get("weight") == (layout.share.outputs, layout.share.inputs) and not layout.share.fused:
            # the loader recognizes a whole weight by this shape
            found["weight"] = (self.info.out_features, self.info.in_features)
        return found

    def slice(self, param: str, tensor: Tensor, split: str | None, shard: Shard) -> Tensor:
        """Return the whole tensor, since ``load`` computes the share of fields and scales."""
        return tensor

    def load(self, param: str, tensor: Tensor, part: str) -> None:
        part_rows(self.info, part)
        layout, given = self.layouts[part], self._given[part]
        if param not in layout.want:
            raise ModelError(f"{self.info.name} takes no {param}, expected {', '.join(layout.want)}")
        dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
        layout.want[param].refuse(tuple(tensor.shape), dtype, layout.why)
        if param == "bias" and bool(tensor.any()):
            raise ModelError("a bias that is not 0, but this architecture has no bias here")
        given[param] = tensor
        if len(given) < len(layout.want):
            return
        found = layout.numbers(given)
        if isinstance(found, Tensor):
            self._pieces[part] = HeldRows("plain", found)
        else:
            if not bool(torch.isfinite(found.scale).all()):
                raise ModelError(f"{self.info.name}: scales that are inf or NaN, expected numbers: the file is damaged")
            self._pieces[part] = piece = forms.piece_of(found, layout.share.dtype)
            if piece.form == "plain":
                what = f"inputs that share a scale do not fill blocks of 8: unpacked to {self.info.dtype}"
                self.note(what, self.info.name)
        self._given[part] = {}
        if len(self._pieces) == len(self.layouts):
            self._hold()

    def _hold(self) -> None:
        pieces, self._pieces = self._pieces, {}
        parts = tuple(name for name, _ in self.info.parts)
        one = forms.merged([pieces[name] for name in parts])
        if one is not None:
            rows, scheme = slice(0, self.info.out_features), forms.scheme_of(one, self.info)
            self._held = [_Held(parts, rows, scheme, one.order)]
        else:
            for name, rows in self.info.rows.items():
                mine = replace(self.info, parts=((name, rows.stop - rows.start),), experts=0)
                scheme = forms.scheme_of(pieces[name], mine)
                self._held.append(_Held((name,), rows, scheme, pieces[name].order))
        for held in self._held:
            prefix = "" if one is not None else f"{held.parts[0]}."
            self.tensors |= {prefix + name: tensor for name, tensor in held.scheme.tensors.items()}
            if held.order is not None:
                self.tensors[prefix + "order"] = held.order

    def finish(self) -> None:
        for held in self._held:
            held.scheme.finish()

    def apply(self, x: Tensor, out: Tensor | None = None, adapter: Any = None) -> Tensor:
        no_adapter(self, adapter)
        if len(self._held) == 1:
            return self._held[0].scheme.apply(self._held[0].inputs(x), out)
        y = x.new_empty(len(x), self.info.out_features) if out is None else out
        for held in self._held:
            held.scheme.apply(held.inputs(x), y[:, held.rows])
        return y

    def expert(self, x: Tensor, e: int) -> Tensor:
        if len(self._held) == 1:
            return self._held[0].scheme.expert(self._held[0].inputs(x), e)
        each = len(self._held) // self.info.experts
        return torch.cat([h.scheme.apply(h.inputs(x)) for h in self._held[e * each : (e + 1) * each]], dim=1)

    def stored(self) -> StoredWeight | None:
        whole = self._whole()
        return None if whole is None else stored_by(whole)

    def joined(self, bias: Tensor | None, mode: int, activation: str) -> Any:
        whole = self._whole()
        return None if whole is None else joined_by(whole, bias, mode, activation)

    def _whole(self) -> WeightScheme | None:
        """Return the scheme that holds the whole module and multiplies x without reordering, None if there is none."""
        return self._held[0].scheme if len(self._held) == 1 and self._held[0].order is None else None


def holds_words(source: PartSource, beside: tuple[str, ...]) -> bool:
    """Return whether a part has a ``qweight``.

    ModelError for a part that lacks it but has a tensor of ``beside``, such as scales.
    """
    if "qweight" in source.tensors:
        return True
    alone = next((name for name in beside if name in source.tensors), None)
    if alone is not None and "weight" not in source.tensors:
        raise ModelError(
            f"the checkpoint has {source.name}.{alone} and lacks {source.name}.qweight; expected both: download it "
            "again"
        )
    if {"B", "s"} <= source.tensors.keys():
        raise ModelError(f"the checkpoint has {source.name}.B, which is Marlin's order: {MARLIN}")
    return False


class Settings:
    """Access to ``quantization_config``, or a part of it, that checks values."""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self.given, self.where = given, where

    def refuse(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{WHERE}: {self.where}{key}={shown(self.given.get(key))}: expected {wanted}")

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any, instead: str = "") -> Any:
        value = self.given.get(key, default)
        if not any(type(value) is type(one) and value == one for one in allowed):
            wanted = " or ".join("null" if one is None else shown(one) for one in allowed)
            raise self.refuse(key, wanted + instead)
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return self.one_of(key, (True, False), default)

    def group(self, key: str, default: int | None = None) -> int:
        """Return the number of inputs that share a scale, -1 for all inputs."""
        value = self.given.get(key, default)
        if type(value) is not int or (value != -1 and value < 1):
            raise self.refuse(key, "a number of inputs, or -1 for all")
        return value

    def pair(self, key: str) -> tuple[int, int]:
        """Return the outputs and inputs of a block that shares a scale."""
        value = self.given.get(key)
        if not isinstance(value, (list, tuple)) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
            raise self.refuse(key, "two numbers, of outputs and inputs that share a scale")
        return value[0], value[1]

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

    Tensors and config.json together decide which and how.
    """

    method = ""
    packed_by: tuple[str, ...] = ()  # names of tensors that show that a part is quantized
    head = False  # whether the output head is quantized, if no checkpoint was read

    def __init__(self, options: Any = None, checkpoint: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, checkpoint)
        method = (checkpoint or {}).get("quant_method", "no method")
        if method != self.method:
            raise ModelError(f"the checkpoint is quantized with {method}: expected {self.method} for this quantizer")
        self.settings = Settings(checkpoint or {})
        self._met: dict[str, list[str]] = {}
        self._modules_seen = self._found = 0

    @abstractmethod
    def layout(self, m: ModuleInfo, source: PartSource | None, share: Share) -> PartLayout | None:
        """Return the layout of a part, None if it is not quantized.

        ``source`` None means that no checkpoint was read.
        """

    def scheme(self, m: ModuleInfo) -> WeightScheme | None:
        if m.kind == "embedding":
            return None
        layouts = {part: self._layout(m, part) for part, _ in m.parts}
        self._modules_seen += m.sources is not None
        if not any(layouts.values()):
            return None
        self._found += 1
        return PackedWeight(m, {p: made or PlainLayout(Share.of(m, p)) for p, made in layouts.items()}, self.tell)

    def _layout(self, m: ModuleInfo, part: str) -> PartLayout | None:
        share = Share.of(m, part)
        if m.sources is None:
            packed = m.kind in ("linear", "experts") or (m.kind == "lm_head" and self.head)
            return self.layout(m, None, share) if packed else None
        source = m.sources.get(part)
        if source is None:
            return None
        made = self.layout(m, source, share)
        if made is None:
            if "weight" in source.tensors and source.tensors["weight"][1] not in FLOATS:
                raise ModelError(
                    f"the checkpoint has {source.name}.weight of {source.tensors['weight'][1]} and no scales for it; "
                    "download it again or check config.json"
                )
            return None
        if not m.bias and "bias" in source.tensors:
            made.want["bias"] = Want(FLOATS, ((share.outputs,),))
        for param, want in made.want.items():
            name = f"{source.name}.{param}"
            if param not in source.tensors:
                raise ModelError(f"the checkpoint lacks {name}; download it again or check config.json")
            try:
                want.refuse(*source.tensors[param], made.why)
            except ModelError as e:
                raise ModelError(f"tensor {shown(name)}: {e}") from None
        return made

    def tell(self, what: str, module: str) -> None:
        """Add a note for the user, once for all modules that it concerns."""
        self._met.setdefault(what, []).append(module)
        self.notes[:] = [f"{message}: {_listed(modules)}" for message, modules in self._met.items()]

    def finish(self) -> None:
        if self._modules_seen and not self._found:
            raise ModelError(
                f"{WHERE}: quant_method={shown(self.method)}, but no module of the checkpoint has this format: "
                f"expected tensors named {' or '.join(self.packed_by)}, or config.json without it"
            )


def _listed(modules: list[str]) -> str:
    names = list(dict.fromkeys(modules))
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
