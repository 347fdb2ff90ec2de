"""The memory of LoRA: y += (x A^T) B^T with the A and B of each token's adapter.

    arena [places, size]     a row for each adapter on the device: A of all linear layers, then B of all
      A  [parts, rank, in]     of the parts of a merged layer, such as q, k and v, each with an A of its own
      B  [out, rank]           times the scale of the adapter
    rows [places * parts * rank, in]   a copy of A behind an unquantized weight, for steps of few tokens: the product of
                             the weight computes x A^T of all adapters too
    tokens i32 [T]           place of the adapter of each token of the step, -1 for none

A layer reads only the first ``ranks[place]`` rows of A and columns of B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.adapter import (
    AdaptedLayer,
    AdaptedModel,
    AdapterMemory,
    AdapterSource,
    ExtendedWeight,
    LayerChange,
    LowRank,
    NeededRows,
    TensorCopy,
    adapter_refusal,
)
from minivllm.device.layers.invariant import FixedRows
from minivllm.device.layers.module import all_finite
from minivllm.device.loading.pieces import PIECE, in_threads

from .lora_config import LoraSettings, padded_rank, read_settings
from .lora_files import Place, ReadPlan, Scaled, make_plan, places_of
from .staging import Staging

ASIDE = 64  # tokens of a captured step up to which x A^T is computed on a second stream
RESERVED = 2 << 30  # largest number of bytes of host memory that are allocated before the first load
PLANS = 8  # number of ``ReadPlan`` that are kept for later adapters


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

    def __init__(self, memory: LoraMemory, layer: AdaptedLayer, place: Place) -> None:
        info = layer.info
        self.memory = memory
        self.extended = layer.extended if memory.kernels else None
        self.place = place
        self.rows = [info.rows[name] for name, _ in info.parts]
        self.a, self.b = place.views(memory.arena)
        # copies of A of each adapter behind the weight [places, parts * rank, in]
        self.behind: Tensor | None = None
        if self.extended is not None:
            self.behind = self.extended.rows.unflatten(0, (len(self.a), -1))
            self.extended.renew = partial(self.behind.copy_, self.a.flatten(1, 2))
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
        extended = self._extending(product)
        if extended is not None:
            from .triton_extended import expand_behind

            y = extended(x, self._needed())
            return expand_behind(self.kernel, y, self.memory.groups)
        inner, y = self._products(product, x)
        return self.kernel.expand(inner, y, self.memory.groups)

    def _extending(self, product: Callable[[Tensor], Tensor]) -> ExtendedWeight | None:
        """Return the extended weight whose call computes ``product`` and the products of A, None if there is none or
        the step has many tokens."""
        extended = self.extended
        if extended is not None and self.memory.groups.few and extended.extends(product):
            return extended
        return None

    def _needed(self) -> NeededRows:
        """Return the rows of A behind the weight up to those of the last place that a token of the step uses."""
        each = self.kernel.parts * self.kernel.rank
        return NeededRows(self.memory.groups.used, each)

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
        kernel = self.kernel
        groups = self.memory.groups
        if kernel is None or not kernel.gates:
            return None
        extended = self._extending(product)
        if extended is not None:
            from .triton_extended import gate_behind

            y = extended(x, self._needed())
            return gate_behind(kernel, y, activation, groups)
        if groups.few:
            return None
        from .triton_merged import gated

        inner, y = self._products(product, x)
        after = None if following is None else following.kernel
        out, ahead = gated(kernel, after, inner, y, activation, groups)
        if following is not None and ahead is not None:
            self.memory.ahead = Ahead(following, out, ahead)
        return out

    def divides(self, product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
        """Return whether ``divided`` computes the changed product of x [T, in].

        Values of x that are not divided yet may overflow float16."""
        return x.dtype != torch.float16 and self._extending(product) is not None

    def divided(
        self, product: Callable[[Tensor], Tensor], x: Tensor, squares: Tensor, eps: float, activation: str | None
    ) -> Tensor:
        """Return the changed product as ``LayerAdapters.divided``, where ``divides`` holds."""
        extended = self._extending(product)
        assert extended is not None
        from .triton_extended import Sums, expand_behind, gate_behind

        sums = None
        if extended.fits(x):
            y = extended.divided(x, squares, eps, self._needed())
        else:
            y = extended(x)
            sums = Sums(squares, x.shape[1], eps)
        groups = self.memory.groups
        if activation is None:
            return expand_behind(self.kernel, y, groups, sums)
        if not self.kernel.gates:  # gate | up are one part, with one A for both
            from minivllm.device.kernels.activation import gate_mul

            y = expand_behind(self.kernel, y, groups, sums)
            return gate_mul(y, activation=activation)
        return gate_behind(self.kernel, y, activation, groups, sums)

    def added(
        self, product: Callable[[Tensor], Tensor], x: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Add the changed product to ``residual`` as ``LayerAdapters.added``."""
        extended = self._extending(product)
        if extended is None:
            return None
        from .triton_extended import add_behind

        y = extended(x, self._needed())
        return add_behind(self.kernel, y, residual, weight, self.memory.groups)

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the products of the adapters for x [T, in] to y [T, out] in place without kernels, and return y."""
        for adapter, index in self.memory.groups:
            rank = self.memory.host_ranks[adapter][self.place.number]
            if not rank:
                continue
            if index is None:
                y = y.add_(self._product(adapter, rank, x))
            else:
                added = self._product(adapter, rank, x[index])
                y = y.index_add_(0, index, added)
        return y

    def _product(self, adapter: int, rank: int, x: Tensor) -> Tensor:
        """Return the product [n, out] of one adapter's A and B, of the rank ``rank``, for x [n, in]."""
        if self.memory.invariant:
            return self._fixed_product(adapter, x)
        a = self.a[adapter, :, :rank].flatten(0, 1)
        b = self.b[adapter, :, :rank]
        inner = torch.mm(x, a.t())
        pieces = inner.chunk(self.place.parts, dim=1)
        outputs = []
        for piece, rows in zip(pieces, self.rows, strict=True):
            output = torch.mm(piece, b[rows].t())
            outputs.append(output)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _fixed_product(self, adapter: int, x: Tensor) -> Tensor:
        """Return the batch-invariant product [n, out] of one adapter's A and B for x [n, in]."""
        shrink, expand = self._fixed_of(adapter)
        pieces = shrink(x).chunk(self.place.parts, dim=1)
        outputs = [product(piece) for product, piece in zip(expand, pieces, strict=True)]
        return torch.cat(outputs, dim=1)

    def _fixed_of(self, adapter: int) -> tuple[FixedRows, list[FixedRows]]:
        """Return the batch-invariant products of A, and of the part of B for each part of the layer."""
        if adapter not in self.fixed:
            shrink = FixedRows(self.a[adapter].flatten(0, 1))
            b = self.b[adapter]
            weights = [b[rows].contiguous() for rows in self.rows]
            expand = [FixedRows(weight) for weight in weights]
            self.fixed[adapter] = shrink, expand
        return self.fixed[adapter]


