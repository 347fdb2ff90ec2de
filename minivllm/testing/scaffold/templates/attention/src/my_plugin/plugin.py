"""Attention row by row: gather the keys and values of a row, softmax in float32.  It is slow and easy to verify."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.plugin import AttentionBackend, AttnLayer, AttnMeta, PluginError


class MyPlugin(AttentionBackend):
    """``write``, which is inherited, has stored this step's keys and values before ``forward`` is called."""

    def forward(
        self,
        layer: AttnLayer,
        q: Tensor,
        meta: AttnMeta,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        if lse is not None:
            raise PluginError("my-plugin computes no lse: expected lse=None")
        spec = layer.spec
        start = 0
        for row, n in enumerate(meta.host_q_len.tolist()):
            length = int(meta.kv_len[layer.group, row])  # with this step's tokens
            used = -(-length // meta.block)
            blocks = meta.table[layer.group, meta.slots[row], :used].long()
            k, v = self.ctx.kv_format.load(layer.cache, blocks, torch.float32)  # [blocks * block, kv_heads, dim]
            # cut before the product: entries after a row's end may be NaN
            queries_per_kv = spec.heads // spec.kv_heads
            k = k[:length].repeat_interleave(queries_per_kv, dim=1)
            v = v[:length].repeat_interleave(queries_per_kv, dim=1)
            new = q[start : start + n].float()
            s = torch.einsum("qhd,khd->hqk", new, k) * spec.softmax_scale
            key = torch.arange(length, device=q.device)
            query = torch.arange(length - n, length, device=q.device)[:, None]  # the last n positions
            hidden = key > query
            if spec.window is not None:
                hidden |= key <= query - spec.window
                # blocks before the window are the null block, which may hold NaN, and 0 * NaN is NaN
                unseen = hidden.all(dim=0)[:, None, None]
                v = v.masked_fill(unseen, 0)
            p = s.masked_fill(hidden, -torch.inf)
            result = torch.einsum("hqk,khd->qhd", p.softmax(dim=-1), v)
            out[start : start + n] = result.to(out.dtype)
            start += n
