"""A stand-in for FlashInfer, with the interface that the back end uses, for caches in pages of layout NHD."""

from stand_in_math import attend, check_cache, check_i32, keys_of, rows


class BatchPrefillWithPagedKVCacheWrapper:
    """A wrapper that is planned on the host, once a step for each kind of layer."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        assert kv_layout == "NHD" and not use_cuda_graph and backend in ("fa2", "fa3")
        self.backend, self.plans = backend, 0

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        host = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        check_i32(*host, paged_kv_indices)
        assert all(t.device.type == "cpu" for t in host), "a plan on the device's tensors waits for the device"
        assert len(paged_kv_indices) == int(paged_kv_indptr[-1]) and causal and not logits_soft_cap
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        # copies, because the library copies all of them but the indices to the device at once
        self.indptr, self.last, self.cu_q = (t.clone() for t in (paged_kv_indptr, paged_kv_last_page_len, qo_indptr))
        self.indices, self.shape = paged_kv_indices, (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.scale, self.left, self.dtypes = sm_scale, window_left, (q_data_type, kv_data_type)
        self.plans += 1

    def run(self, q, paged_kv_cache, *, out):
        k, v = paged_kv_cache
        check_cache(q, k, v)
        assert (q.shape[1], k.shape[2], q.shape[2], k.shape[1]) == self.shape and (q.dtype, k.dtype) == self.dtypes
        assert len(q) == int(self.cu_q[-1]) and out.shape == q.shape and out.is_contiguous()
        pages = self.indptr.diff()
        for i, x in enumerate(rows(q, self.cu_q)):
            line = self.indices[self.indptr[i] : self.indptr[i + 1]]
            n = int(pages[i] - 1) * k.shape[1] + int(self.last[i])
            got, _ = attend(x, keys_of(k, line, n), keys_of(v, line, n), self.scale, self.left)
            out[self.cu_q[i] : self.cu_q[i + 1]] = got.to(out.dtype)
        return out


__all__ = ["BatchPrefillWithPagedKVCacheWrapper"]
