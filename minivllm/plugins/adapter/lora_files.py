"""The weights of a LoRA folder, and their places in memory.

    file      lora_A [rank, in] and lora_B [out, rank] of each module
    memory    row [size]:  A [parts, rank, in] of all served layers, then B [out, rank] of all, times the scales

A ``ReadPlan`` says which numbers of the file go where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import AdaptedModel, AdapterSource, AdapterTarget, adapter_refusal
from minivllm.errors import brief, shown

from .lora_config import LoraSettings
from .peft_targets import DROP

if TYPE_CHECKING:
    from minivllm.core.interfaces.quantizer import ModuleInfo

NAME = re.compile(r"(base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
# part of the name of a tensor that is not supported -> the field of adapter_config.json, or the feature, that causes it
OTHERS = {
    "lora_embedding_": "trained embeddings",
    "lora_magnitude_vector": "use_dora=true",
    "lora_B.bias": "lora_bias=true",
    "modules_to_save": "modules_to_save",
}
HINT = "expected lora_A and lora_B of linear layers; train it on these alone, or merge it into the weights"
ALIGNED = 128  # A and B of each layer begin at an index that is a multiple of this


class Place(NamedTuple):
    """The position of a layer's matrices A and B in a row of the arena (the device memory of one adapter)."""

    number: int  # index of the layer among all linear layers
    parts: int
    rank: int  # of the memory
    inputs: int
    outputs: int
    first_a: int
    first_b: int

    @property
    def numbers(self) -> int:
        """Return the number of elements of A and B together."""
        return self.rank * (self.parts * self.inputs + self.outputs)

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A [..., parts, rank, in] and B [..., out, rank] in rows [..., size] of an arena."""
        a = _matrix(rows, self.first_a, (self.parts, self.rank, self.inputs))
        b = _matrix(rows, self.first_b, (self.outputs, self.rank))
        return a, b


def _matrix(rows: Tensor, first: int, shape: tuple[int, ...]) -> Tensor:
    """Return the elements of rows [..., size] from index ``first`` on, as a view [..., *shape]."""
    stop = first + math.prod(shape)
    elements = rows[..., first:stop]
    return elements.unflatten(-1, shape)


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def places_of(infos: Mapping[str, ModuleInfo], rank: int) -> tuple[dict[str, Place], int]:
    """Return the places of layers in a row of the arena by the names of layers, and the number of elements of a row."""
    end = 0
    first_a = {}
    for name, info in infos.items():
        first_a[name] = end
        size = len(info.parts) * rank * info.in_features
        end += _aligned(size)
    places = {}
    for number, (name, info) in enumerate(infos.items()):
        parts = len(info.parts)
        places[name] = Place(number, parts, rank, info.in_features, info.out_features, first_a[name], end)
        size = info.out_features * rank
        end += _aligned(size)
    return places, end


class MemoryPart(NamedTuple):
    """Elements of a row of the arena that form a matrix [rows, width].

    The first element has the index ``first``, and each row of the matrix begins ``stride`` elements after the row
    before.
    """

    first: int
    rows: int
    width: int
    stride: int

    @property
    def stop(self) -> int:
        """Return the index in the arena's row of the first element behind this matrix, including the stride of its last
        row.
        """
        return self.first + self.rows * self.stride

    def of(self, row: Tensor) -> Tensor:
        """Return the matrix as a view [rows, width] of a row [size] of the arena."""
        elements = row[self.first : self.stop]
        whole = elements.view(self.rows, self.stride)
        return whole[:, : self.width]


Conversion = Callable[[Tensor, Tensor], None]  # writes a tensor of the file to a row [size] of the arena
Copies = list[tuple[str, int, MemoryPart]]  # (name of a tensor, index of its first copied element, destination)
Scaled = list[tuple[int, int, float]]  # (first, stop, factor): elements of a row that are multiplied by the factor


Share = tuple[MemoryPart, Tensor]  # a part of B in memory, and the indices i64 [rows] of the outputs that it holds


class ReadPlan(NamedTuple):
    """The copies and conversions that read a LoRA folder into a row of the arena, for folders with equal layouts and
    settings.
    """

    layout: bytes
    settings: LoraSettings
    ranks: Tensor  # i32 [layers]
    copies: Copies
    scales: Scaled  # multiplied after the copies
    # (name of a tensor, function that writes it), for tensors in another dtype or order
    conversions: list[tuple[str, Conversion]]
    numbers: int  # number of elements that are written


def make_plan(
    source: AdapterSource,
    settings: LoraSettings,
    model: AdaptedModel,
    places: Mapping[str, Place],
    dtype: torch.dtype,
) -> ReadPlan:
    """Compare the tensors of a folder with the model, and return how to read them into rows of ``dtype``.

    RequestError if they do not fit the model."""
    ranks = torch.zeros(len(places), dtype=torch.int32)
    reads = _LoraReads()
    pairs = pairs_of(source.folder, source.names)
    for module, (a, b) in pairs.items():
        if why := settings.targets.refusal(module):
            raise adapter_refusal(source.folder, f"{brief(module)} has weights, but {why}: {DROP}")
        target = source.target(module)
        _check(source, module, target, settings, a, b)
        rank = settings.rank_of(module)
        scale = settings.scale_of(module)
        place = places[target.layer]
        ranks[place.number].clamp_(min=rank)
        info = model.layers[target.layer].info
        parts = list(_parts_of_a(target, place, info, rank))
        reads.add_a(a, target, parts, whole=target.inputs == place.inputs)
        shares = list(_parts_of_b(target, place, rank))
        reads.add_b(b, target, shares, scale, whole=source.tensor(b).dtype == dtype)
    scales = _merged(sorted(reads.scaled))
    written = sum(reads.numbers.values())
    return ReadPlan(source.layout, settings, ranks, reads.copies, scales, reads.conversions, written)


@dataclass
class _LoraReads:
    """The copies and conversions that read a folder, collected module by module."""

    copies: Copies = field(default_factory=list)
    conversions: list[tuple[str, Conversion]] = field(default_factory=list)
    scaled: list[tuple[MemoryPart, float]] = field(default_factory=list)
    # number of elements of each written matrix, by the index of its first element
    numbers: dict[int, int] = field(default_factory=dict)

    def _count(self, parts: Sequence[MemoryPart]) -> None:
        """Record the numbers of elements of parts that are written."""
        for part in parts:
            self.numbers[part.first] = part.rows * part.width

    def add_a(self, name: str, target: AdapterTarget, parts: Sequence[MemoryPart], whole: bool) -> None:
        """Add the reads of the tensor ``name``, the matrix A of a module, to its parts of a row.

        ``whole`` means that this process has all inputs of the layer."""
        self._count(parts)
        if whole:
            self.copies += [(name, 0, part) for part in parts]
        else:
            convert = partial(_write_a, target, parts)
            self.conversions.append((name, convert))

    def add_b(self, name: str, target: AdapterTarget, shares: Sequence[Share], scale: float, whole: bool) -> None:
        """Add the reads of the tensor ``name``, the matrix B of a module, to its parts of a row, times ``scale``.

        ``whole`` means that the tensor in the file has the dtype of the arena."""
        parts = [part for part, _ in shares]
        self._count(parts)
        if whole and all(_consecutive(outputs) for _, outputs in shares):
            for part, outputs in shares:
                first = int(outputs[0]) * part.width
                self.copies.append((name, first, part))
                self.scaled.append((part, scale))
        else:
            convert = partial(_write_b, target, parts, scale)
            self.conversions.append((name, convert))


def _parts_of_a(target: AdapterTarget, place: Place, info: ModuleInfo, rank: int) -> Iterator[MemoryPart]:
    """Yield the memory for A of each part of the layer that a target of the adapter changes."""
    names = [part for part, _ in info.parts]
    size = place.rank * place.inputs
    for part in target.parts:
        first = place.first_a + names.index(part) * size
        yield MemoryPart(first, rank, place.inputs, place.inputs)


def _parts_of_b(target: AdapterTarget, place: Place, rank: int) -> Iterator[Share]:
    """Yield the memory for B of each part of a target, and the indices i64 [rows] of the target's outputs that it
    holds.
    """
    outputs = torch.arange(target.outputs)
    for _, rows, share in target.rows(outputs):
        first = place.first_b + rows.start * place.rank
        part = MemoryPart(first, len(share), rank, place.rank)
        yield part, share


def _consecutive(numbers: Tensor) -> bool:
    """Return whether numbers i64 [n] ascend in steps of 1."""
    ascend = numbers.diff() == 1
    return bool(ascend.all())


def _merged(parts: Sequence[tuple[MemoryPart, float]]) -> Scaled:
    """Return (first, stop, scale) for parts in ascending order; neighbouring parts with an equal scale are joined."""
    found: Scaled = []
    for part, scale in parts:
        first = part.first
        if found and found[-1][1:] == (first, scale):
            first, *_ = found.pop()
        found.append((first, part.stop, scale))
    return found


def _write_a(target: AdapterTarget, parts: Sequence[MemoryPart], values: Tensor, row: Tensor) -> None:
    """Write this process's share of A [rank, in] to each part of a row."""
    share = target.columns(values)
    for part in parts:
        part.of(row).copy_(share)


