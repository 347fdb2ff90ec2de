"""How kernels are launched: before the one before has ended, but never before what they read is there."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from minivllm.core.interfaces.attention import AttnLayer, AttnSpec, GraphKey
from minivllm.device.kernels import launch
from minivllm.plugins.attention import triton_backend, triton_decode, triton_fixed, triton_prefill, triton_write
from minivllm.testing.attention_world import make_meta


def test_a_kernel_names_no_argument_that_it_does_not_have():
    with pytest.raises(TypeError, match="no argument rows"):
        launch.kernel("x", "rows")(lambda x, n: None)


def test_a_driver_is_told_once_of_each_variant_how_much_shared_memory_its_programs_need(monkeypatch):
    attributes = []

    class Driver:
        def cuFuncSetAttribute(self, function, attribute, value):
            attributes.append((function.value, attribute, value))
            return 0

    monkeypatch.setattr(launch, "capability", lambda device: 9)
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(launch, "shared_memory", lambda device: 228 * 1024)
    launch._prefer.cache_clear()
    made = lambda function, shared: SimpleNamespace(function=function, metadata=SimpleNamespace(shared=shared))  # noqa: E731
    device = torch.device("cuda", 0)
    for launched, programs in ((made(70, 36 * 1024), 2), (made(70, 36 * 1024), 2), (made(71, 100 * 1024), 4)):
        launch.keep_room(launched, programs, device)
    assert attributes == [(70, 9, 33), (71, 9, 100)]  # 2 * 37 of 228 KiB, and no more than all
    launch.keep_room(None, 2, device)
    launch.keep_room(made(72, 1024), 0, device)
    assert len(attributes) == 2
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    launch.keep_room(made(73, 1024), 1, device)  # no driver of that name: nothing is preferred
    launch._prefer.cache_clear()


def test_only_decode_of_one_row_has_a_variant_that_keeps_room(monkeypatch):
    rooms, kept = [], []

    class Decodes:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: rooms.append(kwargs["ROOM"])

    monkeypatch.setattr(triton_decode, "_deal", Launches())
    monkeypatch.setattr(triton_decode, "_decode", Decodes())
    monkeypatch.setattr(triton_decode, "_merge", Launches())
    monkeypatch.setattr(triton_decode, "keep_room", lambda launched, programs, device: kept.append(programs))
    monkeypatch.setattr(triton_decode, "multiprocessors", lambda device: 20)
    spec, table = AttnSpec(8, 4, 64, 64), np.ones((1, 4, 64), np.int32)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        layer = AttnLayer(0, 0, spec)
        layer.cache = {name: torch.zeros(8, 16, 4, 64).to(dtype) for name in "kv"}
        for rows in (1, 2):
            meta = make_meta([(slot, 1, 9) for slot in range(rows)], table, 16, "cpu")
            slots = torch.arange(rows)
            work = triton_decode.deal(spec, meta.kv_len, meta.q_len, slots, rows, 64, False, True)
            q = torch.zeros(rows, 8, 64)
            triton_decode.decode(layer, q, meta, torch.zeros_like(q), None, work, False)
    assert rooms == [7, 0, 7, 0] == kept  # 4 heads of 32 parts for 20 multiprocessors


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
def test_batch_invariant_attention_has_no_fused_multiply_adds(monkeypatch, invariant):
    """The compiler fuses them in one kernel and not in another, and in tiles without a mask only."""
    launched = []

    class Launch:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **kwargs: launched.append((self.name, kwargs.get("enable_fp_fusion", True)))

    monkeypatch.setattr(triton_prefill, "_prefill", Launch("prefill"))
    monkeypatch.setattr(triton_fixed, "_attend", Launch("attend"))
    monkeypatch.setattr(triton_fixed, "_join", Launch("join"))
    backend = triton_backend.Triton.__new__(triton_backend.Triton)
    backend.ctx = SimpleNamespace(batch_invariant=invariant)
    backend.short = set()
    layer = AttnLayer(0, 0, AttnSpec(4, 2, 64, 64))
    layer.cache = {name: torch.zeros(8, 64, 2, 64) for name in "kv"}
    meta = make_meta([(0, 40, 600)], np.ones((1, 1, 10)), 64, "cpu")
    backend.plan(meta, GraphKey())
    q = torch.zeros(40, 4, 64)
    backend.forward(layer, q, meta, torch.zeros_like(q))
    assert launched == ([("attend", False), ("join", False)] if invariant else [("prefill", True)])
