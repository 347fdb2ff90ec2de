"""Torch's ``_efficient_attention_forward``, the kernel of xFormers' CUTLASS operator, by its definition on a CPU."""

from __future__ import annotations

import torch

BOTTOM_RIGHT = 2  # custom_mask_type of masks that are causal from the bottom right corner


def efficient_attention_forward(
    query,
    key,
    value,
    bias,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    custom_mask_type,
    compute_log_sumexp=False,
    *,
    scale=None,
    seqlen_k=None,
    window_size=None,
):
    """Return (output, logsumexp, and values that are not used) of q, k, v [1, tokens, heads, dim] in float32.

    Row b has the queries from cu_seqlens_q[b] and the keys from cu_seqlens_k[b] to the next start, or only seqlen_k[b]
    keys.  logsumexp is [rows, heads, max_seqlen_q rounded up to a multiple of 32].
    """
    assert bias is None and dropout_p == 0 and custom_mask_type == BOTTOM_RIGHT and compute_log_sumexp
    assert query.is_contiguous() and query.dtype == key.dtype == value.dtype
    rows, heads = len(cu_seqlens_q) - 1, query.shape[2]
    out = query.new_full((1, query.shape[1], heads, value.shape[3]), float("nan"))
    lse = torch.full((rows, heads, -(-max_seqlen_q // 32) * 32), float("nan"))
    for b in range(rows):
        queries = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        start, stop = int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1])
        stop = stop if seqlen_k is None else start + int(seqlen_k[b])
        q, k, v = (x.float() for x in (query[0, queries], key[0, start:stop], value[0, start:stop]))
        assert len(q) <= max_seqlen_q and len(k) <= max_seqlen_k and len(q) <= len(k)
        own = torch.arange(len(k) - len(q), len(k))[:, None]
        seen = torch.arange(len(k)) <= own
        if window_size is not None:
            seen &= torch.arange(len(k)) > own - window_size
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
        norm = scores.logsumexp(2)
        out[0, queries] = torch.einsum("hqk,khd->qhd", (scores - norm[..., None]).exp(), v).to(out.dtype)
        lse[b, :, : len(q)] = norm
    unused = torch.empty(0, dtype=torch.int64)
    return out, lse, unused, unused, max_seqlen_q, max_seqlen_k
