"""Compress rows on the device: score the stored tokens of each layer, and move the kept ones.

    sources  [b7, b3, b9]  ──► keys, values ──► scores [kv_heads, n] ──► kept [kv_heads, k], ascending
    cache    tokens of b7, b3, b9 ──────────── gather by head ─────────► first k places of the row's table

Nothing here waits for the device.  The tokens of all rows of a step are chosen before one of them moves.  On a GPU one
launch moves the tokens of all of these rows in all layers of a KV group (``kernels.kept_tokens``).  Elsewhere, and for
keys that are rotated to new positions, torch moves them layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from minivllm.core.interfaces.compressor import Compressor, CompressorContext
from minivllm.core.interfaces.plan import StepError
from minivllm.device.layers.rotary import rotate
from minivllm.errors import PluginError
from minivllm.registry import build_part

from .attention_sums import AttentionSums
from .build import has_kernels
from .kept_sets import KeptSets
from .query_store import QueryStore
from .token_scores import CompactedRow, RowScores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minivllm.core.interfaces.attention import AttnLayer
    from minivllm.core.interfaces.executor import Part, Wiring
    from minivllm.core.interfaces.plan import Delta
    from minivllm.device.kernels.kept_tokens import GroupTensors

    from .build import Worker
    from .state import DeviceState


SORTED = 1 << 23  # largest number of scores that torch sorts at a time


class ChosenTokens(NamedTuple):
    """A row to compress in a KV group, with the indices i32 [layers, kv_heads, kept] of the tokens it keeps,
    ascending."""

    group: int
    row: CompactedRow
    tokens: Tensor


class Compactor:
    """Compress rows of the KV cache: the compressor plug-in scores tokens, and the kept ones move to the row's first
    places."""

    def __init__(self, part: Part, wiring: Wiring, worker: Worker, state: DeviceState) -> None:
        """Build the compressor ``part``.  PluginError if the KV cache of a layer is not stored token by token."""
        ctx = CompressorContext(wiring.device, wiring.dtype, wiring.max_model_len)
        compressor: Compressor = build_part("compressor", part, ctx)
        self.name = f"compressor {part.name}"
        self.state = state
        self.block = wiring.block
        self.layers: list[list[AttnLayer]] = [[worker.parts.layers[i] for i in group] for group in worker.groups]
        _check_layout(self.name, worker.parts.layers, wiring.block)
        # index of a layer -> its (cos, sin) tables, if keys are rotated to new positions
        self.rotations = worker.parts.rotations if wiring.cache.rerotates else {}
        if wiring.cache.rerotates and not self.rotations:
            raise PluginError(
                f"{self.name} rotates keys to new positions: no attention layer of the model records its rotary tables "
                "in `ModelParts.rotations`; use a compressor that leaves keys as they are"
            )
        # cache tensors of each KV group for the kernels; [] if torch moves the tokens
        self.tensors = self._tensors(wiring)
        fmt = worker.backend.ctx.kv_format
        dtype = worker.parts.dtype
        self.scores = RowScores(compressor, self.name, wiring, fmt, dtype, bool(self.tensors))
        if compressor.attention_sums:
            self.scores.sums = self._attention_sums(wiring, worker)
        self.sets = KeptSets()
        self.parallel = wiring.parallel.tensor_parallel_size

    @property
    def compressor(self) -> Compressor:
        """Return the compressor."""
        return self.scores.compressor

    @property
    def queries(self) -> QueryStore | None:
        """Return the store of queries that compressions read; None if the compressor reads no queries."""
        return self.scores.queries

    @property
    def sums(self) -> AttentionSums | None:
        """Return the store of attention sums that compressions read; None if the compressor reads no sums."""
        return self.scores.sums

    def _tensors(self, wiring: Wiring) -> list[GroupTensors]:
        """Return the cache tensors of each KV group in the form that the kernels need; [] if the kernels cannot be
        used."""
        if not has_kernels(wiring):
            return []
        from minivllm.device.kernels.kept_tokens import GroupTensors

        caches = [[layer.cache for layer in layers] for layers in self.layers]
        if not all(GroupTensors.fit(of_group) for of_group in caches):
            return []
        groups = [GroupTensors(of_group) for of_group in caches]
        for group in groups:
            group.compile()
        return groups

    def _attention_sums(self, wiring: Wiring, worker: Worker) -> AttentionSums:
        """Create the store of attention sums.

        A note is added if torch has to compute the sums on a GPU, which is slow.
        """
        reason = "triton is not installed"
        kernel = False
        if has_kernels(wiring):
            from minivllm.device.kernels.attention_sums import fits

            layers = worker.parts.layers
            kernel = all(fits(layer.cache, layer.spec.kv_heads, layer.spec.dim_qk) for layer in layers)
            reason = "the kernel cannot read the keys of this attention back end or KV format"
            if kernel and "lse" not in wiring.parts["attention"].features:
                kernel = False
                reason = "the attention back end returns no log-sum-exp"
        if not kernel and wiring.device != "cpu":
            worker.notes.append(f"torch adds up attention for the compressor, which takes long: {reason}")
        return AttentionSums(self.layers, worker.backend.ctx.kv_format, self.state, worker.parts.dtype, kernel)

    @property
    def kept_heads(self) -> tuple[tuple[int, ...], ...]:
        """Return the number of KV heads of each layer of each KV group; () if the heads are divided over several
        processes."""
        if self.parallel > 1:
            return ()
        return tuple(tuple(layer.spec.kv_heads for layer in layers) for layers in self.layers)

    def apply(self, delta: Delta) -> dict[int, StepError]:
        """Compress the rows of ``delta.compact``; return slot -> error for the slots whose tokens could not be scored.

        A row with failed scores keeps its newest tokens, so that the lengths on the host stay correct until the row
        ends.  A row that was preempted keeps the tokens of its first compression.
        """
        errors: dict[int, StepError] = {}
        if not len(delta.compact):
            return errors
        sources = self.state.to(delta.sources)
        returned = set(delta.kept.tolist())
        found: list[ChosenTokens] = []
        first = 0
        for i, (group, slot, stored, kept, computed) in enumerate(delta.compact.tolist()):
            used = -(-stored // self.block)
            row = CompactedRow(slot, sources[first : first + used], stored, kept, computed)
            first += used
            tokens = self.sets.find(slot, group, computed)
            if tokens is None:
                tokens, error = self._choose(group, row)
                self.sets.add(slot, group, computed, tokens)
                if error is not None:
                    errors[slot] = error
            if self.sums is not None:
                self.sums.keep(slot, group, tokens)
            if i in returned:
                self.sets.send(tokens)
            found.append(ChosenTokens(group, row, tokens))
        self._move(found)
        self._count_dropped(found)
        if self.queries is not None:
            for slot in delta.compact[:, 1].tolist():
                self.queries.forget(slot)
        return errors

    def _move(self, found: list[ChosenTokens]) -> None:
        """Move the kept tokens of compressed rows to the first places of their new blocks."""
        for group, layers in enumerate(self.layers):
            of_group = [one for one in found if one.group == group]
            if not of_group:
                continue
            if self.tensors and not self.rotations:
                self._launch_moves(group, of_group)
                continue
            for one in of_group:
                place = self._places(one.row.sources.long(), one.row.stored)
                to = self._places(self._targets(one).long(), one.row.kept)
                for layer, tokens in zip(layers, one.tokens.long(), strict=True):
                    _move(layer, place[tokens], to, self._rotation(layer, one.row, tokens))

    def _launch_moves(self, group: int, found: list[ChosenTokens]) -> None:
        """Move the kept tokens of all rows in a KV group by one kernel launch."""
        from minivllm.device.kernels.kept_tokens import Move

        moves = [Move(one.tokens, one.row.sources, self._targets(one)) for one in found]
        self.tensors[group].move(moves)

    def _targets(self, one: ChosenTokens) -> Tensor:
        """Return the ids i32 of the KV blocks to which the kept tokens of a row move."""
        blocks = -(-one.row.kept // self.block)
        return self.state.table[one.group, one.row.slot, :blocks]

    def _count_dropped(self, found: list[ChosenTokens]) -> None:
        """Add the numbers of removed tokens to the columns, and lower the positions of rows whose keys were rotated."""
        shifts: dict[int, int] = {}  # slot -> number of removed tokens, by which later positions become smaller
        assert self.state.dropped is not None
        for group, row, _ in found:
            gone = row.stored - row.kept
            shifts[row.slot] = gone
            self.state.dropped_host[group, row.slot] += gone
            self.state.dropped[group, row.slot : row.slot + 1].add_(gone)
        if not self.rotations:
            return
        assert self.state.rope_first is not None
        for slot, shift in shifts.items():
            self.state.rope_first[slot : slot + 1].sub_(shift)

    def _rotation(self, layer: AttnLayer, row: CompactedRow, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the rotation of kept tokens to their new positions, or None if the keys of the layer are not rotated.

        ``tokens`` i64 [kv_heads, kept] are the kept tokens.  The result is cos and sin f32 [kv_heads, kept, dim] in the
        form of ``rotate``.  The position of a stored token is its number in the row, because earlier compressions have
        rotated keys too.  The tables may have a scale, which is divided out.
        """
        if layer.index not in self.rotations:
            return None
        cos, sin = self.rotations[layer.index]
        assert self.state.rope_first is not None and self.state.dropped is not None
        first = self.state.rope_first[row.slot]
        first = first + self.state.dropped[layer.group, row.slot]
        old = first + tokens
        new = first + torch.arange(tokens.shape[1], device=tokens.device)
        old_cos = cos[old]
        old_sin = sin[old]
        new_cos = cos[new]
        new_sin = sin[new]
        scale = old_cos.square() + old_sin.square()
        cos = (new_cos * old_cos + new_sin * old_sin) / scale
        sin = (new_sin * old_cos - new_cos * old_sin) / scale
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin

    def _choose(self, group: int, row: CompactedRow) -> tuple[Tensor, StepError | None]:
        """Return the indices i32 [layers, kv_heads, kept] of the tokens that a row keeps in a KV group, ascending, and
        the last error of the compressor or None."""
        found: list[Tensor] = []
        failed = None
        for layers in self._batches(group, row.stored):
            scores, error = self.scores.of(layers, row)
            failed = error or failed
            found.append(self._chosen(layers, row, scores).int())
        return torch.cat(found) if len(found) > 1 else found[0], failed

    def _places(self, blocks: Tensor, tokens: int) -> Tensor:
        """Return the index i64 [tokens] of each token's place in the KV cache (block * tokens per block + offset), for
        a row in ``blocks`` i64."""
        at = torch.arange(tokens, device=blocks.device)
        return blocks[at // self.block] * self.block + at % self.block

    def _batches(self, group: int, stored: int) -> list[list[AttnLayer]]:
        """Divide the layers of a KV group into batches; the kept tokens of a batch are chosen together.

        A batch has at most ``SORTED`` scores, or one layer.  The kernel chooses the tokens of all layers together.
        """
        layers = self.layers[group]
        if self.tensors:
            return [layers]
        size = max(1, SORTED // (layers[0].spec.kv_heads * stored))
        return [layers[i : i + size] for i in range(0, len(layers), size)]

    def _chosen(self, layers: list[AttnLayer], row: CompactedRow, scores: Tensor) -> Tensor:
        """Return the indices, i32 or i64 [layers, kv_heads, kept], of the tokens with the best scores, ascending.

        Of tokens with equal scores the earlier ones are kept."""
        if self.tensors:
            from minivllm.device.kernels.kept_tokens import choose

            return choose(scores, row.kept)
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[..., : row.kept].sort(dim=-1).values

    def note(self, delta: Delta) -> None:
        """Store the seeds of new rows on the host, and copy the queries and attention sums of rows that fork.

        Reading the seeds from the device later would wait for the device.
        """
        self.sets.note(delta)
        join = delta.join
        seeds = self.scores.seeds
        if join is not None:
            seeds.update(zip(join.slot.tolist(), join.seed.tolist(), strict=True))
        for source, slot, _ in delta.fork.tolist():
            seeds[slot] = seeds.get(source, 0)
        if self.queries is not None:
            self.queries.note(delta)
        if self.sums is not None:
            self.sums.note(delta)


def _check_layout(name: str, layers: Sequence[AttnLayer], block: int) -> None:
    """Raise PluginError, which begins with ``name``, if the KV cache of a layer is not stored token by token."""
    for layer in layers:
        for tensor_name, tensor in layer.cache.items():
            want = (block, layer.spec.kv_heads)
            if tuple(tensor.shape[1:3]) != want:
                raise PluginError(
                    f"{name}: the tensor {tensor_name!r} of the KV cache has blocks of {tuple(tensor.shape[1:])}; "
                    f"expected {want} first, tokens and heads; use another attention back end or KV format"
                )


def _move(layer: AttnLayer, sources: Tensor, to: Tensor, rotation: tuple[Tensor, Tensor] | None) -> None:
    """Copy keys and values of tokens in a layer's cache from the places ``sources`` i64 [kv_heads, k] to ``to`` i64
    [k], head by head.  A place is block * tokens per block + offset.  Keys are rotated by ``rotation``, which is cos
    and sin [kv_heads, k, dim], unless it is None."""
    heads = torch.arange(len(sources), device=to.device)[:, None]
    for name, tensor in layer.cache.items():
        raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        flat = raw.view(-1, *raw.shape[2:])
        moved = flat[sources, heads]
        if name == "k" and rotation is not None:
            moved = rotate(moved, *rotation)
        flat[to, heads] = moved
