"""The kernel that rotates queries and keys of a vision tower equals its reference."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from devices import DEVICE

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton

from minivllm.device.kernels.turn import turn
from minivllm.device.layers.patch_tower import turned

RUNS = DEVICE != "cpu" or triton.knobs.runtime.interpret
BOUNDS = {torch.float32: 1e-6, torch.float16: 2e-3}


def inputs(images, patches, heads, dim, dtype, device=DEVICE):
    draw = torch.Generator().manual_seed(dim)
    qkv = torch.randn(images * patches, 3, heads, dim, generator=draw).to(device, dtype)
    angles = torch.randn(patches, dim // 2, generator=draw)
    cos, sin = angles.cos(), angles.sin()
    return qkv, torch.cat([cos, cos], 1).to(device), torch.cat([-sin, sin], 1).to(device)


def test_the_reference_turns_each_pair_of_a_head_by_the_angle_of_its_patch():
    qkv, cos, sin = inputs(2, 5, 3, 8, torch.float32, "cpu")
    pairs = torch.complex(qkv[:, :2, :, :4].double(), qkv[:, :2, :, 4:].double())
    angle = torch.complex(cos[:, :4].double(), sin[:, 4:].double()).repeat(2, 1)[:, None, None]
    right = (pairs * angle).transpose(0, 1)
    assert torch.allclose(turned(qkv, cos, sin).double(), torch.cat([right.real, right.imag], -1), atol=1e-6)


@pytest.mark.skipif(not RUNS, reason="runs under TRITON_INTERPRET=1, or on a GPU with MINIVLLM_TEST_DEVICE=cuda")
@pytest.mark.parametrize(("heads", "dim"), [(2, 8), (16, 72), (3, 6)])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_kernel_gives_the_results_of_the_reference(heads, dim, dtype):
    qkv, cos, sin = inputs(2, 7, heads, dim, dtype)
    before = qkv.clone()
    assert torch.allclose(turn(qkv, cos, sin), turned(qkv, cos, sin), atol=BOUNDS[dtype])
    assert torch.equal(qkv, before)


def test_images_of_all_sizes_run_one_variant_of_the_kernel():
    """A variant for each number of patches would be compiled while clients wait."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compiled_turn.py"))
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["4", "1"], "launches and variants"
