"""Checks of the kernels of bytes in groups on any device, under the interpreter (``interpreted_quantize.py``) and on a
GPU (``models/test_grouped_kernels.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.device.kernels.grouped import GroupedProduct

NEAR = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
# dtype, outputs, inputs, inputs of a group, whether there are zero points
SHAPES = [
    (torch.int8, 100, 384, 128, False),
    (torch.uint8, 40, 160, 32, True),
    (torch.int8, 24, 208, 16, False),
    (torch.uint8, 70, 256, 128, True),
    (torch.int8, 40, 72, 8, False),
    (torch.float8_e4m3fn, 200, 384, 128, False),
    (torch.float8_e4m3fn, 72, 192, 64, False),
]


def make(dtype: torch.dtype, n: int, k: int, group: int, zeros: bool, device: str) -> tuple[GroupedProduct, Tensor]:
    """Return (the kernels, the stored weight in float64)."""
    generator = torch.Generator().manual_seed(n)
    codes = torch.randn(n, k, generator=generator)
    codes = (codes * 100).clamp(-448, 448) if dtype == torch.float8_e4m3fn else (codes * 40 + 128 * zeros).round()
    low, high = (0, 255) if dtype == torch.uint8 else (-448, 448) if dtype == torch.float8_e4m3fn else (-127, 127)
    weight = codes.clamp(low, high).to(dtype)
    scale = (torch.rand(n, k // group, generator=generator) + 0.5) / 100
    zero = torch.randint(100, 156, scale.shape, generator=generator).float() if zeros else None
    held = weight.double() - (0 if zero is None else zero.double().repeat_interleave(group, 1))
    held = held * scale.double().repeat_interleave(group, 1)
    given = [None if t is None else t.to(device) for t in (weight, scale, zero)]
    return GroupedProduct(*given), held.to(device)  # type: ignore[arg-type]


def check_products(device: str, dtype: torch.dtype, shape: tuple, rows: tuple[int, ...]) -> None:
    kernels, held = make(*shape, device)
    near = NEAR[dtype]
    for m in rows:
        x = torch.randn(m, held.shape[1], generator=torch.Generator().manual_seed(m)).to(device, dtype)
        want = x.double() @ held.T
        split = dict(BM=16, BN=16, BK=64, SK=2, STAGES=2, num_warps=4)
        ways = {
            "as it chooses": kernels(x),
            "dots": kernels.dots(x),
            "dense": kernels.dense(x, at_once=held.shape[1] * 7),
        }
        ways["split sums"] = kernels.dots(x, split)
        out = torch.empty(m, 2 * len(held), dtype=dtype, device=device)[:, : len(held)]
        ways["into what is given"] = kernels(x, out)
        for way, got in ways.items():
            apart = float((got.double() - want).abs().max()) if m else 0.0
            assert got.shape == want.shape, way
            assert apart <= near * float(want.abs().max() if m else 1), f"{shape}, {m} rows, {way}: {apart} apart"
