"""The attention kernel of vision towers: its compiled code, and on a Hopper its outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

patch_attention = pytest.importorskip("minivllm.device.kernels.patch_attention", exc_type=ImportError)

DIMS = patch_attention.SIZES
SHARED = 227 * 1024  # bytes of shared memory that a program may use


def on_hopper(test):
    there = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return pytest.mark.gpu(pytest.mark.skipif(not there, reason="no GPU of compute capability 9.0")(test))


def inputs(images, length, heads, dim, seed=0):
    """Return q, k and v [images * length, heads, dim] as slices of one product."""
    draw = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(images * length, 3, heads, dim, generator=draw, device="cuda").bfloat16()


def wanted(q, k, v, length):
    """Return attention within sequences in float64."""
    q, k, v = (one.double().unflatten(0, (-1, length)).transpose(1, 2) for one in (q, k, v))
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(0, 1)


def distance(found, want):
    return ((found.double() - want).norm(dim=2) / want.norm(dim=2)).max().item()


def test_the_kernel_compiles_for_all_sizes_of_heads_without_many_spilled_registers():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compiled_patches.py")
    command = [sys.executable, str(script), *map(str, DIMS)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [int(line[0]) for line in lines] == list(DIMS)
    for _, shared, products, copies, _, spills, same, *moves in lines:
        assert int(shared) <= SHARED and int(spills) <= 16
        assert int(products) > 0 and int(copies) > 0
        assert same == "True", "images of other sizes run the same variant"
        assert moves == ["0", "0"], "addresses of a warp group's main loop are in vector registers"


@on_hopper
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("images", "length"), [(1, 1024), (3, 300), (2, 129), (5, 17), (2, 128)])
def test_outputs_equal_attention_in_float64_up_to_rounding(dim, images, length):
    q, k, v = inputs(images, length, 4, dim).unbind(1)
    found = patch_attention.attend(q, k, v, length)
    assert distance(found, wanted(q, k, v, length)) < 0.02


@on_hopper
@pytest.mark.parametrize("dim", DIMS)
def test_scores_far_above_the_first_ones_have_the_outputs_of_softmax(dim):
    qkv = inputs(2, 700, 2, dim)
    qkv[-300:, 1] *= 60.0
    q, k, v = qkv.unbind(1)
    assert distance(patch_attention.attend(q, k, v, 700), wanted(q, k, v, 700)) < 0.03


@on_hopper
@pytest.mark.parametrize("dim", DIMS)
def test_an_image_has_equal_bits_alone_and_beside_images_of_nan(dim):
    qkv = inputs(3, 300, 4, dim)
    alone = patch_attention.attend(*qkv[300:600].unbind(1), 300)
    beside = patch_attention.attend(*qkv.unbind(1), 300)
    qkv[:300] = torch.nan
    qkv[600:] = torch.nan
    spoilt = patch_attention.attend(*qkv.unbind(1), 300)
    assert torch.equal(alone, beside[300:600]) and torch.equal(alone, spoilt[300:600])
    assert spoilt[:300].isnan().all()


@on_hopper
def test_the_comparison_of_a_start_accepts_every_size_of_heads():
    device = torch.device("cuda", torch.cuda.current_device())
    assert max(patch_attention.distance(dim, device) for dim in DIMS) < patch_attention.FAR / 2
