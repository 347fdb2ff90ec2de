"""The memory of LoRA: y += (x A^T) B^T with the A and B of each token's adapter.

    arena [places, size]     a row for each adapter on the device: A of all linear layers, then B of all
      A  [parts, rank, in]     of the parts of a merged layer, such as q, k and v, each with an A of its own
      B  [out, rank]           times the scale of the adapter
    tokens i32 [T]           place of the adapter of each token of the step, -1 for none

A layer reads only the first ``ranks[place]`` rows of A and columns of B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import (
    AdaptedModel,
    AdapterMemory,
    AdapterSource,
    LayerChange,
    LowRank,
    TensorCopy,
    adapter_refusal,
)
from minivllm.device.layers.invariant import FixedRows
from minivllm.device.layers.module import all_finite

from .lora_config import LoraSettings, read_settings
from .lora_files import Place, ReadPlan, make_plan, places_of
from .staging import Staging

if TYPE_CHECKING:
    from minivllm.core.interfaces.quantizer import ModuleInfo

ASIDE = 64  # tokens of a captured step up to which x A^T is computed on a second stream
RESERVED = 512 << 20  # bytes of host memory that are allocated before the first load
PLANS = 8  # number of ``ReadPlan`` that are kept for later adapters
LEAST_RANK = 16  # the least rank in memory, since tensor cores multiply 16 columns at a time


class HostAdapter(NamedTuple):
    """An adapter in host memory: a row of the arena [size], and the rank of each layer i32 [layers]."""

    weights: Tensor
    ranks: Tensor


class Ahead(NamedTuple):
    """The products of A of the next layer, which the kernel that computes the layer's input has computed too."""

    of: LinearAdapter
    x: Tensor  # the input of the layer [T, in]
    inner: Tensor  # f32 [splits, parts, T, rank] the products of x and A; the sum over the splits is complete


class LinearAdapter:
    """Adds the products of the adapters on the device to the output of one linear layer."""

    def __init__(self, memory: LoraMemory, info: ModuleInfo, place: Place) -> None:
        self.memory, self.place = memory, place
        self.rows = [info.rows[name] for name, _ in info.parts]
        self.a, self.b = place.views(memory.arena)
        # place (slot) of an adapter on the device -> its products whose bits do not depend on the number of tokens
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
        return self.kernel.expand(*self._products(product, x), self.memory.groups)

    def _products(self, product: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Any, Tensor]:
        """Return the products of A for x [T, in] as ``LoraProduct.shrink``, and product(x) [T, out]."""
        ahead = self.memory.ahead
        self.memory.ahead = None
        if ahead is not None and ahead.of is self and ahead.x is x:
            return ahead.inner, product(x)
        groups = self.memory.groups
        aside = self.memory.aside
        if aside is None:
            y = product(x)
            return self.kernel.shrink(x, groups), y
        stream = torch.cuda.current_stream()
        aside.wait_stream(stream)
        with torch.cuda.stream(aside):
            inner = self.kernel.shrink(x, groups)
        y = product(x)
        stream.wait_stream(aside)
        return inner, y

    def gated(
        self, product: Callable[[Tensor], Tensor], x: Tensor, activation: str, following: LinearAdapter | None
    ) -> Tensor | None:
        """Return activation(gate) * up [T, n] of the changed product [T, 2 n] = gate | up for x [T, in], None if no
        kernel behind the product computes it.

        ``following`` is the change of the layer that reads the result; the kernel may compute its products of A too."""
        if self.kernel is None or self.memory.groups.few or not self.kernel.gates:
            return None
        from .triton_merged import gated

        inner, y = self._products(product, x)
        after = None if following is None else following.kernel
        out, ahead = gated(self.kernel, after, inner, y, activation, self.memory.groups)
        if following is not None and ahead is not None:
            self.memory.ahead = Ahead(following, out, ahead)
        return out

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
        self.places, end = places_of({name: layer.info for name, layer in model.layers.items()}, rank)
        self.arena = torch.zeros(places, max(end, 1), dtype=model.dtype, device=model.device)
        self.ranks = torch.zeros(places, max(len(self.places), 1), dtype=torch.int32, device=model.device)
        self.host_ranks = [[0] * len(self.places) for _ in range(places)]
        self._plans: list[ReadPlan] = []
        self.staging = Staging(max(end, 1), model.dtype, model.device) if model.device.type == "cuda" else None
        # a second stream on which captured steps of few tokens compute x A^T next to the product of the layer
        self.aside: Any = None
        self._aside: Any = None
        # the tokens of the step by adapter: a ``TokenGroups`` for the kernels; without kernels a list of (place of the
        # adapter, i64 indices of its tokens or None for all tokens)
        self.groups: Any = []
        self.ahead: Ahead | None = None
        self.changes = {name: LinearAdapter(self, model.layers[name].info, at) for name, at in self.places.items()}

    def layer(self, name: str) -> LayerChange:
        return self.changes[name]

    def low_rank(self, name: str) -> LowRank:
        change = self.changes[name]
        return LowRank(change.a, change.b, self.ranks[:, change.place.number])

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        size = self.arena[0].nbytes
        count = min(len(self.arena), max(1, RESERVED // size)) if self.model.device.type == "cuda" else 0
        kept = [self.model.empty(self.arena.shape[1], self.arena.dtype) for _ in range(count)]
        del kept  # the allocator keeps the freed memory, and later calls of ``empty`` return it

    def read(self, source: AdapterSource) -> HostAdapter:
        folder, size = source.folder, self.arena.shape[1]
        plan = self._plan(source, read_settings(folder, source.config, self.max_rank))
        weights = self.model.empty(size, self.arena.dtype)
        if plan.numbers < size:
            weights.zero_()
        source.read([TensorCopy(name, first, part.of(weights)) for name, first, part in plan.copies])
        for name, convert in plan.conversions:
            convert(source.tensor(name), weights)
        for first, stop, scale in plan.scales:
            # Weights of 16 bits need no copy in float32: torch computes their product with a Python number in float32
            # and rounds it once.
            if scale != 1.0:
                weights[first:stop].mul_(scale)
        # A weight that is not finite would spoil the results of other adapters' tokens, because the products of all
        # adapters of a step are added up in common sums.
        if not all_finite(weights, self.arena.dtype):
            dtype = str(self.arena.dtype).removeprefix("torch.")
            raise adapter_refusal(folder, f"its weights, with their scale, are not all finite numbers in {dtype}")
        if self.staging is not None:
            self.staging.put(weights)
        return HostAdapter(weights, plan.ranks)

    def _plan(self, source: AdapterSource, settings: LoraSettings) -> ReadPlan:
        """Return how to read a folder.  Folders with equal layouts and settings share a plan, because it takes longer
        than the read."""
        for plan in self._plans:
            if plan.layout == source.layout and plan.settings == settings:
                return plan
        plan = make_plan(source, settings, self.model, self.places, self.arena.dtype)
        self._plans = [plan, *self._plans[: PLANS - 1]]
        return plan

    def store(self, place: int, loaded: HostAdapter) -> None:
        weights, ranks = loaded
        if self.staging is None or not self.staging.take(weights, self.arena[place]):
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
        self.groups = []
        self.aside = None
        self.ahead = None

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
    """Return (place of an adapter, indices of its tokens in the step or None for all tokens) for each adapter."""
    found = [place for place in tokens.unique().tolist() if place >= 0]
    if len(found) == 1 and bool((tokens >= 0).all()):
        return [(found[0], None)]
    return [(place, (tokens == place).nonzero().flatten()) for place in found]
