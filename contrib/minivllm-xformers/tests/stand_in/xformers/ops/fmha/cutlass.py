"""The CUTLASS operator, which calls torch's kernel."""

from types import SimpleNamespace

import torch


class FwOp:
    @classmethod
    def apply(cls, inp, needs_gradient):
        bias = inp.attn_bias
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            inp.query,
            inp.key,
            inp.value,
            None,
            bias.q_seqinfo.seqstart,
            bias.k_seqinfo.seqstart,
            bias.q_seqinfo.max_seqlen,
            bias.k_seqinfo.max_seqlen,
            inp.p,
            2,
            needs_gradient,
            scale=inp.scale,
            seqlen_k=bias.k_seqinfo.seqlen,
            window_size=getattr(bias, "_window_size", None),
        )
        return out, SimpleNamespace(lse=lse)
