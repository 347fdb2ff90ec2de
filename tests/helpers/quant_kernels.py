"""Checks of the kernels of quantized weights on any device, under the interpreter (``interpreted_quant.py``) and on a
GPU (``models/test_quant_kernels.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.device.kernels.products import ADDED, GATED
from minivllm.device.kernels.quant import FusedProduct, Quantized
from minivllm.device.kernels.quant_epilogue import Around, EpilogueProduct
from minivllm.device.kernels.quant_gemv import gemv, gemv_fits
from minivllm.device.kernels.quant_large_m import int8_large, matmul, matmul_tile
from minivllm.device.kernels.quant_small_m import small_m
from minivllm.plugins.quantizer.spec import NF4_TABLE

# allowed errors of the product, relative to sums of absolute values; bfloat16 rounds each weight of a group and the
# result
NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
EIGHT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# form, outputs, inputs, group, zero points (True: fractions)
SHAPES = [
    ("int8", 20, 1041, 0, False),
    ("fp8", 33, 40, 0, False),
    ("int4", 33, 64, 32, False),
    ("int4", 20, 160, 32, True),
    ("int4", 36, 256, 64, "whole"),
    ("int4", 36, 384, 128, False),
    ("nf4", 36, 192, 64, False),
]
SPLIT = dict(BM=16, BN=16, BK=128, SK=2, STAGES=2, num_warps=4)  # a sum in two parts, one of which may be empty


def make(form: str, n: int, k: int, group: int, zeros: bool | str, device: str) -> tuple[Quantized, Tensor]:
    """Return kernels, and their stored weight in float64 on the CPU."""
    generator = torch.Generator().manual_seed(n + k)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    if form in EIGHT:
        q = (draw(n, k) * 40).clamp_(-127, 127).to(EIGHT[form])
        scale = draw(n).abs_() / 100 + 1e-4
        return Quantized(q.to(device), scale.to(device)), q.double() * scale.double()[:, None]
    codes = torch.randint(0, 16, (n, k), generator=generator)
    halves = codes.view(n, -1, 2, 16)
    packed = (halves[:, :, 0] | halves[:, :, 1] << 4).to(torch.uint8).view(n, -1)
    scale = draw(n, k // group) / 20
    if form == "nf4":
        table = torch.tensor(NF4_TABLE)
        held = table[codes].double() * scale.double().repeat_interleave(group, 1)
        return Quantized(packed.to(device), scale.to(device), None, group, table.to(device)), held
    zero = 7.5 + draw(n, k // group) if zeros else None
    if zeros == "whole":
        zero = torch.randint(0, 17, (n, k // group), generator=generator).float()
    spread = lambda t: t.double().repeat_interleave(group, 1)  # noqa: E731
    held = (codes.double() - (8 if zero is None else spread(zero))) * spread(scale)
    return Quantized(packed.to(device), scale.to(device), None if zero is None else zero.to(device), group), held


def close(got: Tensor, x: Tensor, held: Tensor, what: str, sizes: Tensor | None = None) -> None:
    """Check the error relative to the sums of the absolute values of x times ``sizes``, or of the weights for None."""
    want, size = x.double().cpu() @ held.T, x.double().cpu().abs() @ (held if sizes is None else sizes).abs().T
    assert got.shape == want.shape
    off = float(((got.double().cpu() - want).abs() / (size + 1e-30)).amax()) if want.numel() else 0.0
    assert off <= NEAR[x.dtype], f"{what}: off by {off:.1e} of the sum of absolute values"


def check_products(device: str, dtype: torch.dtype, shape: tuple, rows: tuple[int, ...]) -> None:
    """Check that each form computes x W^T, twice with the same bits, and independent of other rows and memory."""
    kernels, held = make(*shape, device)
    for m in rows:
        x = torch.randn(m, held.shape[1], generator=torch.Generator().manual_seed(m)).to(device, dtype)
        forms = {"dense": kernels.dense, "dense in parts": lambda x: kernels.dense(x, 5 * held.shape[1])}
        if m and gemv_fits(kernels, x):
            forms["gemv"] = lambda x: gemv(EpilogueProduct(kernels), x)[0]
        if m and not (kernels.form.table and dtype == torch.float32):
            forms["matmul"] = lambda x: matmul(kernels, x)
            forms["matmul in two parts"] = lambda x: matmul(kernels, x, tile=SPLIT)
        for name, form in forms.items():
            got = form(x)
            assert got.shape == (m, held.shape[0]) and got.dtype == dtype
            close(got, x, held, f"{name}, {shape}, {m} rows, {dtype}")
            if x.is_cuda:
                assert torch.equal(form(x), got), f"{name}, {shape}, {m} rows: other bits the second time"
        assert not kernels.arrived.any(), "counters of split sums are not 0 again"


def check_calls(device: str, dtype: torch.dtype, form: str = "int8", group: int = 0) -> None:
    """Check any number of rows of any strides, written to ``out`` of any strides."""
    kernels, held = make(form, 48, 64, group, False, device)
    for m in (0, 1, 5, 66):
        wide = torch.randn(m, 67, generator=torch.Generator().manual_seed(m)).to(device, dtype)
        x, out = wide[:, 3:], torch.full((48, m), torch.nan, dtype=dtype, device=device).T
        got = kernels(x)
        if m:
            close(got, x, held, f"{m} rows")
        assert kernels(x, out) is out and torch.equal(out, got)
        whole = torch.full((m, 48), torch.nan, dtype=dtype, device=device)
        assert kernels(x, whole) is whole and torch.equal(whole, got)


SMALL = [("int8", 48, 256, 0, False), ("fp8", 40, 128, 0, False), ("int8", 40, 640, 0, False)]
SMALL_FOUR = [
    ("int4", 36, 384, 128, True),
    ("int4", 40, 640, 32, False),
    ("int4", 24, 192, 64, False),
    ("int4", 20, 192, 32, "whole"),
]


ONE_ROW = [
    ("int8", 40, 640, 0, False),
    ("int4", 36, 384, 128, True),
    ("int4", 40, 640, 32, False),
    ("nf4", 36, 192, 64, False),
]
TILES = [("int8", 48, 256, 0, False), *ONE_ROW[1:3]]


def check_fixed(device: str, dtype: torch.dtype, rows: tuple[int, ...], tile: dict[str, int] | None) -> None:
    """Check int8 with whole numbers of 15 bits, where the error of x is at most that of its row's largest element."""
    for n, k in ((48, 256), (40, 640)):
        kernels, held = make("int8", n, k, 0, False, device)
        for m in rows:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * torch.logspace(-2, 2, m)[:, None]
            x[1] = 0
            got = int8_large(x.to(device, dtype), kernels.weight, kernels.scale, tile=tile).double().cpu()
            wide = x.to(dtype).double()
            room = wide.abs().amax(1, keepdim=True) / 32512 * held.abs().sum(1)
            room += 2 * torch.finfo(dtype).eps * (wide @ held.T).abs() + 1e-9
            assert ((got - wide @ held.T).abs() <= room).all(), f"{n} outputs, {k} inputs, {m} rows"


