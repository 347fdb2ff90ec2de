"""Compress rows on the device: score the stored tokens of each layer, and move the kept ones.

    sources  [b7, b3, b9]  ──► keys, values ──► scores [kv_heads, n] ──► kept [kv_heads, k], ascending
    cache    tokens of b7, b3, b9 ──────────── gather by head ─────────► first k places of the row's table

Nothing here waits for the device.  The scores of many layers are sorted together, because a sort of one layer's scores
does not occupy a GPU.  The blocks of ``Delta.sources`` are read before a block of the same layer is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception, call_foreign
from minivllm.core.interfaces.compressor import Compressor, CompressorContext, StoredTokens
from minivllm.core.interfaces.plan import StepError
from minivllm.device.layers.rotary import rotate
from minivllm.errors import PluginError, describe_error
from minivllm.registry import build_part

from .attention_sums import AttentionSums
from .build import has_kernels
from .kept_sets import KeptSets

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnLayer
    from minivllm.core.interfaces.executor import Part, Wiring
    from minivllm.core.interfaces.plan import Delta, StepPlan

    from .build import Worker
    from .state import DeviceState


SORTED = 1 << 23  # scores of a batch of layers


class CompactedRow(NamedTuple):
    """A row that is compressed: its slot, the blocks i64 [n] that hold its tokens, and numbers of tokens."""

    slot: int
    sources: Tensor
    stored: int
    kept: int
    computed: int


class Compactor:
    """The compressor of a worker, and the moves of the tokens that it keeps."""

    def __init__(self, part: Part, wiring: Wiring, worker: Worker, state: DeviceState) -> None:
        """Build the compressor ``part``.  PluginError if the KV cache of a layer is not stored token by token."""
        ctx = CompressorContext(wiring.device, wiring.dtype, wiring.max_model_len)
        self.compressor: Compressor = build_part("compressor", part, ctx)
        self.name, self.state, self.block = f"compressor {part.name}", state, wiring.block
        self.format = worker.backend.ctx.kv_format
        self.dtype = worker.parts.dtype
        self.layers: list[list[AttnLayer]] = [[worker.parts.layers[i] for i in group] for group in worker.groups]
        self.seeds: dict[int, int] = {}  # slot -> seed of its row
        self.queries = QueryStore() if self.compressor.window else None
        self.sums = self._attention_sums(wiring, worker) if self.compressor.attention_sums else None
        # number of a layer -> its rotary tables, if keys are rotated to new positions
        self.rotations = worker.parts.rotations if wiring.cache.rerotates else {}
        if wiring.cache.rerotates and not self.rotations:
            raise PluginError(
                f"{self.name} rotates keys to new positions: no attention layer of the model records its rotary tables "
                "in `ModelParts.rotations`; use a compressor that leaves keys as they are"
            )
        self.sets, self.parallel = KeptSets(), wiring.parallel.tensor_parallel_size
        for layer in worker.parts.layers:
            for name, tensor in layer.cache.items():
                want = (wiring.block, layer.spec.kv_heads)
                if tuple(tensor.shape[1:3]) != want:
                    raise PluginError(
                        f"{self.name}: the tensor {name!r} of the KV cache has blocks of {tuple(tensor.shape[1:])}; "
                        f"expected {want} first, tokens and heads; use another attention back end or KV format"
                    )

    def _attention_sums(self, wiring: Wiring, worker: Worker) -> AttentionSums:
        """Return the store of attention sums.  A note says whether torch adds them up on a GPU, which is slow."""
        reason = "triton is not installed"
        kernel = False
        if has_kernels(wiring):
            from minivllm.device.kernels.attention_sums import fits

            layers = worker.parts.layers
            kernel = all(fits(layer.cache, layer.spec.kv_heads, layer.spec.dim_qk) for layer in layers)
            reason = "the kernel cannot read the keys of this attention back end or KV format"
            if kernel and "lse" not in wiring.parts["attention"].features:
                kernel, reason = False, "the attention back end returns no log-sum-exp"
        if not kernel and wiring.device != "cpu":
            worker.notes.append(f"torch adds up attention for the compressor, which takes long: {reason}")
        return AttentionSums(self.layers, self.format, self.state, self.dtype, kernel)

    @property
    def kept_heads(self) -> tuple[tuple[int, ...], ...]:
        """Return the number of KV heads of each layer of each KV group; () if other processes have further heads."""
        if self.parallel > 1:
            return ()
        return tuple(tuple(layer.spec.kv_heads for layer in layers) for layers in self.layers)

    def apply(self, delta: Delta) -> dict[int, StepError]:
        """Compress the rows of ``delta.compact``.  Return an error for each slot whose scores failed.

        Such a row keeps its newest tokens, so that the lengths on the host are right until it ends.  A row that was
        preempted keeps the tokens of its first computation."""
        errors: dict[int, StepError] = {}
        shifts: dict[int, int] = {}  # slot -> places by which the positions of its next tokens move
        first = 0
        returned = set(delta.kept.tolist())
        for i, (group, slot, stored, kept, computed) in enumerate(delta.compact.tolist()):
            used = -(-stored // self.block)
            sources = self.state.to(delta.sources[first : first + used]).long()
            first += used
            place = self._places(sources, stored)
            table = self.state.table[group, slot, : -(-kept // self.block)].long()
            to = self._places(table, kept)
            row = CompactedRow(slot, sources, stored, kept, computed)
            chosen = self.sets.find(slot, group, computed)
            if chosen is None:
                chosen, error = self._choose(group, row)
                self.sets.add(slot, group, computed, chosen)
                if error is not None:
                    errors[slot] = error
            if self.sums is not None:
                self.sums.keep(slot, group, chosen)
            for layer, tokens in zip(self.layers[group], chosen, strict=True):
                _move(layer, place[tokens.long()], to, self._rotation(layer, row, tokens.long()))
            shifts[slot] = stored - kept
            if i in returned:
                self.sets.send(chosen)
            self.state.dropped_host[group, slot] += stored - kept
            assert self.state.dropped is not None
            self.state.dropped[group, slot : slot + 1].add_(stored - kept)
        for slot, shift in shifts.items() if self.rotations else ():
            assert self.state.rope_first is not None
            self.state.rope_first[slot : slot + 1].sub_(shift)
        if self.queries is not None:
            for slot in delta.compact[:, 1].tolist():
                self.queries.forget(slot)
        return errors

    def _rotation(self, layer: AttnLayer, row: CompactedRow, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin f32 [kv_heads, kept, dim] of the rotation of the kept ``tokens`` i64 [kv_heads, kept] to
        their new positions, as ``rotate`` reads them; None if the keys of the layer stay as they are.

        The position of each stored token is its number in the row, because earlier compressions have rotated keys too.
        The tables may have a scale, which is divided out."""
        if layer.index not in self.rotations:
            return None
        cos, sin = self.rotations[layer.index]
        assert self.state.rope_first is not None and self.state.dropped is not None
        first = self.state.rope_first[row.slot] + self.state.dropped[layer.group, row.slot]
        old, new = first + tokens, first + torch.arange(tokens.shape[1], device=tokens.device)
        old_cos, old_sin, new_cos, new_sin = cos[old], sin[old], cos[new], sin[new]
        scale = old_cos.square() + old_sin.square()
        cos = (new_cos * old_cos + new_sin * old_sin) / scale
        sin = (new_sin * old_cos - new_cos * old_sin) / scale
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin

    def _choose(self, group: int, row: CompactedRow) -> tuple[list[Tensor], StepError | None]:
        """Return the tokens of a row that stay in each layer of a group, i32 [kv_heads, kept], ascending, and the last
        error of a score."""
        found: list[Tensor] = []
        failed = None
        for layers in self._batches(group, row.stored):
            scores, error = self._scores_of(layers, row)
            failed = error or failed
            found += self._chosen(layers, row, scores).int()
        return found, failed

    def _places(self, blocks: Tensor, tokens: int) -> Tensor:
        """Return the flat place i64 [tokens] of each token in ``blocks`` i64."""
        at = torch.arange(tokens, device=blocks.device)
        return blocks[at // self.block] * self.block + at % self.block

    def _batches(self, group: int, stored: int) -> list[list[AttnLayer]]:
        """Return the layers of a group in batches whose scores are sorted together: consecutive layers with the same
        number of KV heads, and at most ``SORTED`` scores, or one layer."""
        batches: list[list[AttnLayer]] = []
        for layer in self.layers[group]:
            heads = layer.spec.kv_heads
            last = batches[-1] if batches else []
            if last and last[0].spec.kv_heads == heads and (len(last) + 1) * heads * stored <= SORTED:
                last.append(layer)
            else:
                batches.append([layer])
        return batches

    def _scores_of(self, layers: list[AttnLayer], row: CompactedRow) -> tuple[Tensor, StepError | None]:
        """Return the scores f32 [layers, kv_heads, stored] of a row's tokens, and an error if ``score`` failed.

        The tokens of a layer whose scores failed have growing scores, so that its newest tokens stay."""
        error = None
        shape = (len(layers), layers[0].spec.kv_heads, row.stored)
        scores = torch.empty(shape, device=row.sources.device)
        for layer, out in zip(layers, scores, strict=True):
            try:
                out.copy_(self._score(layer, row))
            except BaseException as e:
                error = StepError("rows", self.name, describe_error(as_exception(e), self.compressor))
                out.copy_(torch.arange(row.stored, device=out.device))
        return scores.nan_to_num_(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf")), error

    def _score(self, layer: AttnLayer, row: CompactedRow) -> Tensor:
        """Return the scores of the compressor, [stored] or [kv_heads, stored].  PluginError for another shape."""
        stored = row.stored
        keys, values = self.format.load(layer.cache, row.sources[None], self.dtype)
        sums, queries = (None, None) if self.sums is None else self.sums.of(row.slot, layer, stored)
        tokens = StoredTokens(
            layer=layer.index,
            keys=keys[0, :stored],
            values=values[0, :stored],
            queries=None if self.queries is None else self.queries.of(row.slot, layer.index),
            scale=layer.spec.softmax_scale,
            keep=row.kept,
            computed=row.computed,
            seed=self.seeds.get(row.slot, 0),
            attention_sums=sums,
            sum_queries=queries,
        )
        scores = call_foreign(self.compressor.score, tokens)
        heads = layer.spec.kv_heads
        if not isinstance(scores, torch.Tensor) or scores.shape not in ((stored,), (heads, stored)):
            found = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
            raise PluginError(f"score() gave {found}; expected a tensor [{heads}, {stored}] or [{stored}]")
        return scores

    def _chosen(self, layers: list[AttnLayer], row: CompactedRow, scores: Tensor) -> Tensor:
        """Return the tokens of a row that stay in each layer, i64 [layers, kv_heads, kept], ascending.

        Of tokens with equal scores the first stay."""
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[..., : row.kept].sort(dim=-1).values

    def note(self, delta: Delta) -> None:
        """Store the seeds of new rows on the host, because reading them from the device would wait for it, and the
        queries and attention sums of rows that fork."""
        self.sets.note(delta)
        join = delta.join
        if join is not None:
            self.seeds.update(zip(join.slot.tolist(), join.seed.tolist(), strict=True))
        for source, slot, _ in delta.fork.tolist():
            self.seeds[slot] = self.seeds.get(source, 0)
        if self.queries is not None:
            self.queries.note(delta)
        if self.sums is not None:
            self.sums.note(delta)


def _move(layer: AttnLayer, sources: Tensor, to: Tensor, rotation: tuple[Tensor, Tensor] | None) -> None:
    """Copy the tokens at the flat places ``sources`` i64 [kv_heads, k] of a layer's cache to ``to`` i64 [k], head by
    head.  Keys are rotated by ``rotation``, which is cos and sin [kv_heads, k, dim], unless it is None."""
    heads = torch.arange(len(sources), device=to.device)[:, None]
    for name, tensor in layer.cache.items():
        raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        flat = raw.view(-1, *raw.shape[2:])
        moved = flat[sources, heads]
        if name == "k" and rotation is not None:
            moved = rotate(moved, *rotation)
        flat[to, heads] = moved


class QueryStore:
    """The prepared queries of the last tokens of rows that are compressed next, by slot and layer."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}
        # (slot, first token, end, whether the tokens follow stored ones) of the running step
        self._wanted: list[tuple[int, int, int, int]] = []

    def of_step(self, plan: StepPlan) -> QueryStore:
        """Prepare to keep the queries of ``plan.observe``."""
        ends = plan.q_len.cumsum()
        self._wanted = [
            (int(plan.slots[row]), int(ends[row]) - count, int(ends[row]), more)
            for row, count, more in plan.observe.tolist()
        ]
        return self

    def keep(self, layer: int, q: Tensor) -> None:
        """Store the queries of the wanted tokens from q [T, heads, dim] of a layer's step."""
        for slot, first, end, more in self._wanted:
            new = q[first:end].clone()
            if more:
                new = torch.cat([self._kept[slot, layer], new])
            self._kept[slot, layer] = new

    def of(self, slot: int, layer: int) -> Tensor | None:
        """Return the queries [w, heads, dim] of a slot in a layer, None if none are kept."""
        return self._kept.get((slot, layer))

    def note(self, delta: Delta) -> None:
        """Forget the queries of rows that left, and copy those of rows that fork.

        A row that left may be the parent of a fork, and a branch may take a slot that another row has left."""
        forks = delta.fork.tolist()
        copies = {
            (slot, layer): q for source, slot, _ in forks for (of, layer), q in self._kept.items() if of == source
        }
        for slot in delta.leave.tolist():
            self.forget(slot)
        self._kept.update(copies)

    def forget(self, slot: int) -> None:
        """Remove the queries of a slot."""
        for key in [key for key in self._kept if key[0] == slot]:
            del self._kept[key]
