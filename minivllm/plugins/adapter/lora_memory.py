"""The memory of LoRA: y += (x A^T) B^T with the A and B of each token's adapter.

    arena [places, size]     a row for each adapter on the device: A and B of all linear layers, one after another
      A  [parts, rank, in]     of the parts of a merged layer, such as q, k and v, each with an A of its own
      B  [out, rank]           times the scale of the adapter
    tokens i32 [T]           place of the adapter of each token of the step, -1 for none

A layer reads only the first ``ranks[place]`` rows of A and columns of B.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import (
    AdaptedModel,
    AdapterMemory,
    AdapterSource,
    AdapterTarget,
    LayerChange,
    LowRank,
    adapter_refusal,
)
from minivllm.device.layers.invariant import FixedRows
from minivllm.device.layers.module import all_finite
from minivllm.errors import shown

from .lora_config import LoraSettings, read_settings

if TYPE_CHECKING:
    from minivllm.core.interfaces.quantizer import ModuleInfo

NAME = re.compile(r"(base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(\.default)?\.weight")
# other tensors of an adapter -> the field of adapter_config.json to which they belong
OTHERS = {
    "lora_embedding_": "trained embeddings",
    "lora_magnitude_vector": "use_dora=true",
    "lora_B.bias": "lora_bias=true",
    "modules_to_save": "modules_to_save",
}
ALIGNED = 128  # numbers; A and B of each layer begin at a multiple
ASIDE = 64  # tokens of a captured step up to which x A^T is computed on a second stream
LEAST_RANK = 16  # the least rank in memory, since tensor cores multiply 16 columns at a time


class Place(NamedTuple):
    """The place of a layer's A and B in a row of the arena."""

    number: int  # the layer's number among all linear layers
    parts: int
    rank: int  # of the memory
    inputs: int
    outputs: int
    first_a: int
    first_b: int

    @property
    def end(self) -> int:
        """Return the first number behind A and B."""
        return self.first_b + _aligned(self.outputs * self.rank)

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return A [..., parts, rank, in] and B [..., out, rank] in rows [..., size] of an arena."""
        a = rows[..., self.first_a : self.first_a + self.parts * self.rank * self.inputs]
        b = rows[..., self.first_b : self.first_b + self.outputs * self.rank]
        return a.unflatten(-1, (self.parts, self.rank, self.inputs)), b.unflatten(-1, (self.outputs, self.rank))


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED


def place_of(number: int, info: ModuleInfo, rank: int, first: int) -> Place:
    """Return the place of a layer whose A begins at ``first``."""
    inputs, parts = info.in_features, len(info.parts)
    return Place(number, parts, rank, inputs, info.out_features, first, first + _aligned(parts * rank * inputs))


class HostAdapter(NamedTuple):
    """An adapter in host memory: a row of the arena [size], and the rank of each layer i32 [layers]."""

    weights: Tensor
    ranks: Tensor


class LinearAdapter:
    """Adds the products of the adapters on the device to the output of one linear layer."""

    def __init__(self, memory: LoraMemory, info: ModuleInfo, place: Place) -> None:
        self.memory, self.place = memory, place
        self.rows = [info.rows[name] for name, _ in info.parts]
        self.a, self.b = place.views(memory.arena)
        # products whose bits do not depend on the number of rows, by place on the device
        self.fixed: dict[int, tuple[FixedRows, list[FixedRows]]] = {}
        self.kernel: Any = None
        if memory.kernels:
            from .triton_lora import LoraProduct

            starts = [rows.start for rows in self.rows]
            self.kernel = LoraProduct(self.a, self.b, place.number, starts)

    def __call__(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return product(x) [T, out] plus the products of the adapters for x [T, in]."""
        if self.kernel is None:
            return self._add(x, product(x))
        groups, aside = self.memory.groups, self.memory.aside
        if aside is None:
            return self.kernel(x, product(x), groups)
        stream = torch.cuda.current_stream()
        aside.wait_stream(stream)
        with torch.cuda.stream(aside):
            inner = self.kernel.shrink(x, groups)
        y = product(x)
        stream.wait_stream(aside)
        return self.kernel.expand(inner, y, groups)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the products of the adapters for x [T, in] to y [T, out] in place without kernels, and return y."""
        for adapter, index in self.memory.groups:
            if self.memory.host_ranks[adapter][self.place.number]:
                added = self._product(adapter, x if index is None else x[index])
                y = y.add_(added) if index is None else y.index_add_(0, index, added)
        return y

    def _product(self, adapter: int, x: Tensor) -> Tensor:
        """Return the product [n, out] of one adapter's A and B for x [n, in]."""
        if self.memory.invariant:
            shrink, expand = self._fixed_of(adapter)
            pieces = shrink(x).chunk(self.place.parts, dim=1)
            return torch.cat([product(piece) for product, piece in zip(expand, pieces, strict=True)], dim=1)
        rank = self.memory.host_ranks[adapter][self.place.number]
        a, b = self.a[adapter, :, :rank], self.b[adapter, :, :rank]
        pieces = torch.mm(x, a.flatten(0, 1).t()).chunk(self.place.parts, dim=1)
        added = [torch.mm(piece, b[rows].t()) for piece, rows in zip(pieces, self.rows, strict=True)]
        return added[0] if len(added) == 1 else torch.cat(added, dim=1)

    def _fixed_of(self, adapter: int) -> tuple[FixedRows, list[FixedRows]]:
        """Return the batch-invariant products of A, and of the part of B for each part of the layer."""
        if adapter not in self.fixed:
            a, b = self.a[adapter].flatten(0, 1), self.b[adapter]
            self.fixed[adapter] = FixedRows(a), [FixedRows(b[rows].contiguous()) for rows in self.rows]
        return self.fixed[adapter]


