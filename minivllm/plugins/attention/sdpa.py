"""Attention by torch's scaled_dot_product_attention over keys and values gathered from the cache, the reference.

It runs on any device and in any dtype.  The rows of a step are divided into a few *batches*.  Each batch gathers the
cache slots of its keys and computes attention in one call.  The first layer of each KV group computes the slots and
masks of a batch once per step, and shares them through ``meta.work``.  Only slots below a row's length are gathered,
and padding repeats the row's last token.  So the content of other slots, NaN included, cannot affect a result.

A CPU without instructions for 16-bit products computes attention in float32.  Sinks, soft caps and log-sum-exp use an
explicit softmax in float32.  ``batch_invariant``, which is possible on a CPU only, uses ``sdpa_invariant``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.core.interfaces.attention import AttentionBackend, AttentionContext, AttnLayer, AttnMeta, AttnSpec, QKPre
from minivllm.core.interfaces.kvformat import KVFormat, KVLayout
from minivllm.device.layers.rotary import prepare_qk
from minivllm.device.layers.stored_product import widened
from minivllm.errors import PluginError

from .sdpa_invariant import attend, by_token

Rows = slice | np.ndarray  # rows of a step, adjacent ones or their indices


@dataclass(frozen=True)
class Limits:
    """The limits of a batch and the cost of one more batch, which were measured.  They do not affect results."""

    gather: int  # bytes of keys and values that a batch may gather, which should fit in a CPU's cache
    pairs: int = 1 << 22  # most query-key pairs of a batch that needs a mask
    batch_bytes: int = 512 << 10  # number of gathered bytes that take as long as one more batch of decode rows
    batch_pairs: int = 1 << 20  # number of query-key pairs that take as long as one more batch of prefill rows


CPU = Limits(gather=2 << 20, batch_pairs=1 << 12)
GPU = Limits(gather=256 << 20)


@dataclass(frozen=True)
class SdpaBatch:
    """A batch of B rows with Lq queries and Lk keys each; shorter rows are padded."""

    rows: int  # B
    queries: int  # Lq
    tokens: slice | Tensor  # i64 [B * Lq], the indices of the queries among the tokens of the step
    slots: Tensor  # i64 [B, Lk] flat cache slots of the keys
    mask: Tensor | None  # [B, 1, Lq, Lk], added to the scores; None means causal from position 0
    ahead: Tensor | None = None  # float32 [B, 1, Lq, Lk], the key's position minus the query's, for layers with slopes
    real: Tensor | None = None  # i64, the indices among B * Lq that are not padding; None means all
    out: Tensor | None = None  # indices among the tokens of the step of the queries in ``real``; None means ``tokens``


class KVPiece(NamedTuple):
    """Some queries of one row with several tokens.

    The queries are the tokens [start, start + n) of the step, at the positions [pos, pos + n).  They attend to keys
    from position ``first`` to position ``last``.
    """

    row: int
    start: int
    n: int
    pos: int
    first: int
    last: int  # the last position that a query attends to
    causal: bool  # whether all keys from position 0 to the query's own are visible, so that no mask is needed

    @property
    def keys(self) -> int:
        """Return the number of positions from ``first`` to ``last``."""
        return self.last + 1 - self.first


class Sdpa(AttentionBackend):
    """The back end on torch's scaled_dot_product_attention.

    It supports window, sinks, softcap, alibi and lse.  ``lse`` is the logarithm of the softmax's denominator, including
    the sink.
    """

    native = True  # captured steps of a CPU compute the same as this class; subclasses do not inherit this

    def __init__(self, options: Any, ctx: AttentionContext) -> None:
        super().__init__(options, ctx)
        self.limits = CPU if ctx.device.startswith("cpu") else GPU
        if ctx.batch_invariant and self.limits is GPU:
            raise PluginError(f"sdpa: batch_invariant=true on {ctx.device}: expected a CPU, or attention=triton")

    def layout(self, spec: AttnSpec, fmt: KVFormat, block: int) -> KVLayout:
        layout = fmt.layout(spec, block)
        for name, t in layout.tensors.items():
            if t.shape[0] != block:
                raise PluginError(
                    f"sdpa reads the cache token by token: KV tensor {name!r} is {t.shape}, expected ({block}, ...)"
                )
        return layout

    def write(self, layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, meta: AttnMeta, pre: QKPre | None) -> Tensor:
        if pre is not None:
            q, k = prepare_qk(q, k, meta.position, pre, meta.work)
        self.ctx.kv_format.store(layer.cache, k, v, meta.slot_map[layer.group])
        return q

    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        if self.ctx.batch_invariant:
            attend(self.ctx.kv_format, layer, q, meta, out, lse)
            return
        spec = layer.spec
        slopes = spec.alibi is not None
        explicit = spec.sinks or spec.softcap is not None or lse is not None or slopes
        if self.limits is CPU and widened(q.dtype):
            q = q.float()
        key = ("sdpa", layer.group, spec.window, spec.heads, explicit, slopes)
        batches = meta.work.get(key)
        if batches is None:
            dtype = torch.float32 if explicit else q.dtype
            element = q.element_size()
            batches = make_batches(meta, layer.group, spec, dtype, element, not explicit, self.limits)
            meta.work[key] = batches
        for b in batches:
            k, v = self._load(layer, b.slots, q.dtype)
            own = q[b.tokens]
            queries = own.view(b.rows, b.queries, spec.heads, spec.dim_qk)
            if explicit:
                bias = None
                if b.ahead is not None:
                    slope_of_head = layer.slopes[:, None, None]  # type: ignore[index]  # such a layer has slopes
                    bias = b.ahead * slope_of_head
                o, norm = attend_explicit(queries, k, v, b.mask, spec, layer.sinks, bias)
                if lse is not None:
                    _put(lse, b, norm)
            elif b.queries == 1:
                o = attend_one(queries, k, v, b.mask, spec)
            else:
                o = attend_many(queries, k, v, b.mask, spec)
            _put(out, b, o)

    def _load(self, layer: AttnLayer, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return k [B, Lk, kv_heads, dim_qk] and v [B, Lk, kv_heads, dim_v] of a cache that is viewed as blocks of
        one token.
        """
        cache = by_token(layer.cache)
        k, v = self.ctx.kv_format.load(cache, slots, dtype)
        if layer.spec.v_in_k:
            dim_v = layer.spec.dim_v
            v = v[..., :dim_v]
        return k, v


