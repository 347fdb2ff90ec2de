"""Attention over a paged NHD cache by its definition, in float32, which the stand-ins for libraries compute.

The stand-ins accept and refuse the same inputs as the libraries.  They are written from the libraries' documentation,
so that the code that calls the real libraries can be tested without a GPU.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch


def keys_of(cache, pages, length):
    """Return the first ``length`` tokens [length, kv_heads, dim] of a row whose pages are ``pages``.

    No other slot is read.
    """
    page = cache.shape[1]
    at = torch.arange(length)
    return cache[pages[at // page].long(), at % page].float()


def attend(q, k, v, scale, left, softcap=0.0, sink=None):
    """Return out [n, heads, dim] and the natural logarithm of the denominator [n, heads], both float32.

    The queries q [n, heads, dim] are the last n of len(k) positions.  A query sees ``left`` positions before its own,
    or all for -1.
    """
    n, length = len(q), len(k)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = torch.einsum("nhd,lhd->nhl", q.float(), k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    own = torch.arange(length - n, length)[:, None]
    key = torch.arange(length)
    seen = (key <= own) & ((key >= own - left) if left >= 0 else True)
    s = s.masked_fill(~seen[:, None], -math.inf)
    total = s if sink is None else torch.cat([s, sink.float()[None, :, None].expand(n, -1, 1)], dim=2)
    lse = total.logsumexp(2)
    p = (s - lse[..., None]).exp().to(v.dtype)
    return torch.einsum("nhl,lhd->nhd", p, v), lse


def rows(q, cu_q):
    """Yield the queries of each row."""
    edges = cu_q.tolist()
    return [q[a:b] for a, b in pairwise(edges)]


def check_cache(q, k, v):
    assert k.shape == v.shape and k.shape[3] == q.shape[-1], "k and v: [pages, page, kv_heads, dim] of q's dim"
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16), "one dtype, of 16 bits"
    assert q.shape[-2] % k.shape[2] == 0 and k.stride(3) == v.stride(3) == q.stride(-1) == 1


def check_i32(*tensors):
    for t in tensors:
        assert t.dtype == torch.int32 and t.stride(-1) == 1, (
            f"{t.dtype} with strides {t.stride()}: expected dense int32"
        )
