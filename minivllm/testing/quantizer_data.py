"""Weights, inputs and comparisons of the quantizer suite."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from minivllm.core.interfaces.quantizer import ModuleInfo, WeightScheme

DTYPES = ("float32", "bfloat16", "float16")
TOKENS = (1, 2, 3, 8, 33, 65, 300)
SHAPES = (((24, 8), 64), ((3, 17, 1), 33), ((129,), 31), ((5,), 1), ((128, 64, 64), 256))  # (rows of parts, inputs)
LONG = ((5, 3), 4100)  # a sum longer than the loops of most kernels take at once, and of an odd end
SHARED = (((24, 12), 48), ((768, 384), 1536))  # sizes that 2, 3 and 4 processes share evenly
KINDS = ("linear", "linear", "linear", "lm_head", "embedding")


def numbers(traits: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bits": traits["bits"],
        "exponent": traits.get("exponent", 0),
        "table": traits.get("table", ()),
        "group": traits.get("group", 0),
    }


def fields(traits: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Of a tiny config.json: ``model``, with inputs of each layer that the ``group`` of a format divides."""
    group = traits.get("group", 0)
    if group <= 32:
        return dict(model)
    return {**model, "hidden_size": group, "intermediate_size": 2 * group, "head_dim": group // 4}


def step(weight: Tensor, bits: int, exponent: int = 0, table: Sequence[float] = (), group: int = 0) -> Tensor:
    """Distance of neighbouring numbers at each element, where the largest of a row is the largest of the format; of a
    ``table`` the largest of each ``group`` of inputs."""
    if table:
        points, spread = torch.tensor(table, dtype=torch.float64), min(group or weight.shape[1], weight.shape[1])
        largest = torch.stack([part.abs().amax(1) for part in weight.split(spread, 1)], 1)
        largest = largest.repeat_interleave(spread, 1)[:, : weight.shape[1]]
        above = torch.bucketize(weight / largest.clamp(min=1e-300), points).clamp(1, len(points) - 1)
        return (points[above] - points[above - 1]) * largest
    largest = weight.abs().amax(1, keepdim=True)
    if not exponent:
        return (largest / (2 ** (bits - 1) - 1)).expand_as(weight)
    digits = bits - 1 - exponent
    return torch.maximum(weight.abs() * 2.0**-digits, largest * 2.0 ** (2 - 2**exponent - digits))


def grid(info: ModuleInfo, bits: int, exponent: int = 0, table: Sequence[float] = (), group: int = 0) -> Tensor:
    """Numbers of the format, of which the largest is in each row and each group of 16 (of float8: 1.75 times a power
    of two)."""
    shape, top = (info.out_features, info.in_features), 2 ** (bits - 1) - 1
    if table:
        values, top = torch.tensor(table, dtype=torch.float64)[torch.randint(0, len(table), shape)], max(table)
    elif exponent:
        digits = bits - 1 - exponent
        top = 7 * 2 ** (digits - 2)
        sizes = torch.randint(2**digits, top + 1, shape) * 2.0 ** -torch.randint(0, 5, shape)
        values = sizes.double() * (2 * torch.randint(0, 2, shape) - 1)
    else:
        values = torch.randint(-top, top + 1, shape).double()
    values[:, ::16] = top
    return values * 2.0 ** -torch.randint(0, 6, (shape[0], 1))


def rounded(x: Tensor, held: Tensor, traits: Mapping[str, Any], dtype: str) -> Tensor | float:
    """What rounding the rows of x may move the products by, in units of what a product may be off by."""
    if "inputs" not in traits:
        return 0.0
    wide = x.cpu().double()
    moved = step(wide, traits["inputs"], traits.get("exponent", 0)) / 2
    return 1.01 * (moved @ held.abs().T) / (6 * torch.finfo(getattr(torch, dtype)).eps)


def dequantized(scheme: WeightScheme, info: ModuleInfo) -> Tensor:
    """float64 [out, in] on the CPU: what the scheme multiplies by, rounded to the dtype of its products."""
    one = torch.eye(info.in_features, dtype=getattr(torch, info.dtype), device=info.device)
    return scheme.apply(one).double().cpu().T.contiguous()


def by_part(weight: Tensor, info: ModuleInfo) -> dict[str, Tensor]:
    """Part -> its rows."""
    return dict(zip(dict(info.parts), weight.split([n for _, n in info.parts]), strict=True))


def cut(weight: Tensor, info: ModuleInfo, split: str, rank: int, size: int) -> Tensor:
    """A process's share of a merged weight."""
    if split == "row":
        return weight.chunk(size, 1)[rank]
    return torch.cat([rows.chunk(size)[rank] for rows in by_part(weight, info).values()])


def compare(held: Tensor, want: Tensor, room: Tensor, info: ModuleInfo, what: str) -> None:
    assert held.shape == want.shape, f"{what}: holds {list(held.shape)}, want {list(want.shape)}"
    off = (held - want).abs()
    bad = ~(off <= room.expand_as(off))
    if bad.any():
        row, column = (int(i) for i in bad.nonzero()[0])
        edges = torch.tensor([n for _, n in info.parts]).cumsum(0)
        part = info.parts[int((row >= edges).sum())][0]
        limit = float(room.expand_as(off)[row, column])
        pytest.fail(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements are off; output row {row} (part {part!r}), input "
            f"{column}: holds {held[row, column]:.6g}, want {want[row, column]:.6g} within {limit:.2g}",
            pytrace=False,
        )


def inputs(tokens: int, info: ModuleInfo) -> Iterator[tuple[str, Tensor]]:
    x = torch.randn(tokens, info.in_features + 3).to(info.device, getattr(torch, info.dtype))
    yield "contiguous", x[:, :-3].contiguous()
    yield "columns of a wider tensor", x[:, 3:]
    yield "transposed", x[:, :-3].T.contiguous().T


def product(scheme: WeightScheme, x: Tensor, what: str) -> Tensor:
    """The product, with and without ``out``; neither touches x nor what was returned before."""
    before, got = x.clone(), scheme.apply(x)
    assert got.dtype == x.dtype, f"{what}: gives {got.dtype}, want {x.dtype}"
    kept, out = got.clone(), torch.full_like(got, torch.nan)
    x.neg_()  # the next step's inputs may lie in the same memory; a format may round large inputs in another way
    other = scheme.apply(x)
    assert torch.equal(got, kept), f"{what}: the next call writes into the tensor that was returned"
    x.copy_(before)
    near = torch.allclose(other, -got, rtol=8 * torch.finfo(x.dtype).eps, atol=2e-4 * float(got.abs().max()))
    assert near, f"{what}: -x in the memory of x gives something else than the product with another sign"
    back = scheme.apply(x, out)
    assert back is out or back.data_ptr() == out.data_ptr(), f"{what}: does not return the out that it is given"
    near = torch.allclose(out, got, rtol=8 * torch.finfo(x.dtype).eps, atol=1e-4 * float(got.abs().max()))
    assert near, f"{what}: out is not written, or with something else"
    assert torch.equal(x, before), f"{what}: x is changed"
    return got


def alone(scheme: WeightScheme, x: Tensor, got: Tensor, what: str) -> None:
    """A row of the product has the bits that it has by itself, and beside fewer."""
    for a, b in {(0, 1), (len(x) // 2, len(x) // 2 + 1), (len(x) // 3, len(x))}:
        assert torch.equal(scheme.apply(x[a:b]), got[a:b]), f"{what}: rows {a} to {b} have other bits by themselves"


def storages() -> dict[int, int]:
    """Address -> bytes of the memory of every tensor there is."""
    gc.collect()
    found = [o.untyped_storage() for o in gc.get_objects() if type(o) in (Tensor, Parameter) and _plain(o)]
    return {s.data_ptr(): s.nbytes() for s in found if s.nbytes()}


def _plain(t: Tensor) -> bool:
    return t.layout is torch.strided and t.device.type != "meta"


def _outliers(rows: int, inp: int, *sizes: float) -> Tensor:
    w = torch.randn(rows, inp)
    w[torch.arange(rows), torch.randint(inp, (rows,))] *= 1000
    return w


FILLS: dict[str, Callable[..., Tensor]] = {  # (rows, inputs, the smallest numbers, the largest) -> weight
    "normal": lambda rows, inp, low, high: torch.randn(rows, inp),
    "rows of all sizes": lambda rows, inp, low, high: torch.randn(rows, inp) * torch.logspace(-2, 1, rows)[:, None],
    "zero rows among normal": lambda rows, inp, low, high: torch.randn(rows, inp) * (torch.rand(rows, 1) < 0.5),
    "outliers among normal": _outliers,
    "positive": lambda rows, inp, low, high: torch.rand(rows, inp) + 0.5,
    "huge": lambda rows, inp, low, high: torch.randn(rows, inp).clamp_(-4, 4) * high,
    "tiny": lambda rows, inp, low, high: torch.randn(rows, inp) * low,
}
