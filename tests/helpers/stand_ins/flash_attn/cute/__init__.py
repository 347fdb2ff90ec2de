"""A stand-in for FlashAttention-4, with the interface that the back end uses, for caches in pages."""

import torch
from stand_in_math import attend, check_cache, check_i32, keys_of, rows


def key_tiles(dim, local):
    """Return the tokens of a key tile of the Hopper kernels.

    Pages of that size are loaded including the part behind a row's end.
    """
    return 128 if dim <= 128 else (96 if local else 112) if dim <= 192 else 64 if local else 80


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    return_lse=False,
):
    check_cache(q, k, v)
    check_i32(cu_seqlens_q, seqused_k, page_table)
    batch, page, local = len(cu_seqlens_q) - 1, k.shape[1], window_size[0] is not None
    assert page_table.shape[0] == batch and seqused_k.shape == (batch,) and cu_seqlens_k is None
    assert page != key_tiles(q.shape[2], local), "this page would be read behind the row's end"
    assert num_splits == 1 and causal and window_size[1] in (None, 0)
    assert learnable_sink is None or learnable_sink.shape == (q.shape[1],)
    queries, lengths = rows(q, cu_seqlens_q), seqused_k.tolist()
    assert max_seqlen_q >= max(map(len, queries)) and max_seqlen_k >= max(lengths)
    left = window_size[0] if local else -1
    parts = [
        attend(x, keys_of(k, line, n), keys_of(v, line, n), softmax_scale, left, softcap, learnable_sink)
        for x, line, n in zip(queries, page_table, lengths, strict=True)
    ]
    out, lse = (torch.cat(x) for x in zip(*parts, strict=True))
    behind = len(q) - len(out)  # tokens that belong to no row, as in a captured step; there is memory for their results
    out, lse = (torch.cat([x, x.new_zeros(behind, *x.shape[1:])]) for x in (out, lse))
    return out.to(q.dtype), lse.t().contiguous() if return_lse else None