def _put(out: Tensor, b: SdpaBatch, x: Tensor) -> None:
    """Write the result x [B, Lq, ...] of a batch to the tokens of the batch in ``out`` [T, ...]; padding is dropped."""
    if isinstance(b.tokens, slice) and b.real is None:
        out[b.tokens].view(x.shape).copy_(x)
        return
    tokens = b.tokens
    rows = x.flatten(0, 1)
    if b.real is not None:
        assert b.out is not None
        tokens = b.out
        rows = rows.index_select(0, b.real)
    out.index_copy_(0, tokens, rows.to(out.dtype))  # type: ignore[arg-type]  # a slice was handled above


def attend_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttnSpec) -> Tensor:
    """Compute attention of one query per row.

    Query heads that share a KV head become the queries of a single head, so KV heads are not repeated.
    """
    rows = q.shape[0]
    q = q.view(rows, spec.kv_heads, -1, spec.dim_qk)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    scale = spec.softmax_scale
    o = F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    return o.reshape(rows, 1, spec.heads, spec.dim_v)


def attend_many(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttnSpec) -> Tensor:
    """Compute attention of several queries per row, with a mask that is added to the scores, or causally without one.

    KV heads are repeated, because the fused kernels for CPUs and float32 do not support grouped queries.
    """
    if spec.heads != spec.kv_heads:
        group = spec.heads // spec.kv_heads
        k = k.repeat_interleave(group, dim=2)
        v = v.repeat_interleave(group, dim=2)
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    causal = mask is None
    scale = spec.softmax_scale
    o = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    return o.transpose(1, 2)