class LoraMemory(AdapterMemory):
    """The adapters on a device, and the adapter of each token of the running step."""

    def __init__(self, model: AdaptedModel, places: int, max_rank: int) -> None:
        """Allocate memory for ``places`` adapters of all linear layers of ``model``."""
        self.model = model
        self.max_rank = max_rank
        self.invariant = model.batch_invariant
        device = model.device
        self.kernels = runs_kernels(device)
        rank = padded_rank(max_rank)
        infos = {name: layer.info for name, layer in model.layers.items()}
        self.places, end = places_of(infos, rank)
        layers = len(self.places)
        self.size = max(end, 1)  # of a row
        self.arena = torch.zeros(places, self.size, dtype=model.dtype, device=device)
        self.ranks = torch.zeros(places, max(layers, 1), dtype=torch.int32, device=device)
        self.host_ranks = [[0] * layers for _ in range(places)]
        self._plans: list[ReadPlan] = []
        self.staging: Staging | None = None
        if device.type == "cuda":
            self.staging = Staging(self.size, model.dtype, device)
        # a second stream on which captured steps of few tokens compute x A^T next to the product of the layer
        self.aside: Any = None
        self._aside: Any = None
        # the tokens of the step by adapter: a ``TokenGroups`` for the kernels; without kernels a list of (place of the
        # adapter, i64 indices of its tokens or None for all tokens)
        self.groups: Any = []
        self.ahead: Ahead | None = None
        self.changes = {name: LinearAdapter(self, model.layers[name], place) for name, place in self.places.items()}

    def layer(self, name: str) -> LayerChange:
        return self.changes[name]

    def low_rank(self, name: str) -> LowRank:
        change = self.changes[name]
        ranks = self.ranks[:, change.place.number]
        return LowRank(change.a, change.b, ranks)

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        if self.model.device.type != "cuda":
            return
        rows = max(1, RESERVED // self.arena[0].nbytes)
        # as many adapters as the device holds, and as many that are read meanwhile
        count = min(2 * len(self.arena), rows)
        kept = [self.model.empty(self.size, self.model.dtype) for _ in range(count)]
        del kept  # the allocator keeps the freed memory, and later calls of ``empty`` return it

    def read(self, source: AdapterSource) -> HostAdapter:
        folder = source.folder
        dtype = self.model.dtype
        settings = read_settings(folder, source.config, self.max_rank)
        plan = self._plan(source, settings)
        weights = self.model.empty(self.size, dtype)
        if plan.numbers < self.size:
            weights.zero_()
        copies = [TensorCopy(name, first, part.of(weights)) for name, first, part in plan.copies]
        source.read(copies)
        for name, convert in plan.conversions:
            convert(source.tensor(name), weights)
        if not self._scale(weights, plan.scales):
            name = str(dtype).removeprefix("torch.")
            raise adapter_refusal(folder, f"its weights, with their scale, are not all finite numbers in {name}")
        if self.staging is not None:
            self.staging.put(weights)
        return HostAdapter(weights, plan.ranks)

    def _scale(self, weights: Tensor, scales: Scaled) -> bool:
        """Multiply elements of ``weights`` [size] by their scales, and return whether all elements are finite.

        A weight that is not finite would spoil the results of other adapters' tokens, because the products of all
        adapters of a step are added up in common sums.
        """
        # several threads share the work if each operation of torch has one
        piece = PIECE // weights.element_size() if torch.get_num_threads() == 1 else self.size
        products = []
        for first, stop, scale in scales:
            # Weights of 16 bits need no copy in float32: torch computes their product with a Python number in float32
            # and rounds it once.
            if scale != 1.0:
                products += [partial(_multiply, part, scale) for part in weights[first:stop].split(piece)]
        in_threads(products)
        checks = [partial(all_finite, part, weights.dtype) for part in weights.split(piece)]
        return all(in_threads(checks))

    def _plan(self, source: AdapterSource, settings: LoraSettings) -> ReadPlan:
        """Return how to read a folder.  Folders with equal layouts and settings share a plan, because it takes longer
        than the read."""
        for plan in self._plans:
            if plan.layout == source.layout and plan.settings == settings:
                return plan
        plan = make_plan(source, settings, self.model, self.places, self.model.dtype)
        kept = self._plans[: PLANS - 1]
        self._plans = [plan, *kept]
        return plan

    def store(self, place: int, loaded: HostAdapter) -> None:
        weights, ranks = loaded
        row = self.arena[place]
        if self.staging is None or not self.staging.take(weights, row):
            row.copy_(weights, non_blocking=True)
        self.ranks[place, : len(ranks)].copy_(ranks, non_blocking=True)
        self.host_ranks[place] = ranks.tolist()
        rows = []
        values = []
        for change in self.changes.values():
            if change.behind is not None:
                rows.append(change.behind[place])
                values.append(change.a[place].flatten(0, 1))
        if rows:
            torch._foreach_copy_(rows, values)
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
    places = tokens.unique().tolist()
    if len(places) == 1 and places[0] >= 0:
        return [(places[0], None)]
    groups = []
    for place in places:
        if place >= 0:
            of_adapter = tokens == place
            indices = of_adapter.nonzero().flatten()
            groups.append((place, indices))
    return groups


@torch.inference_mode()
def _multiply(numbers: Tensor, factor: float) -> None:
    """Multiply numbers in place.  They were made in inference mode, which each thread enters for itself."""
    numbers.mul_(factor)
