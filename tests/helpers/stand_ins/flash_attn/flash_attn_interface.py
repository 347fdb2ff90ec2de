"""A stand-in for FlashAttention-2, with the interface that the back end uses, for caches in pages."""

import torch
from stand_in_math import attend, check_cache, check_i32, keys_of, rows


def _paged(queries, k, v, pages, lengths, softmax_scale, causal, window_size, softcap):
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    check_i32(pages, lengths)
    assert causal and window_size[1] in (-1, 0) and len(pages) == len(lengths) == len(queries)
    for q, line, length in zip(queries, pages, lengths.tolist(), strict=True):
        left = -1 if window_size == (-1, -1) else window_size[0]
        yield attend(q, keys_of(k, line, length), keys_of(v, line, length), softmax_scale, left, softcap)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    check_cache(q, k, v)
    check_i32(cu_seqlens_q, cu_seqlens_k)
    lengths, queries = cu_seqlens_k.diff(), rows(q, cu_seqlens_q)
    assert max_seqlen_q >= max(map(len, queries)) and max_seqlen_k >= int(lengths.max())
    assert int(cu_seqlens_q[-1]) == len(q), "total_q is not cu_seqlens_q[-1]"
    parts = list(_paged(queries, k, v, block_table, lengths, softmax_scale, causal, window_size, softcap))
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    out = out.to(q.dtype)
    return (out, lse.t().contiguous(), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    check_cache(q, k_cache, v_cache)
    assert q.dim() == 4 and k is None and v is None
    parts = list(_paged(q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale, causal, window_size, softcap))
    out, lse = (torch.stack(x) for x in zip(*parts, strict=True))
    out = out.to(q.dtype)
    return (out, lse.transpose(1, 2).contiguous()) if return_softmax_lse else out
