"""Keys and values of one byte on a GPU: the stored bytes, and the values that long rows read."""

from __future__ import annotations

import copied_keys
import pytest
import torch

from minivllm.core.interfaces.attention import AttentionContext, AttnLayer, AttnSpec, GraphKey
from minivllm.device.layers.rotary import prepare_qk
from minivllm.plugins.kvformat.scaled import Fp8KV, Int8KV
from minivllm.testing.attention_world import make_meta

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("fmt", [Fp8KV(), Int8KV()], ids=["fp8", "int8"])


@FORMATS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", copied_keys.SHAPES)
def test_a_copy_of_bytes_gives_the_long_rows_what_the_bytes_give(fmt, dtype, shape, monkeypatch):
    copied_keys.check(monkeypatch, fmt, shape, "cuda", dtype, 2e-2 if dtype == "bfloat16" else 4e-3)


@FORMATS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_written_is_what_the_format_stores_however_large_it_is(fmt, dtype):
    """torch multiplies by the inverse of 448 or 127: scales may have other last bits, and few elements other codes."""
    from minivllm.plugins.attention.triton_backend import Triton

    torch.manual_seed(0)
    spec, tokens, kept = AttnSpec(8, 4, 128, 64), 2048, getattr(torch, dtype)
    backend = Triton(None, AttentionContext("cuda", dtype, fmt, 32, 2, tokens, prepare_qk))
    layout = backend.layout(spec, fmt, 32).tensors
    made, want = (
        {n: torch.zeros((66, *t.shape), dtype=getattr(torch, t.dtype), device="cuda") for n, t in layout.items()}
        for _ in range(2)
    )
    table = torch.arange(1, 66, dtype=torch.int32).repeat(1, 2, 1).numpy()
    meta = make_meta([(0, tokens, tokens)], table, 32, "cuda")
    size = torch.logspace(-38, 30, tokens, device="cuda")[:, None, None]
    k, v = ((torch.randn(tokens, 4, n, device="cuda") * size).to(kept) for n in (128, 64))
    backend.plan(meta, GraphKey())
    backend.write(AttnLayer(0, 0, spec, made), torch.zeros(tokens, 8, 128, device="cuda").to(kept), k, v, meta, None)
    fmt.store(want, k, v, meta.slot_map[0])
    for name, x in want.items():
        if name.endswith("_scale"):
            torch.testing.assert_close(made[name], x, rtol=2e-7, atol=1e-44)
        else:
            other = (made[name].view(torch.uint8) != x.view(torch.uint8)).float().mean()
            assert other < 2e-3, name
