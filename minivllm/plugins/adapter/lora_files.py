"""The weights of a LoRA folder, and their places in memory.

    file      lora_A [rank, in] and lora_B [out, rank] of each module
    memory    row [size]:  A [parts, rank, in] of all served layers, then B [out, rank] of all, times the scales

A ``ReadPlan`` says which numbers of the file go where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import AdaptedModel, AdapterSource, AdapterTarget, adapter_refusal
from minivllm.errors import shown

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
        a = rows[..., self.first_a : self.first_a + self.parts * self.rank * self.inputs]
        b = rows[..., self.first_b : self.first_b + self.outputs * self.rank]
        return a.unflatten(-1, (self.parts, self.rank, self.inputs)), b.unflatten(-1, (self.outputs, self.rank))


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def places_of(infos: Mapping[str, ModuleInfo], rank: int) -> tuple[dict[str, Place], int]:
    """Return the places of layers in a row of the arena by the names of layers, and the number of elements of a row."""
    first_a, end = [], 0
    for info in infos.values():
        first_a.append(end)
        end += _aligned(len(info.parts) * rank * info.in_features)
    places = {}
    for number, ((name, info), first) in enumerate(zip(infos.items(), first_a, strict=True)):
        places[name] = Place(number, len(info.parts), rank, info.in_features, info.out_features, first, end)
        end += _aligned(info.out_features * rank)
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
        return row[self.first : self.stop].view(self.rows, self.stride)[:, : self.width]


Conversion = Callable[[Tensor, Tensor], None]  # writes a tensor of the file to a row [size] of the arena


class ReadPlan(NamedTuple):
    """The copies and conversions that read a LoRA folder into a row of the arena, for folders with equal layouts and
    settings.
    """

    layout: bytes
    settings: LoraSettings
    ranks: Tensor  # i32 [layers]
    copies: Sequence[tuple[str, int, MemoryPart]]  # (name of a tensor, index of its first copied element, destination)
    # (first, stop, factor): elements of the row that are multiplied after the copies
    scales: Sequence[tuple[int, int, float]]
    # (name of a tensor, function that writes it), for tensors in another dtype or order
    conversions: Sequence[tuple[str, Conversion]]
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
    copies: list[tuple[str, int, MemoryPart]] = []
    conversions: list[tuple[str, Conversion]] = []
    scaled: list[tuple[MemoryPart, float]] = []
    numbers: dict[int, int] = {}  # number of elements of each written matrix, by the index of its first element
    for module, (a, b) in pairs_of(source.folder, source.names).items():
        if why := settings.targets.refusal(module):
            raise adapter_refusal(source.folder, f"{module} has weights, but {why}: {DROP}")
        target = source.target(module)
        _check(source, module, target, settings, a, b)
        rank, scale, place = settings.rank_of(module), settings.scale_of(module), places[target.layer]
        ranks[place.number] = max(int(ranks[place.number]), rank)
        first_parts = list(_parts_of_a(target, place, model.layers[target.layer].info, rank))
        shares = list(_parts_of_b(target, place, rank))
        numbers |= {part.first: part.rows * part.width for part in (*first_parts, *(part for part, _ in shares))}
        if target.inputs == place.inputs:
            copies += [(a, 0, part) for part in first_parts]
        else:
            conversions.append((a, partial(_write_a, target, first_parts)))
        if source.tensor(b).dtype == dtype and all(_consecutive(share) for _, share in shares):
            copies += [(b, int(share[0]) * rank, part) for part, share in shares]
            scaled += [(part, scale) for part, _ in shares]
        else:
            conversions.append((b, partial(_write_b, target, [part for part, _ in shares], scale)))
    scales = _merged(sorted(scaled))
    return ReadPlan(source.layout, settings, ranks, copies, scales, conversions, sum(numbers.values()))


def _parts_of_a(target: AdapterTarget, place: Place, info: ModuleInfo, rank: int) -> Iterator[MemoryPart]:
    """Yield the memory for A of each part of the layer that a target of the adapter changes."""
    names = [part for part, _ in info.parts]
    for part in target.parts:
        first = place.first_a + names.index(part) * place.rank * place.inputs
        yield MemoryPart(first, rank, place.inputs, place.inputs)


def _parts_of_b(target: AdapterTarget, place: Place, rank: int) -> Iterator[tuple[MemoryPart, Tensor]]:
    """Yield the memory for B of each part of a target, and the indices i64 [rows] of the target's outputs that it
    holds.
    """
    for _, rows, share in target.rows(torch.arange(target.outputs)):
        yield MemoryPart(place.first_b + rows.start * place.rank, len(share), rank, place.rank), share


def _consecutive(numbers: Tensor) -> bool:
    """Return whether numbers i64 [n] ascend in steps of 1."""
    return bool((numbers.diff() == 1).all())


def _merged(parts: Sequence[tuple[MemoryPart, float]]) -> list[tuple[int, int, float]]:
    """Return (first, stop, scale) for parts in ascending order; neighbouring parts with an equal scale are joined."""
    found: list[tuple[int, int, float]] = []
    for part, scale in parts:
        if found and found[-1][1:] == (part.first, scale):
            found[-1] = found[-1][0], part.stop, scale
        else:
            found.append((part.first, part.stop, scale))
    return found


def _write_a(target: AdapterTarget, parts: Sequence[MemoryPart], values: Tensor, row: Tensor) -> None:
    """Write this process's share of A [rank, in] to each part of a row."""
    for part in parts:
        part.of(row).copy_(target.columns(values))


def _write_b(target: AdapterTarget, parts: Sequence[MemoryPart], scale: float, values: Tensor, row: Tensor) -> None:
    """Write this process's share of B [out, rank] times ``scale`` to parts of a row, rounded once."""
    wide = values if values.dtype == row.dtype else values.float()
    for part, (_, _, share) in zip(parts, target.rows(wide * scale), strict=True):
        part.of(row).copy_(share)


def pairs_of(folder: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each adapted module, by the module's name in the base model."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = NAME.fullmatch(name)
        if match is None:
            what = next((what for part, what in OTHERS.items() if part in name), "")
            raise adapter_refusal(folder, f"tensor {shown(name)} is not adapted{what and f' ({what})'}: {HINT}")
        pair = found.setdefault(match["module"], {})
        if match["which"] in pair:
            what = f"{shown(pair[match['which']])} and {shown(name)} are the same weight"
            raise adapter_refusal(folder, f"{what}; expected each weight once")
        pair[match["which"]] = name
    if not found:
        raise adapter_refusal(folder, f"its file of weights has no tensors: {HINT}")
    for module, pair in found.items():
        if len(pair) < 2:
            raise adapter_refusal(folder, f"{module} has lora_{next(iter(pair))} alone; expected lora_A and lora_B")
    return {module: (pair["A"], pair["B"]) for module, pair in found.items()}


def _check(source: AdapterSource, module: str, target: AdapterTarget, settings: LoraSettings, a: str, b: str) -> None:
    """Compare the shapes of the tensors ``a`` and ``b`` with the layer.  RequestError if they differ."""
    rank = settings.rank_of(module)
    for which, name, expected in (("A", a, (rank, target.inputs)), ("B", b, (target.outputs, rank))):
        shape = source.shape(name)
        if shape != expected:
            raise adapter_refusal(
                source.folder,
                f"{module}.lora_{which} has shape {list(shape)}, expected {list(expected)}; it was trained on another "
                "model, or adapter_config.json belongs to other weights",
            )
