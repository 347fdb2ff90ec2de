"""``unfused``: the kinds of kernels that torch's operations can replace one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from minivllm.config.steps import wire_steps
from minivllm.config.values import EngineConfig
from minivllm.core.interfaces.attention import AttentionContext
from minivllm.core.interfaces.decoder import MLP, Norm
from minivllm.core.interfaces.executor import StepWiring
from minivllm.device.layers import activation
from minivllm.device.layers.parts import ModelParts
from minivllm.device.layers.rotary import prepare_qk
from minivllm.device.worker import build
from minivllm.errors import ConfigError
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.kvformat.plain import Fp32
from minivllm.plugins.quantizer.none import Unquantized

KINDS = ("pairs", "norms", "gate", "draw")


@pytest.mark.parametrize(
    ("more", "device", "message"),
    [
        ({}, "cpu", "fused kernels run on GPUs only, and the device is a CPU"),
        ({"fuse": False}, "cuda", "with fuse=false, which already turns off all fused kernels"),
        ({"batch_invariant": True}, "cuda", "with batch_invariant=true"),
    ],
)
def test_kernels_that_are_not_there_cannot_be_left_out(more, device, message):
    with pytest.raises(ConfigError, match=message):
        wire_steps(EngineConfig(model="pocket", unfused=["norms"], **more), device, {})


def test_the_names_are_wired_once_each_and_none_is_what_it_was():
    config = EngineConfig(model="pocket", unfused=["gate", "norms", "gate"])
    assert wire_steps(config, "cuda", {}).unfused == ("gate", "norms")
    assert wire_steps(EngineConfig(model="pocket"), "cpu", {}) == StepWiring()


@pytest.mark.parametrize("which", KINDS)
def test_a_kind_that_is_left_out_leaves_the_others_in(which, monkeypatch):
    class Wired:
        steps = StepWiring(unfused=(which,))

    monkeypatch.setattr(build, "has_kernels", lambda wiring: True)
    assert build.fused(Wired) and {kind for kind in KINDS if not build.fused(Wired, kind)} == {which}
    pytest.importorskip("triton")
    backend = Sdpa(None, AttentionContext("cpu", "float32", Fp32(), 4, 4, 64, prepare_qk))
    parts = ModelParts("cpu", "float32", Unquantized(), backend, fuse=True, unfused=(which,))
    up = parts.mlp_up("mlp", 32, MLP(64))
    joined = parts.linear_norm(parts.mlp_down("mlp", 32, MLP(64)), parts.norm("n", 32, Norm(1e-6)))
    assert (joined.fuse, up.fuse, up.linear.scheme.fuse) == (which != "pairs",) * 3
    assert (joined.norm.fused is None) == (which == "norms")
    assert (up.gate_mul.func is activation.gate_mul, up.divides) == (which == "gate", which != "gate")


class Ranks:
    """One end of a communicator whose devices reach each other's memory.  It counts the sums of each kind."""

    rank, size = 0, 2
    peers = SimpleNamespace(takes=lambda x: True)

    def __init__(self):
        self.plain = self.joint = 0

    def all_reduce(self, x):
        self.plain += 1

    def add_norm(self, x, bias, residual, norm):
        self.joint += 1
        return x


@pytest.mark.parametrize("which", [(), *((kind,) for kind in KINDS)])
def test_the_joint_kernel_of_ranks_is_one_of_the_norms(which):
    """Sum, addition to the residual and norm in one: it gives way where norms do, and to nothing else."""
    pytest.importorskip("triton")
    group = Ranks()
    backend = Sdpa(None, AttentionContext("cpu", "float32", Fp32(), 4, 4, 64, prepare_qk))
    parts = ModelParts("cpu", "float32", Unquantized(), backend, group=group, fuse=True, unfused=which)
    joined = parts.linear_norm(parts.mlp_down("mlp", 32, MLP(64)), parts.norm("n", 32, Norm(1e-6)))
    joined.linear.scheme.fuse = False  # a product of few rows would be a kernel of a GPU
    if "norms" not in which:
        joined.norm.fused = lambda x, residual, weight, eps: pytest.fail("a norm of its own")
    joined(torch.zeros(3, 32), torch.zeros(3, 32))
    assert (group.joint, group.plain) == ((0, 1) if "norms" in which else (1, 0))
