"""Attention of long rows over a 16-bit copy of one-byte keys and values, compared with attention over the bytes.

It runs on a CPU under Triton's interpreter (interpreted_attention.py) and on a GPU (plugins/test_kv_copies.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnSpec, GraphKey
from minivllm.device.layers.rotary import prepare_qk
from minivllm.testing.attention_world import make_meta

# heads, KV heads, dim_qk, dim_v, window, block
SHAPES = [
    (4, 2, 16, 16, None, 4), (4, 2, 128, 128, None, 32), (4, 2, 16, 16, 12, 4), (4, 1, 24, 40, None, 3),
    (2, 2, 80, 48, 40, 16), (6, 2, 64, 64, 33, 48),
]  # fmt: skip
ROWS = [(2, 1, 9), (0, 70, 70), (3, 9, 133), (1, 2, 12)]  # slot, queries, keys
NAN_BLOCK = 0  # the null block, which replaces blocks before a window


class Case:
    """A layer of KV group 1 of two, and rows of random keys and values whose blocks before the window are gone."""

    def __init__(self, fmt: Any, shape: tuple[Any, ...], device: str, dtype: str) -> None:
        from minivllm.plugins.attention.triton_backend import Triton

        heads, kv_heads, dim, dim_v, window, self.block = shape
        torch.manual_seed(dim)
        self.device, self.dtype = device, getattr(torch, dtype)
        spec = AttnSpec(heads, kv_heads, dim, dim_v, window=window)
        self.backend = Triton(None, AttentionContext(device, dtype, fmt, self.block, 4, 140, prepare_qk))
        per = -(-140 // self.block)
        cache: dict[str, torch.Tensor] = {}
        for name, t in self.backend.layout(spec, fmt, self.block).tensors.items():
            of = torch.rand(4 * per + 1, *t.shape) / 50 if "scale" in name else torch.randn(4 * per + 1, *t.shape) * 40
            if "scale" in name:
                of[NAN_BLOCK] = torch.nan
            cache[name] = of.to(getattr(torch, t.dtype)).to(device)
        self.layer = AttnLayer(0, 1, spec, cache)
        own = np.random.default_rng(dim).permutation(4 * per).reshape(4, per) + 1
        table = np.stack([np.zeros_like(own), own]).astype(np.int32)
        for slot, q_len, kv_len in ROWS:
            if window is not None:
                table[1, slot, : max(kv_len - q_len - window + 1, 0) // self.block] = NAN_BLOCK
        self.meta = make_meta(ROWS, table, self.block, device)
        self.q = torch.randn(sum(row[1] for row in ROWS), heads, dim).to(self.dtype).to(device)

    def run(self, key: GraphKey | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.q.new_full((*self.q.shape[:2], self.layer.spec.dim_v), torch.nan)
        lse = torch.full(self.q.shape[:2], torch.nan, device=self.device)
        self.backend.plan(self.meta, key or GraphKey())
        self.backend.forward(self.layer, self.q, self.meta, out, lse)
        return out, lse


def check(monkeypatch: Any, fmt: Any, shape: tuple[Any, ...], device: str, dtype: str, near: float) -> None:
    from minivllm.plugins.attention import triton_backend, triton_widen

    case, copies = Case(fmt, shape, device, dtype), []

    def widened(*given: Any) -> Any:
        copies.append(triton_widen.widened(*given))
        return copies[-1]

    monkeypatch.setattr(triton_backend, "widened", widened)
    bytes_read = case.run()
    assert not copies, "a copy for so few queries"
    monkeypatch.setattr(triton_widen, "LEAST", 0)
    monkeypatch.setattr(triton_widen, "PAYS", 0)
    copied = case.run()
    assert len(copies) == 1 and copies[0][0].cache["k"].dtype == case.dtype
    assert torch.equal(bytes_read[0][:1], copied[0][:1]), "a row that decodes reads the bytes"
    assert not torch.equal(bytes_read[0], copied[0]), "nothing was rounded: the copy was not read"
    for want, got in zip(bytes_read, copied, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=near, atol=near)
    rows = GraphKey("mixed", len(ROWS), len(case.q))
    case.meta.decode_rows = len(ROWS)  # as in a captured step
    assert torch.equal(case.run(rows)[0], bytes_read[0]) and len(copies) == 1, "a copy in a captured step"
    case.meta.decode_rows = 1
    monkeypatch.setattr(triton_widen, "_most_bytes", lambda device: 1000)
    assert torch.equal(case.run()[0], bytes_read[0]) and len(copies) == 1, "a copy that is too large"
