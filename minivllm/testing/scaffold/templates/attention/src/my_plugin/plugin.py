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
            blocks = meta.table[layer.group, meta.slots[row], : -(-length // meta.block)].long()
            k, v = self.ctx.kv_format.load(layer.cache, blocks, torch.float32)  # [blocks * block, kv_heads, dim]
            # cut before the product: entries behind a row's end may be NaN
            k, v = (x[:length].repeat_interleave(spec.heads // spec.kv_heads, dim=1) for x in (k, v))
            s = torch.einsum("qhd,khd->hqk", q[start : start + n].float(), k) * spec.softmax_scale
            key = torch.arange(length, device=q.device)
            query = torch.arange(length - n, length, device=q.device)[:, None]  # the last n positions
            hidden = key > query
            if spec.window is not None:
                hidden |= key <= query - spec.window
                # blocks before the window are the null block, which may hold NaN, and 0 * NaN is NaN
                v = v.masked_fill(hidden.all(dim=0)[:, None, None], 0)
            p = s.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            out[start : start + n] = torch.einsum("hqk,khd->qhd", p, v).to(out.dtype)
            start += n