def attend_explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    spec: AttnSpec,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [B, Lq, heads, dim_v], lse [B, Lq, heads]) of a softmax in float32.

    ``bias`` [B, heads, Lq, Lk] is added to the scaled and capped scores."""
    rows, n = q.shape[:2]
    kv_heads, keys = spec.kv_heads, k.shape[1]
    shape = (rows, kv_heads, -1, n)
    by_head = q.float().permute(0, 2, 1, 3)
    queries = by_head.reshape(rows, kv_heads, -1, spec.dim_qk)
    products = queries @ k.float().permute(0, 2, 3, 1)
    s = products.view(*shape, keys)
    s = s * spec.softmax_scale
    if spec.softcap is not None:
        capped = torch.tanh(s / spec.softcap)
        s = spec.softcap * capped
    s = s + mask.unsqueeze(2)  # type: ignore[union-attr]  # a batch without a mask is not computed here
    if bias is not None:
        s = s + bias.view(s.shape)
    peak = s.amax(dim=-1, keepdim=True)
    if spec.sinks:
        sink = sinks.view(1, kv_heads, -1, 1, 1)  # type: ignore[union-attr]  # as the spec says
        peak = torch.maximum(peak, sink)
    p = (s - peak).exp_()
    total = p.sum(dim=-1, keepdim=True)
    if spec.sinks:
        of_sink = (sink - peak).exp_()
        total = total + of_sink
    weights = p.view(rows, kv_heads, -1, keys)
    summed = weights @ v.float().permute(0, 2, 1, 3)
    o = summed.view(*shape, spec.dim_v)
    o = o / total
    outputs = o.reshape(rows, spec.heads, n, spec.dim_v)
    lse = peak + total.log()
    lse = lse.view(rows, spec.heads, n)
    return outputs.transpose(1, 2), lse.transpose(1, 2)


def make_batches(
    meta: AttnMeta, group: int, spec: AttnSpec, dtype: torch.dtype, element: int, causal: bool, limits: Limits
) -> list[SdpaBatch]:
    """Divide a step into batches.  ``causal`` means that batches of prompts from position 0 may omit the mask."""
    dims = spec.dim_qk + spec.dim_v
    token_bytes = spec.kv_heads * dims * element
    batches = []
    n = meta.decode_rows
    if n:
        host_lengths = meta.host_kv_len[group, :n]
        lens = np.maximum(host_lengths, 1)
        if spec.window is not None:
            lens = np.minimum(lens, spec.window)
        for rows, longest in split_by_length(lens, token_bytes, limits):
            batch = decode_batch(meta, group, spec, rows, longest, dtype)
            batches.append(batch)
    fresh: list[KVPiece] = []
    masked: list[KVPiece] = []
    # with the explicit softmax a batch has fewer pairs, because it stores the scores of all heads
    pairs = limits.pairs if causal else limits.pairs // 4
    for piece in prefill_pieces(meta, group, spec.window, causal, pairs):
        pieces = fresh if piece.causal else masked
        pieces.append(piece)
    price = limits.batch_pairs
    repeated_bytes = spec.heads * token_bytes
    most = limits.gather * spec.kv_heads // repeated_bytes
    unlimited = 1 << 62
    for joined in join(fresh, price, unlimited, most):
        batch = prefill_batch(meta, group, spec, joined, None)
        batches.append(batch)
    for joined in join(masked, price, pairs, most):
        batch = prefill_batch(meta, group, spec, joined, dtype)
        batches.append(batch)
    return batches


def split_by_length(lens: np.ndarray, token_bytes: int, limits: Limits) -> list[tuple[Rows, int]]:
    """Return groups of rows of similar length, each as rows and longest length.

    A group is added only if it saves more copying than it costs.  No group gathers more than the limit.
    """
    count = len(lens)
    longest = int(lens.max())
    total = int(lens.sum())
    padding = longest * count - total
    groups: list[tuple[Rows, int]] = []
    if padding * token_bytes <= limits.batch_bytes:
        row_bytes = longest * token_bytes
        step = max(1, limits.gather // row_bytes)
        for start in range(0, count, step):
            stop = min(start + step, count)
            rows = slice(start, stop)
            groups.append((rows, longest))
        return groups
    order = np.argsort(-lens, kind="stable")
    sizes = lens[order]
    # lengths within a class differ by a factor of up to 1.4
    classes = np.ceil(2 * np.log2(sizes))
    edges = [0]
    for edge in np.flatnonzero(np.diff(classes)) + 1:
        shorter_by = sizes[edges[-1]] - sizes[edge]
        saved = shorter_by * (count - edge)
        if saved * token_bytes > limits.batch_bytes:
            edges.append(int(edge))
    edges.append(count)
    for start, stop in pairwise(edges):
        while start < stop:
            size = int(sizes[start])
            row_bytes = size * token_bytes
            step = max(1, limits.gather // row_bytes)
            end = min(start + step, stop)
            similar = np.sort(order[start:end])
            groups.append((similar, size))
            start += step
    return groups


def decode_batch(meta: AttnMeta, group: int, spec: AttnSpec, rows: Rows, longest: int, dtype: torch.dtype) -> SdpaBatch:
    """Return the batch of rows with one token, in which token r is the query of row r.

    Exact lengths are on the device only; ``longest`` is their upper bound.
    """
    device = meta.table.device
    window = spec.window
    pick = rows if isinstance(rows, slice) else torch.from_numpy(rows).to(device)
    lengths = meta.kv_len[group][pick].long()
    last = (lengths - 1).clamp_(min=0)
    last = last.unsqueeze(1)
    width = _multiple_of_8(longest)
    pos = torch.arange(width, device=device).unsqueeze(0)
    if window is not None:
        first = last - (window - 1)
        pos = pos + first.clamp_(min=0)
    existing = torch.minimum(pos, last)
    slots = slots_of(meta, group, meta.slots[pick], existing)
    mask = torch.zeros(slots.shape, dtype=dtype, device=device)
    mask.masked_fill_(pos > last, -torch.inf)
    mask = mask[:, None, None]
    ahead = None
    if spec.alibi is not None:
        distance = (pos - last).float()
        ahead = distance[:, None, None]
    count = len(slots)
    return SdpaBatch(count, 1, pick, slots, mask, ahead)


def _multiple_of_8(keys: int) -> int:
    """Round a number of keys up to a multiple of 8, as the masks of kernels on a GPU need it."""
    return -(-keys // 8) * 8


def slots_of(meta: AttnMeta, group: int, rows: Tensor, pos: Tensor) -> Tensor:
    """Return the flat cache slots i64 [B, L] of positions i64 [B, L] of the sequences in slots ``rows`` i64 [B]."""
    tables = meta.table[group].index_select(0, rows)
    blocks = tables.gather(1, pos // meta.block)
    return blocks.long() * meta.block + pos % meta.block


def prefill_pieces(meta: AttnMeta, group: int, window: int | None, causal: bool, pairs: int) -> list[KVPiece]:
    """Return the rows after the decode rows, divided if a row has too many query-key pairs for one mask.

    A mask has at most ``pairs`` pairs.  With ``causal``, a row from position 0 that needs no mask except the causal one
    is not divided.
    """
    first_row = meta.decode_rows
    sees = meta.host_sees
    start = first_row
    pieces = []
    q_lens = meta.host_q_len[first_row:].tolist()
    kv_lens = meta.host_kv_len[group, first_row:].tolist()
    lengths = zip(q_lens, kv_lens, strict=True)
    for row, (n, kv) in enumerate(lengths, first_row):
        pos = kv - n
        ahead = False
        if sees is not None:
            own = np.arange(pos, pos + n)
            later = sees[start : start + n] > own
            ahead = bool(later.any())
        in_window = window is None or n <= window
        whole = causal and not ahead and pos == 0 and n > 1 and in_window
        step = n if whole else max(1, pairs // max(kv, 1))
        for i in range(0, n, max(step, 1)):
            count = min(step, n - i)
            begin = start + i
            first_pos = pos + i
            first = 0
            if window is not None:
                first = max(0, first_pos + 1 - window)
            last = first_pos + count - 1
            if ahead and sees is not None:
                seen = sees[begin : begin + count]
                last = int(seen.max())
            piece = KVPiece(row, begin, count, first_pos, first, last, whole)
            pieces.append(piece)
        start += n
    return pieces


def join(pieces: list[KVPiece], price: int, pairs: int, tokens: int) -> list[list[KVPiece]]:
    """Join pieces of similar size into batches.

    The padding of a batch must cost less than the ``price`` of another batch.  A batch has at most ``pairs`` query-key
    pairs and gathers at most ``tokens`` tokens.
    """
    groups: list[list[KVPiece]] = []
    exact = queries = keys = 0
    largest_first = sorted(pieces, key=lambda p: (p.n, p.keys), reverse=True)
    for piece in largest_first:
        own = piece.n * piece.keys
        rows = len(groups[-1]) + 1 if groups else 0
        q = max(queries, piece.n)
        k = max(keys, piece.keys)
        exact += own
        padded = rows * q * k
        allowed = min(exact + price * rows, pairs)
        if rows and padded <= allowed and rows * k <= tokens:
            groups[-1].append(piece)
            queries = q
            keys = k
        else:
            groups.append([piece])
            exact = own
            queries = piece.n
            keys = piece.keys
    return groups


def prefill_batch(
    meta: AttnMeta, group: int, spec: AttnSpec, pieces: list[KVPiece], dtype: torch.dtype | None
) -> SdpaBatch:
    """Return the batch of rows of several tokens.

    ``dtype`` None makes no mask, for rows that start at position 0 and are causal.
    """
    device = meta.table.device
    fields = np.array(pieces)
    row, start, n, pos, first, last, _ = fields.T[..., None]
    queries = int(n.max())
    keys = max(piece.keys for piece in pieces)
    if dtype is not None:
        keys = _multiple_of_8(keys)
    index = np.arange(queries)
    token = start + np.minimum(index, n - 1)
    begin = int(start[0, 0])
    tokens: slice | Tensor = slice(begin, begin + queries)
    real = out = None
    if len(pieces) > 1:
        tokens = torch.from_numpy(token.ravel()).to(device)
        filled = np.flatnonzero(index < n)
        real = torch.from_numpy(filled).to(device)
        out = tokens[real]

    def moved(column: np.ndarray) -> Tensor:
        return torch.from_numpy(column.copy()).to(device)

    index_of_key = torch.arange(keys, device=device)
    at = moved(first) + index_of_key  # position of each key, [B, Lk]
    row_slots = meta.slots[moved(row)[:, 0]]
    existing = torch.minimum(at, moved(last))
    slots = slots_of(meta, group, row_slots, existing)
    mask = ahead = None
    if dtype is not None:
        query = torch.arange(queries, device=device)
        query = torch.minimum(query, moved(n) - 1)
        asks = moved(pos) + query
        asks = asks.unsqueeze(2)  # position of each query, [B, Lq, 1]
        sees = asks
        if meta.host_sees is not None:
            seen = meta.host_sees[token]
            sees = torch.from_numpy(seen).to(device)
            sees = sees.unsqueeze(2)
        key = at.unsqueeze(1)
        hidden = key > sees
        if spec.window is not None:
            hidden |= key <= asks - spec.window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask.masked_fill_(hidden, -torch.inf)
        mask = mask.unsqueeze(1)
        if spec.alibi is not None:
            distance = (key - asks).float()
            ahead = distance.unsqueeze(1)
    return SdpaBatch(len(pieces), queries, tokens, slots, mask, ahead, real, out)
