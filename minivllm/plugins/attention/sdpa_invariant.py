"""The reference's attention in its batch-invariant form, for a CPU: a query's bits depend on its row's tokens alone.

    queries of a row, heads of a KV head together ──► items of ``LINES`` lines           q [LINES, D]
    keys from the cache, cut at multiples of ``KEYS`` ──► s = q k^T by pairs of an item and a tile    [LINES, KEYS]
    peak over all tiles, p = exp(s - peak) ──► p v by pairs, added up tile after tile, first to last

The tiles lie at absolute positions, so a chunk, a prefix hit and a whole prompt meet the same ones; a tile that a query
does not see adds exact zeros.  All of it is float32.  Products are calls on ``PAIRS`` pairs, always of one shape; that
neither a line's nor a pair's place in the call matters is tried once for each head size (``same_at_every_place``).
The column of ones that stands behind the values makes the softmax's denominator a sum of the same order.

Reference: ``sdpa.attend_explicit``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
from minivllm.core.interfaces.kvformat import KVFormat
from minivllm.errors import PluginError
from minivllm.layers.invariant import same_at_every_place

LINES, KEYS, PAIRS = 16, 64, 16
MOST_PAIRS = 1024  # attended at once: bounds the memory, without influence on results


@dataclass(frozen=True)
class Items:
    """I items that see up to J tiles of keys; those that only fill up the calls have no ``real`` line.

    token i64 [I, LINES] of the step, head i64 [I, LINES] within its KV head's group, real bool [I, LINES],
    slots i64 [I, J * KEYS] of the cache, hidden bool [I, 1, J, LINES, KEYS].
    """

    token: Tensor
    head: Tensor
    real: Tensor
    slots: Tensor
    hidden: Tensor


def make_items(meta: AttnMeta, group: int, spec: AttnSpec) -> list[Items]:
    """Cut a step into items, those of a similar number of tiles together."""
    heads = spec.heads // spec.kv_heads
    q_len, kv_len = meta.q_len.numpy().astype(np.int64), meta.kv_len[group].numpy().astype(np.int64)
    counts = -(-q_len * heads // LINES)
    row = np.repeat(np.arange(len(q_len)), counts)
    first_line = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * LINES
    line = first_line[:, None] + np.arange(LINES)
    last_line = (q_len * heads - 1)[row][:, None]
    real, line = line <= last_line, np.minimum(line, last_line)
    token = (np.cumsum(q_len) - q_len)[row][:, None] + line // heads
    position = np.maximum((kv_len - q_len)[row][:, None] + line // heads, 0)
    low = np.zeros(len(row), np.int64)
    if spec.window is not None:
        low = np.maximum(position[:, 0] - spec.window + 1, 0)
    tiles = sizes(position[:, -1] // KEYS - low // KEYS + 1)
    found = []
    for n in np.unique(tiles).tolist():
        at = np.flatnonzero(tiles == n)
        whole = PAIRS // gcd(PAIRS, n * spec.kv_heads)
        step = max(whole, MOST_PAIRS // (n * spec.kv_heads) // whole * whole)
        for part in (at[i : i + step] for i in range(0, len(at), step)):
            fill = -len(part) % whole
            pick = np.concatenate([part, np.repeat(part[-1:], fill)])
            shown = real[pick]
            shown[len(part) :] = False
            found.append(
                _items(
                    meta, group, spec, row[pick], token[pick], line[pick] % heads, shown, position[pick], low[pick], n
                )
            )
    return found


def sizes(n: np.ndarray) -> np.ndarray:
    """Rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24 ...: few different ones, at most half more."""
    power = 1 << np.ceil(np.log2(n)).astype(np.int64)
    return np.where((n > 2) & (n <= power * 3 // 4), power * 3 // 4, power)


def _items(
    meta: AttnMeta,
    group: int,
    spec: AttnSpec,
    row: np.ndarray,
    token: np.ndarray,
    head: np.ndarray,
    real: np.ndarray,
    position: np.ndarray,
    low: np.ndarray,
    n: int,
) -> Items:
    key = (low // KEYS * KEYS)[:, None] + np.arange(n * KEYS)
    hidden = key[:, None] > position[:, :, None]
    if spec.window is not None:
        hidden |= key[:, None] <= position[:, :, None] - spec.window
    hidden = hidden.reshape(len(row), LINES, n, KEYS).swapaxes(1, 2)[:, None]
    key = torch.from_numpy(np.clip(key, low[:, None], position[:, -1:]))  # nothing is read that nobody sees
    blocks = meta.table[group].index_select(0, meta.slots[torch.from_numpy(row)]).gather(1, key // meta.block)
    slots = blocks.long() * meta.block + key % meta.block
    given = (torch.from_numpy(np.ascontiguousarray(x)) for x in (token, head, real))
    return Items(*given, slots, torch.from_numpy(np.ascontiguousarray(hidden)))


def attend(fmt: KVFormat, layer: AttnLayer, q: Tensor, meta: AttnMeta, out: Tensor, lse: Tensor | None) -> None:
    """As ``AttentionBackend.forward``."""
    spec = layer.spec
    key = ("invariant", layer.group, spec.window, spec.heads)
    every = meta.work.get(key)
    if every is None:
        every = meta.work[key] = make_items(meta, layer.group, spec)
    cache = {name: t.view(-1, 1, *t.shape[2:]) for name, t in layer.cache.items()}
    for items in every:
        k, v = fmt.load(cache, items.slots, torch.float32)
        result, total = _softmax_product(layer, q, k, v[..., : spec.dim_v], items)
        token, head = items.token[items.real], items.head[items.real]
        heads = (len(q), spec.kv_heads, -1)
        out.view(*heads, spec.dim_v)[token, :, head] = result.transpose(1, 2)[items.real].to(out.dtype)
        if lse is not None:
            lse.view(*heads)[token, :, head] = total.transpose(1, 2)[items.real]


def _softmax_product(layer: AttnLayer, q: Tensor, k: Tensor, v: Tensor, items: Items) -> tuple[Tensor, Tensor]:
    """k and v [I, J * KEYS, kv_heads, dim] float32 -> result [I, kv_heads, LINES, dim_v], lse [I, kv_heads, LINES]."""
    spec, (n, lines) = layer.spec, items.token.shape
    tiles, kvh = items.hidden.shape[2], spec.kv_heads
    queries = q.view(len(q), kvh, -1, spec.dim_qk)[items.token, :, items.head].float().transpose(1, 2)
    queries = queries.unsqueeze(2).expand(n, kvh, tiles, lines, spec.dim_qk).reshape(-1, lines, spec.dim_qk)
    s = products(queries, _by_tile(k, spec.dim_qk).transpose(1, 2)).view(n, kvh, tiles, lines, KEYS)
    s.mul_(spec.softmax_scale)
    if spec.softcap is not None:
        s = s.div_(spec.softcap).tanh_().mul_(spec.softcap)
    s.masked_fill_(items.hidden, -torch.inf)
    peak = s.amax(dim=(2, 4), keepdim=True)
    sink = None
    if spec.sinks:
        sink = layer.sinks.view(kvh, -1)[:, items.head].transpose(0, 1).reshape(n, kvh, 1, lines, 1)
        peak = torch.maximum(peak, sink)
    p = s.sub_(peak).exp_().view(-1, lines, KEYS)
    ones = v.new_zeros(*v.shape[:-1], width(spec.dim_v))
    ones[..., : spec.dim_v], ones[..., spec.dim_v] = v, 1.0
    parts = products(p, _by_tile(ones, ones.shape[-1])).view(n, kvh, tiles, lines, -1)
    acc = parts[:, :, 0]
    for j in range(1, tiles):
        acc = acc + parts[:, :, j]
    total, peak = acc[..., spec.dim_v : spec.dim_v + 1], peak[:, :, 0]
    if sink is not None:
        total = total + (sink[:, :, 0] - peak).exp_()
    return acc[..., : spec.dim_v] / total, (peak + total.log()).squeeze(-1)


def width(dim: int) -> int:
    """Columns of the values, the one of ones included: libraries treat the columns behind a multiple of 16 otherwise,
    and with them, in narrow matrices, the lines."""
    return -(-(dim + 1) // 16) * 16


def _by_tile(x: Tensor, dim: int) -> Tensor:
    """[I, J * KEYS, kv_heads, dim] -> [I * kv_heads * J, KEYS, dim]."""
    return x.view(len(x), -1, KEYS, x.shape[2], dim).permute(0, 3, 1, 2, 4).reshape(-1, KEYS, dim)


def products(a: Tensor, b: Tensor) -> Tensor:
    """a [P, m, k], b [P, k, n] -> [P, m, n], P a multiple of PAIRS."""
    check(*a.shape[1:], b.shape[2], b.is_contiguous(), torch.get_num_threads())
    out = a.new_empty(len(a), a.shape[1], b.shape[2])
    for i in range(0, len(a), PAIRS):
        torch.bmm(a[i : i + PAIRS], b[i : i + PAIRS], out=out[i : i + PAIRS])
    return out


@lru_cache(maxsize=256)
def check(m: int, k: int, n: int, contiguous: bool, threads: int) -> None:
    """PluginError if the library's product of this shape, with so many threads, goes by the place in the call."""
    b = torch.randn(k, n, generator=torch.Generator().manual_seed(1))
    b = b.expand(PAIRS, k, n).contiguous() if contiguous else b.t().expand(PAIRS, n, k).contiguous().transpose(1, 2)
    if not same_at_every_place(lambda a: torch.bmm(a, b), torch.empty(PAIRS, m, k)):
        raise PluginError(
            f"sdpa: batch_invariant=true: on this machine a product of {m} x {k} x {n} gives a row other bits by its "
            f"place in the call: want batch_invariant=false, or another number of threads than {threads}"
        )