class LoraMemory(AdapterMemory):
    """The adapters on a device, and the adapter of each token of the running step."""

    def __init__(self, model: AdaptedModel, places: int, max_rank: int) -> None:
        """Allocate memory for ``places`` adapters of all linear layers of ``model``."""
        self.model, self.max_rank = model, max_rank
        self.invariant = model.batch_invariant
        self.kernels = runs_kernels(model.device)
        rank = -(-max_rank // LEAST_RANK) * LEAST_RANK
        self.places: dict[str, Place] = {}
        end = 0
        for name, layer in model.layers.items():
            place = place_of(len(self.places), layer.info, rank, end)
            self.places[name], end = place, place.end
        self.arena = torch.zeros(places, max(end, 1), dtype=model.dtype, device=model.device)
        self.ranks = torch.zeros(places, max(len(self.places), 1), dtype=torch.int32, device=model.device)
        self.host_ranks = [[0] * len(self.places) for _ in range(places)]
        # a second stream on which captured steps of few tokens compute x A^T next to the product of the layer
        self.aside: Any = None
        self._aside: Any = None
        # the tokens of the step by adapter: a ``TokenGroups`` for the kernels; without them the places, each with the
        # i64 numbers of its tokens, None for all tokens
        self.groups: Any = []
        self.changes = {name: LinearAdapter(self, model.layers[name].info, at) for name, at in self.places.items()}

    def layer(self, name: str) -> LayerChange:
        return self.changes[name]

    def low_rank(self, name: str) -> LowRank:
        change = self.changes[name]
        return LowRank(change.a, change.b, self.ranks[:, change.place.number])

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def read(self, source: AdapterSource) -> HostAdapter:
        folder = source.folder
        settings = read_settings(folder, source.config, self.max_rank)
        loaded = HostAdapter(
            self.model.zeros(self.arena.shape[1], self.arena.dtype),
            self.model.zeros(len(self.places), torch.int32),
        )
        for module, (a, b) in _pairs(folder, source.names).items():
            target = source.target(module)
            _check(source, module, target, settings, a, b)
            self._fill(target, source.tensor(a), source.tensor(b), settings.scale_of(module), loaded)
        if not all_finite(loaded.weights, self.arena.dtype):  # products of all adapters of a step share their sums
            dtype = str(self.arena.dtype).removeprefix("torch.")
            raise adapter_refusal(folder, f"its weights, with their scale, are not all finite numbers in {dtype}")
        return loaded

    def _fill(self, target: AdapterTarget, a: Tensor, b: Tensor, scale: float, loaded: HostAdapter) -> None:
        """Write this process's share of A [rank, in] and of B [out, rank] times ``scale`` to a row of the arena."""
        place, rank = self.places[target.layer], len(a)
        to_a, to_b = place.views(loaded.weights)
        numbers = [part for part, _ in self.model.layers[target.layer].info.parts]
        a = target.columns(a)
        # torch multiplies numbers of 16 bits by a number in float32, and rounds once
        scaled = b * scale if b.dtype == self.arena.dtype else b.float() * scale
        for part, rows, share in target.rows(scaled):
            to_a[numbers.index(part), :rank] = a
            to_b[rows, :rank] = share
        loaded.ranks[place.number] = max(int(loaded.ranks[place.number]), rank)

    def store(self, place: int, loaded: HostAdapter) -> None:
        weights, ranks = loaded
        self.arena[place].copy_(weights, non_blocking=True)
        self.ranks[place, : len(ranks)].copy_(ranks, non_blocking=True)
        self.host_ranks[place] = ranks.tolist()
        for change in self.changes.values():
            change.fixed.pop(place, None)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin(self, tokens: Tensor) -> None:
        if self.kernels:
            from .triton_lora import group

            self.groups = group(tokens, self.ranks, self.invariant)
            self.aside = self._second_stream(tokens)
        else:
            self.groups = _groups_of(tokens)

    def end(self) -> None:
        self.groups, self.aside = [], None

    def _second_stream(self, tokens: Tensor) -> Any:
        """Return the second stream for a captured step of few tokens i32 [T], else None: without a capture, two more
        launches cost more time than the second stream saves."""
        if len(tokens) > ASIDE or tokens.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            return None
        if self._aside is None:
            self._aside = torch.cuda.Stream(tokens.device)
        return self._aside


def runs_kernels(device: Any) -> bool:
    """Return whether the Triton kernels apply adapters on a device."""
    return torch.device(device).type == "cuda"


def _groups_of(tokens: Tensor) -> list[tuple[int, Tensor | None]]:
    """Return the adapters of a step on a CPU, each with the numbers of its tokens; None stands for all tokens."""
    found = [place for place in tokens.unique().tolist() if place >= 0]
    if len(found) == 1 and bool((tokens >= 0).all()):
        return [(found[0], None)]
    return [(place, (tokens == place).nonzero().flatten()) for place in found]


def _pairs(folder: str, names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each adapted module, by the module's name in the base model."""
    found: dict[str, dict[str, str]] = {}
    for name in names:
        match = NAME.fullmatch(name)
        if match is None:
            what = next((what for part, what in OTHERS.items() if part in name), "")
            raise adapter_refusal(folder, f"tensor {shown(name)} is not adapted{what and f' ({what})'}")
        pair = found.setdefault(match["module"], {})
        if match["which"] in pair:
            what = f"{shown(pair[match['which']])} and {shown(name)} are the same weight"
            raise adapter_refusal(folder, f"{what}; expected each weight once")
        pair[match["which"]] = name
    if not found:
        raise adapter_refusal(folder, "its file of weights has no tensors")
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
