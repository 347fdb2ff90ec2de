"""The choice of the attention of vision towers: which calls the kernel serves, and torch's attention for all others."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from minivllm.device.layers import tower_attention
from minivllm.device.layers.tower_attention import attend_in_module, hopper_attention, use_in_modules

CARD = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def unchecked():
    """Compare the kernel anew in each test."""
    tower_attention._checked.cache_clear()
    yield
    tower_attention._checked.cache_clear()


class Kernel:
    """Has the interface of the kernel, computes with torch, and counts its calls."""

    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setattr(tower_attention, "hopper_attention", lambda dim, dtype, device: self)

    def __call__(self, q, k, v, length):
        self.calls += 1
        q, k, v = (one.unflatten(0, (-1, length)).transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cpu_has_torch_attention(dtype):
    assert hopper_attention(72, dtype, torch.device("cpu")) is None


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    ("dim", "dtype", "major", "distance", "used"),
    [
        (72, torch.bfloat16, 9, 0.004, True),
        (72, torch.bfloat16, 9, 0.5, False),
        (72, torch.bfloat16, 9, float("nan"), False),
        (72, torch.bfloat16, 10, 0.004, False),
        (72, torch.float16, 9, 0.004, False),
        (64, torch.bfloat16, 9, 0.004, False),
        (128, torch.bfloat16, 9, 0.004, False),
    ],
)
def test_the_kernel_is_used_only_where_it_was_compared(monkeypatch, caplog, dim, dtype, major, distance, used):
    patch_attention = pytest.importorskip("minivllm.device.kernels.patch_attention", exc_type=ImportError)
    monkeypatch.setattr("minivllm.device.kernels.launch.capability", lambda device: major)
    monkeypatch.setattr(patch_attention, "distance", lambda dim, device: distance)
    with caplog.at_level(logging.WARNING):
        found = hopper_attention(dim, dtype, CARD)
    assert (found is patch_attention.attend) == used
    assert ("torch's attention" in caplog.text) == (not used and (dim, dtype, major) == (72, torch.bfloat16, 9))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_a_kernel_that_fails_to_compile_is_not_used(monkeypatch, caplog):
    patch_attention = pytest.importorskip("minivllm.device.kernels.patch_attention", exc_type=ImportError)

    def fail(dim, device):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("minivllm.device.kernels.launch.capability", lambda device: 9)
    monkeypatch.setattr(patch_attention, "distance", fail)
    assert hopper_attention(72, torch.bfloat16, CARD) is None
    assert "no such instruction" in caplog.text


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_is_used_by_later_engines_after_a_lack_of_memory(monkeypatch, caplog):
    patch_attention = pytest.importorskip("minivllm.device.kernels.patch_attention", exc_type=ImportError)
    free = [False]

    def distance(dim, device):
        if not free[0]:
            raise torch.OutOfMemoryError("no memory")
        return 0.004

    monkeypatch.setattr("minivllm.device.kernels.launch.capability", lambda device: 9)
    monkeypatch.setattr(patch_attention, "distance", distance)
    assert hopper_attention(72, torch.bfloat16, CARD) is None and "no memory" in caplog.text
    free[0] = True
    assert hopper_attention(72, torch.bfloat16, CARD) is patch_attention.attend


@pytest.mark.parametrize(
    ("changed", "calls"),
    [
        ({}, 1),
        ({"is_causal": True}, 0),
        ({"scaling": 1.0}, 0),
        ({"attention_mask": torch.zeros(1, 1, 6, 6)}, 0),
        ({"length": 5}, 0),
    ],
)
def test_calls_that_the_kernel_does_not_serve_have_torch_attention(monkeypatch, changed, calls):
    pytest.importorskip("transformers")
    kernel = Kernel(monkeypatch)
    monkeypatch.setattr(tower_attention, "LEAST", 6)
    length = changed.get("length", 6)
    q, k, v = torch.randn(3, 2, length, 4, 8, generator=torch.Generator().manual_seed(0)).transpose(2, 3)
    how = {"attention_mask": None, "scaling": 8**-0.5, "is_causal": False} | changed
    how.pop("length", None)
    found, weights = attend_in_module(SimpleNamespace(), q, k, v, **how)
    causal = {"is_causal": how["is_causal"]}
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=how["attention_mask"], scale=how["scaling"], **causal)
    assert torch.allclose(found, want.transpose(1, 2), atol=1e-5) and weights is None
    assert kernel.calls == calls


@pytest.mark.parametrize("tower", ["Siglip", "CLIP"])
def test_modules_of_transformers_call_the_kernel_in_each_layer_and_keep_their_features(monkeypatch, tower):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    config = getattr(transformers, f"{tower}VisionConfig")(image_size=64, patch_size=4, **shape)
    model = getattr(transformers, f"{tower}VisionModel")(config).eval()
    pixels = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(tower_attention, "LEAST", 256)
    with torch.inference_mode():
        want = model(pixels).last_hidden_state
        kernel = Kernel(monkeypatch)
        use_in_modules(model, 8)
        found = model(pixels).last_hidden_state
    assert kernel.calls == shape["num_hidden_layers"]
    assert torch.allclose(found, want, atol=1e-5)


def test_modules_that_mask_patches_keep_their_mask(monkeypatch):
    """transformers makes no mask for an attention without a registered function for masks."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    model = transformers.Siglip2VisionModel(
        transformers.Siglip2VisionConfig(num_patches=16, patch_size=4, **shape)
    ).eval()
    pixels = torch.randn(1, 16, 48, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(16) < 12)[None].int()
    given = {"pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[3, 4]])}
    monkeypatch.setattr(tower_attention, "LEAST", 16)
    with torch.inference_mode():
        want = model(pixels, **given).last_hidden_state
        kernel = Kernel(monkeypatch)
        use_in_modules(model, 8)
        found = model(pixels, **given).last_hidden_state
    assert kernel.calls == 0
    assert torch.allclose(found[:, :12], want[:, :12], atol=1e-5)


@pytest.mark.gpu
def test_features_on_a_gpu_equal_those_of_float32(monkeypatch):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 288, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    config = transformers.SiglipVisionConfig(image_size=128, patch_size=4, **shape)
    model = transformers.SiglipVisionModel(config).eval()
    pixels = torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(tower_attention, "LEAST", 256)
    with torch.inference_mode():
        want = model(pixels).last_hidden_state
        model = model.to("cuda", torch.bfloat16)
        use_in_modules(model, 72)
        found = model(pixels.to("cuda", torch.bfloat16)).last_hidden_state.float().cpu()
    assert (found - want).norm() < 0.02 * want.norm()