def check_tiles(
    device: str, dtype: torch.dtype, shape: tuple, rows: tuple[int, ...], tile: dict[str, int] | None
) -> None:
    """Check the product with TMA, with whole sums and with sums in parts.  ``tile`` None means the chosen tile."""
    kernels, held = make(*shape, device)
    for m in rows:
        x = torch.randn(m, held.shape[1], generator=torch.Generator().manual_seed(m)).to(device, dtype)
        chosen = tile or matmul_tile(kernels.form, m, True)
        for parts in (1, 2, 4):
            got = matmul(kernels, x, tile={**chosen, "SK": parts}, tma=True)
            close(got, x, held, f"{shape}, {m} rows, {parts} parts")
            assert not kernels.arrived.any(), "counters of split sums are not 0 again"


def run_small(product: FusedProduct, x: Tensor, tile: dict[str, int] | None, tops=None, **around) -> tuple:
    """Run the kernel of few rows, also for one row."""
    return small_m(product, x, Around(**around), product.arrived, tile)


def run_gemv(product: FusedProduct, x: Tensor, tile: dict[str, int] | None, tops=None, **around) -> tuple:
    """Run the kernel of one row."""
    return gemv(product, x, Around(**around), tops, tile)


def check_fused(run, device: str, dtype: torch.dtype, shape: tuple, rows, tile: dict[str, int], rounded=False):
    """Check the kernel that ``run`` starts (``run_small``, ``run_gemv``) with its epilogue.

    This includes the norm of the inputs, bias, gate, residual stream and the next norm.
    """
    kernels, held = make(*shape, device)
    n, k = held.shape
    generator = torch.Generator().manual_seed(n)
    draw = lambda *size: torch.randn(*size, generator=generator).to(device, dtype)  # noqa: E731
    eps, near = 1e-5, 4 * NEAR[dtype] + (5e-2 if rounded else 0)
    eight = kernels.weight.dtype if rounded else None
    for m in rows:
        x, bias, norm, residual = draw(m, k), draw(n), draw(n).abs() + 0.5, draw(m, n)
        squares = x.float().square().unflatten(1, (4, -1)).sum(2)
        product = x.double().cpu() @ held.T
        got, none = run(FusedProduct(kernels, rounded=eight), x, tile)
        assert none is None
        agree(got, product, near, f"{shape}, {m} rows")

        divided = product / (x.double().cpu().square().mean(1, keepdim=True) + eps).sqrt()
        normed = dict(squares=squares, eps=eps)
        got = run(FusedProduct(kernels, bias, rounded=eight), x, tile, **normed)[0]
        agree(got, divided + bias.double().cpu(), near, f"{shape}, {m} rows, of a norm, with a bias")

        gate, up = divided.chunk(2, 1)
        got = run(FusedProduct(kernels, None, GATED, rounded=eight), x, tile, **normed)[0]
        agree(got, torch.nn.functional.silu(gate) * up, near, f"{shape}, {m} rows, of a gate")

        stream = residual.double().cpu() + product
        added = FusedProduct(kernels, None, ADDED, rounded=eight)
        got, parts = run(added, x, tile, residual=residual, norm=norm)
        assert parts is not None
        agree(residual, stream, near, f"{shape}, {m} rows, the stream")
        agree(got, stream * norm.double().cpu(), near, f"{shape}, {m} rows, with the norm's weight")
        agree(parts.sum(1), stream.square().sum(1), near, f"{shape}, {m} rows, the sums of squares")


