"""XQA, which reads tensors by their addresses, so that all must be dense."""

from stand_in_math import attend, check_cache, check_i32, keys_of

SEMAPHORES = 8 << 20  # bytes at the start of the workspace


def xqa_batch_decode_with_kv_cache(
    query,
    kv_cache,
    workspace_buffer,
    block_tables,
    seq_lens,
    max_seq_len,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    window_left=-1,
    out=None,
    sinks=None,
    kv_layout="NHD",
    enable_pdl=None,
    q_len_per_req=1,
    o_scale=1.0,
):
    k, v = kv_cache
    check_cache(query, k, v)
    check_i32(block_tables, seq_lens)
    assert kv_layout == "NHD" and k.shape[1] in (16, 32, 64, 128) and k.shape[3] % 16 == 0 and k.shape[3] <= 256
    assert query.shape[1] // k.shape[2] <= 32 and sinks is None and isinstance(bmm1_scale, float)
    for t in (query, out, block_tables, seq_lens):
        assert t.is_contiguous(), "it is read by its address"
    assert out.shape == query.shape and out.dtype == query.dtype
    assert len(block_tables) == len(seq_lens) == len(query) and block_tables.shape[1] * k.shape[1] >= seq_lens.max()
    assert len(workspace_buffer) > SEMAPHORES and not workspace_buffer[: 1 << 16].any(), "semaphores are not 0"
    for i, n in enumerate(seq_lens.tolist()):
        keys, values = (keys_of(x, block_tables[i], n) for x in (k, v))
        out[i] = attend(query[i : i + 1], keys, values, bmm1_scale, window_left)[0][0].to(out.dtype)
    return out
