"""A needle among 64k tokens of a cache with one byte for each element: one key fits the query, and its value must
return.

The needle weighs a little more than all other tokens together, so sums of 64k small numbers matter.  Sums with 14 bits,
or in the cache's own dtype, would lose them.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnSpec, GraphKey
from minivllm.device.layers.rotary import prepare_qk
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.kvformat.plain import Bf16, Fp32
from minivllm.plugins.kvformat.scaled import Fp8KV, Int8KV
from minivllm.testing.attention_world import make_meta

TOKENS, BLOCK = 65_536, 64
SPEC = AttnSpec(heads=4, kv_heads=2, dim_qk=64, dim_v=64)
DEPTHS = (0, 777, 32_768, 60_001, TOKENS - 2)


def backend_on(device: str, fmt):
    dtype = "float32" if device == "cpu" else "bfloat16"
    ctx = AttentionContext(device, dtype, fmt, BLOCK, 4, TOKENS + BLOCK, prepare_qk)
    if device == "cpu":
        return Sdpa(None, ctx)
    from minivllm.plugins.attention.triton_backend import Triton

    return Triton(None, ctx)


def needle_found(device: str, fmt, depth: int, length: int) -> tuple[float, float]:
    """Return (share of the value in the result, error against float64) for a query of ``length`` tokens at the end."""
    backend, generator = backend_on(device, fmt), torch.Generator().manual_seed(depth)
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    k, v, q = draw(TOKENS, 2, 64), draw(TOKENS, 2, 64), draw(length, 4, 64)
    q[-1, 1] = q[-1, 0]
    sharp = (np.log(TOKENS) + 0.5 + 0.7) / SPEC.softmax_scale  # exp(N(0, 1)) is exp(0.5) on average
    k[depth, 0] = q[-1, 0] * sharp / q[-1, 0].square().sum()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    k, v, q = (x.to(device, dtype) for x in (k, v, q))
    blocks = TOKENS // BLOCK
    layout = backend.layout(SPEC, fmt, BLOCK)
    cache = {
        n: torch.zeros((blocks + 1, *t.shape), dtype=getattr(torch, t.dtype), device=device)
        for n, t in layout.tensors.items()
    }
    table = np.arange(1, blocks + 1, dtype=np.int32).reshape(1, 1, blocks)
    layer = AttnLayer(0, 0, SPEC, cache)
    fmt.store(cache, k, v, torch.arange(BLOCK, TOKENS + BLOCK, device=device))
    meta, out = make_meta([(0, length, TOKENS)], table, BLOCK, device), torch.empty_like(q)
    backend.plan(meta, GraphKey())
    backend.forward(layer, q, meta, out)
    got, value = out[-1, 0].double().cpu(), v[depth, 0].double().cpu()
    scores = (k[:, 0].double().cpu() @ q[-1, 0].double().cpu()) * SPEC.softmax_scale
    want = scores.softmax(0) @ v[:, 0].double().cpu()
    return float(got @ value / (value @ value)), float((got - want).norm() / want.norm())


@pytest.mark.parametrize("fmt", [Fp32(), Int8KV(), Fp8KV()], ids=["fp32", "int8", "fp8"])
def test_a_needle_among_64k_tokens_is_found_in_every_format(fmt):
    limit = {Fp32: 1e-4, Int8KV: 0.02, Fp8KV: 0.1}[type(fmt)]
    for depth in DEPTHS[1:4:2]:
        found, off = needle_found("cpu", fmt, depth, 1)
        assert 0.5 < found < 0.85 and off < limit, (depth, found, off)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="no GPU")
@pytest.mark.parametrize("length", [1, 200])
@pytest.mark.parametrize("fmt", [Bf16(), Int8KV(), Fp8KV()], ids=["bf16", "int8", "fp8"])
def test_a_needle_among_64k_tokens_is_found_by_the_kernels(fmt, length):
    limit = {Bf16: 0.02, Int8KV: 0.03, Fp8KV: 0.1}[type(fmt)]
    for depth in DEPTHS:
        found, off = needle_found("cuda", fmt, min(depth, TOKENS - length - 1), length)
        assert 0.5 < found < 0.85 and off < limit, (depth, found, off)
