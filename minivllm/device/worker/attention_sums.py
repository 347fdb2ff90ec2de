"""Sum the attention that each stored token of a row gets from the queries of its prompt, for a KV compressor.

    prompt    chunk 1 (8 tokens)   chunk 2 (5 tokens)     compression          generated tokens
    sums      [layers, heads, 8] ──► [.., 13] ─────────── [.., kept] ──────────── zeros behind
               += 8 queries           += 5 queries         of the kept tokens

The sums of a row are float32, one for each KV head of each layer: 4 bytes for each stored token.  Probabilities are
never stored for all queries.  On a GPU a kernel adds them up (``kernels.attention_sums``).  Elsewhere torch does so for
some queries at a time.  The tensors of a row are replaced and never changed after its step, so branches share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
    from minivllm.core.interfaces.kvformat import KVFormat
    from minivllm.core.interfaces.plan import Delta, StepPlan
    from minivllm.device.kernels.attention_sums import SummedRows

    from .state import DeviceState

PAIRS = 1 << 22  # largest number of attention probabilities (head, query, key) that torch computes at a time


class RowSums(NamedTuple):
    """The attention that each stored token of a row got, summed over queries, in a KV group."""

    sums: Tensor  # f32 [layers, kv_heads, n] sum of the probabilities with which queries attended to each token
    # f32 [layers, kv_heads, n] number of queries in each sum.  None before the first compression: the token at
    # position i was then read by n - i queries
    queries: Tensor | None = None

    def of_layers(self, first: int, count: int, stored: int) -> tuple[Tensor, Tensor]:
        """Return the attention sums, and the numbers of queries in them, of ``count`` layers from index ``first`` on.

        Both are f32 [count * kv_heads, stored], with zeros for tokens behind the prompt.
        """
        layers = slice(first, first + count)
        sums = self.sums[layers].flatten(0, 1)
        queries = self.all_queries()[layers].flatten(0, 1)
        zeros = 0, stored - sums.shape[-1]
        return pad(sums, zeros), pad(queries, zeros)

    def all_queries(self) -> Tensor:
        """Return how many queries each attention sum contains, f32 [layers, kv_heads, n]."""
        if self.queries is not None:
            return self.queries
        n = self.sums.shape[-1]
        numbers = torch.arange(n, 0, -1, dtype=torch.float32, device=self.sums.device)
        return numbers.expand(self.sums.shape)


class AttentionSums:
    """The attention that stored tokens got so far, summed over queries, for each slot and KV group.

    ``layers`` are the attention layers of each KV group.  ``kernel`` means that a Triton kernel computes the sums from
    the log-sum-exp of the attention back end; otherwise torch does."""

    def __init__(
        self, layers: Sequence[Sequence[AttnLayer]], fmt: KVFormat, state: DeviceState, dtype: torch.dtype, kernel: bool
    ) -> None:
        self.layers = layers
        self.format = fmt
        self.state = state
        self.dtype = dtype
        self.kernel = kernel
        # index of a layer in the model -> its index in its KV group
        self.number: dict[int, int] = {}
        for group in layers:
            self.number |= {layer.index: i for i, layer in enumerate(group)}
        self._of_slot: dict[int, dict[int, RowSums]] = {}
        # (slot, index of the first token in the step, tokens, stored tokens) of the step's rows
        self._rows: list[tuple[int, int, int, int]] = []
        self._tables: dict[int, SummedRows] = {}  # by KV group

    def of_step(self, plan: StepPlan) -> AttentionSums:
        """Extend the sums of the rows ``plan.sums`` by zeros for the tokens of the step, and return this object."""
        ends = plan.q_len.cumsum()
        groups = self._groups()
        self._rows = []
        for i in plan.sums.tolist():
            slot = int(plan.slots[i])
            tokens = int(plan.q_len[i])
            first = int(ends[i]) - tokens
            stored = int(plan.computed[i]) + tokens
            self._rows.append((slot, first, tokens, stored))
        for slot, _, _, stored in self._rows:
            of_row = self._of_slot.setdefault(slot, {})
            for group in groups:
                before = of_row.get(group)
                of_row[group] = self._grown(before, group, stored)
        self._tables = {}
        if self.kernel:
            self._tables = {group: self._table(group) for group in groups}
        return self

    def _groups(self) -> list[int]:
        """Return the indices of the KV groups that a compressor compresses, which are those without a sliding
        window."""
        return [g for g, layers in enumerate(self.layers) if layers[0].spec.window is None]

    def _grown(self, row: RowSums | None, group: int, stored: int) -> RowSums:
        """Return new sums of a row in a KV group: the old ones, and zeros up to ``stored`` tokens."""
        if row is not None:
            more = stored - row.sums.shape[-1]
            return RowSums(pad(row.sums, (0, more)))
        layers = self.layers[group]
        shape = (len(layers), layers[0].spec.kv_heads, stored)
        zeros = torch.zeros(shape, device=self.state.device)
        return RowSums(zeros)

    def _table(self, group: int) -> SummedRows:
        """Return the table of the step's rows for the kernel, with the addresses of their sums in a KV group."""
        from minivllm.device.kernels.attention_sums import SummedRows

        columns = []
        for slot, first, tokens, stored in self._rows:
            sums = self._of_slot[slot][group].sums
            columns.append((first, tokens, stored, slot, sums.data_ptr(), sums.stride(0)))
        packed = np.array(columns, np.int64)
        table = self.state.to(packed.T)
        longest = max(stored for *_, stored in self._rows)
        return SummedRows(table, longest, len(self._rows))

    def norms(self, layer: AttnLayer, q: Tensor) -> Tensor | None:
        """Return an empty tensor f32 [T, heads] for the log-sum-exp that attention of a layer writes; None if it is not
        needed."""
        if not self.kernel or layer.spec.window is not None:
            return None
        return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)

    def add(self, layer: AttnLayer, q: Tensor, meta: AttnMeta, norms: Tensor | None) -> None:
        """Add the attention probabilities of the step's queries q [T, heads, dim_qk], with rotary embedding, to a
        layer's sums."""
        if layer.spec.window is not None:
            return
        number = self.number[layer.index]
        if norms is not None:
            from minivllm.device.kernels.attention_sums import add_sums

            add_sums(layer, number, q, meta, norms, self._tables[layer.group])
            return
        for slot, first, tokens, stored in self._rows:
            keys = self._keys(layer, slot, stored)
            sums = self._of_slot[slot][layer.group].sums[number]
            own = slice(first, first + tokens)
            sees = None
            if meta.host_sees is not None:
                sees = self.state.to(meta.host_sees[own])
            sum_attention(sums, q[own], keys, layer.spec, layer.sinks, sees)

    def _keys(self, layer: AttnLayer, slot: int, stored: int) -> Tensor:
        """Return the keys [stored, kv_heads, dim_qk] of a row in a layer."""
        state = self.state
        count = -(-stored // state.block)
        blocks = state.table[layer.group, slot, :count]
        keys, _ = self.format.load(layer.cache, blocks[None].long(), self.dtype)
        return keys[0, :stored]

    def of(self, slot: int, layers: Sequence[AttnLayer], stored: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the attention sums, and the numbers of queries in them, of a slot in consecutive layers of a KV group.

        Both are f32 [layers * kv_heads, stored], or None if the slot has no sums."""
        first = layers[0]
        row = self._of_slot.get(slot, {}).get(first.group)
        if row is None:
            return None, None
        number = self.number[first.index]
        return row.of_layers(number, len(layers), stored)

    def keep(self, slot: int, group: int, chosen: Tensor) -> None:
        """Reduce the sums of a slot in a KV group to the tokens ``chosen`` i32 [layers, kv_heads, kept] that a
        compression kept."""
        row = self._of_slot.get(slot, {}).get(group)
        if row is None:
            return
        at = chosen.long()
        prompt = row.sums.shape[-1]
        inside = at < prompt
        at = at.clamp(max=prompt - 1)
        sums = row.sums.gather(-1, at)
        queries = row.all_queries().gather(-1, at)
        self._of_slot[slot][group] = RowSums(sums * inside, queries * inside)

    def note(self, delta: Delta) -> None:
        """Drop the sums of sequences that leave or join a slot, and copy the sums of a parent to its forks.

        A parent may leave its slot in the same step, and a fork may use a slot that another sequence has left.
        """
        copies = {}
        for source, slot, _ in delta.fork.tolist():
            copies[slot] = dict(self._of_slot.get(source, {}))
        for slot in delta.leave.tolist():
            self._of_slot.pop(slot, None)
        if delta.join is not None:
            for slot in delta.join.slot.tolist():
                self._of_slot.pop(slot, None)
        self._of_slot.update(copies)


def sum_attention(
    sums: Tensor, q: Tensor, keys: Tensor, spec: AttnSpec, sinks: Tensor | None, sees: Tensor | None = None
) -> None:
    """Add the attention probabilities of queries q [t, heads, dim_qk] to ``sums`` f32 [kv_heads, n].

    ``keys`` [n, kv_heads, dim_qk] are those of n tokens, and the queries belong to the last t of these.  ``sinks`` f32
    [heads] are logits that only enlarge the denominator of the softmax; None without.  ``sees`` i64 [t] is the last
    position to which each query attends; None means its own position."""
    n, kv_heads, dim = keys.shape
    tokens, heads = q.shape[:2]
    key = torch.arange(n, device=q.device)
    own = sees
    if own is None:
        own = key[n - tokens :]
    columns = keys.float().permute(1, 2, 0)
    at_once = max(1, PAIRS // (heads * n))
    parts = q.split(at_once)
    for part, last in zip(parts, own.split(at_once), strict=True):
        by_head = part.float().view(len(part), kv_heads, -1, dim)
        lines = by_head.permute(1, 2, 0, 3)
        shape = lines.shape[:3]
        products = lines.reshape(kv_heads, -1, dim) @ columns
        scores = products.view(*shape, n) * spec.softmax_scale
        if spec.softcap is not None:
            capped = torch.tanh(scores / spec.softcap)
            scores = spec.softcap * capped
        unseen = key > last[:, None]
        scores.masked_fill_(unseen, float("-inf"))
        if spec.sinks and sinks is not None:
            sink = sinks.view(kv_heads, -1, 1, 1)
            scores = torch.cat((scores, sink.expand(*shape, 1)), dim=-1)
        attention = scores.softmax(dim=-1)
        summed = attention.sum(dim=(1, 2))
        sums += summed[:, :n]