def check_small(device: str, dtype: torch.dtype, shape: tuple, tile: dict[str, int], rounded: bool = False) -> None:
    check_fused(run_small, device, dtype, shape, (1, 2, 5, 8), tile, rounded)


def check_small_four(device: str, dtype: torch.dtype, shape: tuple, tile: dict[str, int] | None) -> None:
    """Check also equal bits in two runs, for large and small rows."""
    kernels, held = make(*shape, device)
    check_fused(run_small, device, dtype, shape, (2, 4, 5, 8), tile)
    x = torch.randn(3, kernels.form.k, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    product, size = FusedProduct(kernels), 2.0**90 if dtype == torch.bfloat16 else 8.0
    whole = run_small(product, x, tile)[0]
    assert torch.equal(run_small(product, x, tile)[0], whole)
    by = torch.tensor([[1 / size], [1.0], [size]], device=device, dtype=dtype)
    assert torch.equal(run_small(product, x * by, tile)[0], whole * by), "other numbers of rows times a power of two"
    x[0, -1], x[1] = 27000.0, 0
    close(run_small(product, x, tile)[0], x, held, "a large element, and a row of zeros")
    assert not product.arrived.any(), "counters of split sums are not 0 again"


def check_vector(device: str, dtype: torch.dtype, shape: tuple, tile: dict[str, int], rounded: bool = False) -> None:
    """Check also the largest element that a gate returns, with which a row has the same products.

    With 4 bits no row is too large or too small.  A row times a power of two has products times the same power, to the
    bit.
    """
    check_fused(run_gemv, device, dtype, shape, (1,), tile, rounded)
    kernels, held = make(*shape, device)
    x = torch.randn(1, held.shape[1], generator=torch.Generator().manual_seed(1)).to(device, dtype)
    y, tops = run_gemv(FusedProduct(kernels, None, GATED), x, tile)
    assert tops is not None and tops.view(torch.float32).max() == y.float().abs().max()
    product = FusedProduct(kernels, rounded=kernels.weight.dtype if rounded else None)
    if kernels.form.bits == 4 and not kernels.form.table:
        whole = run_gemv(product, x, tile)[0]
        for power in (0.25, 4.0) if dtype == torch.float16 else (2.0**-80, 2.0**90):
            assert torch.equal(run_gemv(product, x * power, tile)[0], whole * power), power
        assert not run_gemv(product, torch.zeros_like(x), tile)[0].any()
        largest_is_found(product, held, x, tile)
    if product.takes_tops:
        known = x.float().abs().unflatten(1, (4, -1)).amax(2).view(torch.int32)
        assert torch.equal(run_gemv(product, x, tile, known)[0], run_gemv(product, x, tile)[0])


def largest_is_found(product: FusedProduct, held: Tensor, x: Tensor, tile: dict[str, int]) -> None:
    """Check a large element at the end of a row, which changes the scale of all others, whether it is passed or not.

    The passed value must be used.  The element is multiplied by a code before the zero point is subtracted, so the
    error is relative to the largest weight even if its own weight is 0.
    """
    x, largest = x.clone(), held.abs().amax(1, keepdim=True).expand_as(held)
    x[0, -1] = 27000.0
    known = x.float().abs().unflatten(1, (4, -1)).amax(2).view(torch.int32)
    for tops in (None, known):
        close(run_gemv(product, x, tile, tops)[0], x, held, "a row with a large element", largest)
    assert not run_gemv(product, x, tile, torch.zeros_like(known))[0].isfinite().all()


def agree(got: Tensor, want: Tensor, near: float, what: str) -> None:
    """Check the error relative to the norm of the expected result."""
    off = float((got.double().cpu() - want).norm() / want.norm())
    assert got.shape == want.shape and off <= near, f"{what}: off by {off:.1e}"
