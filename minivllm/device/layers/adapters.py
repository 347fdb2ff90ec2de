"""Adapters (LoRA) of linear layers: y += (x A^T) B^T with the A and B of each token's adapter.

    arena [places, size]     a row for each adapter on the device: A and B of all linear layers, one after another
      A  [parts, rank, in]     of the parts of a merged layer, such as q, k and v, each with an A of its own
      B  [out, rank]           times the scale of the adapter
    tokens i32 [T]           place of the adapter of each token of the step, -1 for none

A layer reads only the first ``ranks[place]`` rows of A and columns of B.  If no row of a step has an adapter,
``AdapterMemory.tokens`` is None, and the layers run as if there were no adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .invariant import FixedRows
from .linear import Linear

if TYPE_CHECKING:
    from minivllm.core.interfaces.quantizer import ModuleInfo

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


class LinearAdapter:
    """The adapters of one linear layer."""

    def __init__(self, memory: AdapterMemory, info: ModuleInfo, place: Place) -> None:
        self.memory, self.place = memory, place
        self.rows = [info.rows[name] for name, _ in info.parts]
        self.a, self.b = place.views(memory.arena)
        # products whose bits do not depend on the number of rows, by place on the device
        self.fixed: dict[int, tuple[FixedRows, list[FixedRows]]] = {}
        self.kernel: Any = None
        if memory.kernels:
            from minivllm.device.kernels.lora import LoraProduct

            starts = [rows.start for rows in self.rows]
            self.kernel = LoraProduct(self.a, self.b, place.number, starts)

    @property
    def on(self) -> bool:
        """Return whether a row of the running step has an adapter."""
        return self.memory.tokens is not None

    def added_to(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return product(x) [T, out] plus the products of the adapters for x [T, in]."""
        if not self.on:
            return product(x)
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


class AdapterMemory:
    """The adapters on a device, and the adapter of each token of the running step."""

    def __init__(
        self, modules: Mapping[str, Any], places: int, max_rank: int, dtype: torch.dtype, device: Any, invariant: bool
    ) -> None:
        """Allocate memory for ``places`` adapters, and attach it to all linear layers of ``modules``."""
        self.invariant = invariant
        self.kernels = runs_kernels(device)
        rank = -(-max_rank // LEAST_RANK) * LEAST_RANK
        self.modules = {name: module for name, module in modules.items() if type(module) is Linear}
        self.places: dict[str, Place] = {}
        end = 0
        for name, module in self.modules.items():
            place = place_of(len(self.places), module.info, rank, end)
            self.places[name], end = place, place.end
        self.size = end
        self.arena = torch.zeros(places, max(end, 1), dtype=dtype, device=device)
        self.ranks = torch.zeros(places, max(len(self.places), 1), dtype=torch.int32, device=device)
        self.host_ranks = [[0] * len(self.places) for _ in range(places)]
        self.tokens: Tensor | None = None
        # a second stream on which captured steps of few tokens compute x A^T next to the product of the layer
        self.aside: Any = None
        self._aside: Any = None
        # the tokens of the step by adapter: a ``TokenGroups`` for the kernels; without them the places, each with the
        # i64 numbers of its tokens, None for all tokens
        self.groups: Any = []
        for name, place in self.places.items():
            module = self.modules[name]
            module.adapter = LinearAdapter(self, module.info, place)

    def store(self, place: int, weights: Tensor, ranks: Tensor) -> None:
        """Copy an adapter to a place: weights [size] as a row of the arena, ranks i32 [layers].

        The tensors are on the host.  They are pinned for a GPU, so that the copy does not block the host."""
        self.arena[place].copy_(weights, non_blocking=True)
        self.ranks[place, : len(ranks)].copy_(ranks, non_blocking=True)
        self.host_ranks[place] = ranks.tolist()
        for module in self.modules.values():
            module.adapter.fixed.pop(place, None)

    @contextlib.contextmanager
    def step(self, tokens: Tensor) -> Iterator[None]:
        """Apply adapters in the layers of a step; ``tokens`` i32 [T] are the places of its tokens."""
        self.tokens = tokens
        if self.kernels:
            from minivllm.device.kernels.lora import group

            self.groups = group(tokens, self.ranks, self.invariant)
            self.aside = self._second_stream(tokens)
        else:
            self.groups = _groups_of(tokens)
        try:
            yield
        finally:
            self.tokens, self.groups, self.aside = None, [], None

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
