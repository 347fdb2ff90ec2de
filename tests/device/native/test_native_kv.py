"""Attention of captured CPU steps over keys and values in int8: what is written, and what is made of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_runs import each_isa, needs_library

from minivllm.core.interfaces.attention import AttnSpec
from minivllm.device.native.program import Program, address
from minivllm.plugins.kvformat.scaled import Int8KV

pytestmark = needs_library
__all__ = ["each_isa"]


@pytest.mark.parametrize("width", [1, 7, 8, 20, 64, 129])
def test_keys_and_values_in_int8_have_the_bits_of_the_format(width, each_isa):
    """Zeros, NaN, and values too small for a scale among them; and attention over them is that over what is loaded."""
    fmt, n = Int8KV(), 6
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(n, 3, 2, width, generator=generator) * 10.0 ** torch.arange(-3, 3)[:, None, None, None]
    x[:, 0] = torch.randn(n, 2, width, generator=generator)  # queries
    x[1, 1:], x[3, 1:], x[5, 2, 1, -1] = 0, x[3, 1:] * 1e-38, torch.nan
    layout = fmt.layout(AttnSpec(2, 2, width, width), 4).tensors
    made, want = (
        {m: torch.zeros((4, *t.shape), dtype=getattr(torch, t.dtype)) for m, t in layout.items()} for _ in "ab"
    )
    slots = torch.tensor([8, 9, 10, 11, 4, 5])
    fmt.store(want, x[:, 1], x[:, 2], slots)
    columns = {
        "tokens": torch.zeros(1, n, dtype=torch.int32),
        "longest": n,
        "table": torch.tensor([[[2, 1]]], dtype=torch.int32),
        "slots": 1,
        "blocks": 2,
        "block": 4,
        "stopped": torch.zeros(1, dtype=torch.bool),
    }
    program, out = Program(1, n, columns), torch.empty(n, 2 * width)
    names = {"keys": "k", "values": "v", "key_scales": "k_scale", "value_scales": "v_scale"}
    sizes = {"heads": 2, "kv_heads": 2, "dim_qk": width, "dim_v": width, "softmax_scale": 0.5, "kv_format": 3}
    registers = {"in_": program.register(x.view(n, -1)), "out": program.register(out)}
    program.add("attend", **registers, **sizes, **{field: made[name] for field, name in names.items()})
    program.forward(address(np.array([1, 0, 0, n, 0], np.int64)))
    program.close()
    lost = want["v_scale"].isnan()
    assert lost.sum() == 1 and torch.equal(lost, made["v_scale"].isnan())
    for cache in (want, made):  # of a head that is NaN the elements do not count
        cache["v_scale"][lost], cache["v"][lost] = 0, 0
    for name, tensor in want.items():
        assert torch.equal(tensor, made[name]), name
    assert out[-1, width:].isnan().all()
    k, v = (t.transpose(0, 1) for t in fmt.load(want, torch.tensor([2, 1]), torch.float32))
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    scores = (0.5 * x[:, 0].transpose(0, 1) @ k[:, :n].transpose(1, 2)).masked_fill(~causal, -torch.inf)
    answer = (scores.softmax(-1) @ v[:, :n]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(out[:-1], answer[:-1], rtol=1e-4, atol=1e-4)
