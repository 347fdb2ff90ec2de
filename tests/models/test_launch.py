"""How kernels are launched: before the one before has ended, but never before what they read is there."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from minivllm.core.interfaces.attention import AttnLayer, AttnSpec, GraphKey
from minivllm.kernels import launch
from minivllm.plugins.attention import triton_backend, triton_decode, triton_prefill, triton_write
from minivllm.testing.attention_world import make_meta


def test_a_kernel_names_no_argument_that_it_does_not_have():
    with pytest.raises(TypeError, match="no argument rows"):
        launch.kernel("x", "rows")(lambda x, n: None)


class Launches(list):
    """In the place of a kernel: what each launch was given."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.append(kwargs.get("EARLY"))


def test_kernels_start_early_from_the_second_layer_of_the_same_work_on(monkeypatch):
    """Before that nobody has waited for the step's positions and slots, nor for the dealing of a group's work."""
    deal, decode, write, others = Launches(), Launches(), Launches(), Launches()
    for module, name, kernel in (
        (triton_decode, "_deal", deal),
        (triton_decode, "_decode", decode),
        (triton_decode, "_merge", others),
        (triton_write, "_write", write),
        (triton_prefill, "_prefill", others),
    ):
        monkeypatch.setattr(module, name, kernel)
    backend = triton_backend.Triton.__new__(triton_backend.Triton)
    backend.ctx = SimpleNamespace(batch_invariant=False)
    layers = [
        AttnLayer(i, group, AttnSpec(4, 2, 64, 64, window=window))
        for i, (group, window) in enumerate([(0, None), (1, 8), (0, None), (1, 8)])
    ]
    for layer in layers:
        layer.cache = {name: torch.zeros(8, 16, 2, 64) for name in "kv"}
    table = np.ones((2, 4, 64), np.int32)

    def step(*q_len):
        for kernel in (deal, decode, write):
            kernel.clear()
        meta = make_meta([(slot, n, n + 3) for slot, n in enumerate(q_len)], table, 16, "cpu")
        backend.plan(meta, GraphKey())
        q, k = torch.zeros(sum(q_len), 4, 64), torch.zeros(sum(q_len), 2, 64)
        for layer in layers:
            backend.write(layer, q, k, k, meta, None)
            backend.forward(layer, q, meta, torch.zeros_like(q))
        return len(deal), list(decode), list(write)

    for _ in range(2):  # a step owes nothing to the one before
        assert step(1, 1) == (2, [False, False, True, True], [False, True, True, True])
    assert step(1, 1, 600) == (2, [False, False, True, True], [False] * 4), "large programs gain nothing"
    assert step(600) == (0, [], [False] * 4), "nobody has waited"


@pytest.mark.parametrize("invariant", [True, False])
def test_where_bits_count_scores_are_no_fused_multiply_adds(monkeypatch, invariant):
    """The compiler makes them of a tile of keys that is not masked, and cannot of one that is."""
    asked = []

    class Launch:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: asked.append(kwargs["enable_fp_fusion"])

    monkeypatch.setattr(triton_prefill, "_prefill", Launch())
    backend = triton_backend.Triton.__new__(triton_backend.Triton)
    backend.ctx = SimpleNamespace(batch_invariant=invariant)
    layer = AttnLayer(0, 0, AttnSpec(4, 2, 64, 64))
    layer.cache = {name: torch.zeros(8, 64, 2, 64) for name in "kv"}
    meta = make_meta([(0, 40, 40)], np.ones((1, 1, 4), np.int32), 64, "cpu")
    backend.plan(meta, GraphKey())
    q = torch.zeros(40, 4, 64)
    backend.forward(layer, q, meta, torch.zeros_like(q))
    assert asked == [not invariant]
