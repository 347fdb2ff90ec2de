"""The Triton kernel of the short convolution on a device, against the function in torch and the definition."""

from __future__ import annotations

import torch
from delta_rule_cases import make_step

from minivllm.device.kernels import short_conv
from minivllm.device.layers import short_conv as reference

SHAPES = ((16, 3, False), (20, 4, True), (33, 1, False), (8, 6, True))  # channels, width, bias


def check_convolve(device: str, dtype: torch.dtype, shape: tuple[int, int, bool], seed: int, tolerance: float) -> None:
    """Compare outputs, rings and copies of a step, whose tensor has rows that lie apart and two tokens of no row."""
    channels, width, biased = shape
    rows, taps = (5, 1, 2, 17)[seed % 4], width - 1
    places = taps + 1 + seed % 4
    step, tokens = make_step(device, rows, 9, places, taps, seed)
    torch.manual_seed(seed)
    mixed = torch.randn(tokens + 2, 3 * channels + 5, device=device).to(dtype)[:, : 3 * channels]
    weight = torch.randn(channels, width, device=device).to(dtype)
    bias = torch.randn(channels, device=device).to(dtype) if biased else None
    ring = torch.randn(4 * rows, places, channels, device=device).to(dtype)
    copy = ring.clone()
    want = reference.convolve(mixed, weight, bias, copy, step)
    got = short_conv.convolve(mixed, weight, bias, ring, step)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert not got[tokens:].any() and want[:tokens].any()
    assert torch.equal(ring, copy)