def _write_b(target: AdapterTarget, parts: Sequence[MemoryPart], scale: float, values: Tensor, row: Tensor) -> None:
    """Write this process's share of B [out, rank] times ``scale`` to parts of a row, rounded once."""
    wide = values if values.dtype == row.dtype else values.float()
    shares = [share for _, _, share in target.rows(wide * scale)]
    for part, share in zip(parts, shares, strict=True):
        part.of(row).copy_(share)


def pairs_of(folder: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each adapted module, by the module's name in the base model."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = NAME.fullmatch(name)
        if match is None:
            causes = [f" ({cause})" for part, cause in OTHERS.items() if part in name]
            cause = causes[0] if causes else ""
            raise adapter_refusal(folder, f"tensor {shown(name)} is not adapted{cause}: {HINT}")
        pair = found.setdefault(match["module"], {})
        if match["which"] in pair:
            what = f"{shown(pair[match['which']])} and {shown(name)} are the same weight"
            raise adapter_refusal(folder, f"{what}; expected each weight once")
        pair[match["which"]] = name
    if not found:
        raise adapter_refusal(folder, f"its file of weights has no tensors: {HINT}")
    for module, pair in found.items():
        if len(pair) < 2:
            (which,) = pair
            raise adapter_refusal(folder, f"{brief(module)} has lora_{which} alone; expected lora_A and lora_B")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _check(source: AdapterSource, module: str, target: AdapterTarget, settings: LoraSettings, a: str, b: str) -> None:
    """Compare the shapes of the tensors ``a`` and ``b`` with the layer.  RequestError if they differ."""
    rank = settings.rank_of(module)
    shapes = {a: (rank, target.inputs), b: (target.outputs, rank)}
    for name, expected in shapes.items():
        shape = source.shape(name)
        if shape != expected:
            which = "A" if name == a else "B"
            what = f"{brief(module)}.lora_{which} has shape {list(shape)}, expected {list(expected)}"
            cause = "it was trained on another model, or adapter_config.json belongs to other weights"
            raise adapter_refusal(source.folder, f"{what}; {cause}")
