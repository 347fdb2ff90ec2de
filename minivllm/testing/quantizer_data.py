"""Weights, inputs and comparisons of the quantizer suite."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from minivllm.core.interfaces.quantizer import ModuleInfo, Shard, WeightScheme

DTYPES = ("float32", "bfloat16", "float16")
TOKENS = (1, 2, 3, 8, 33, 65, 300)
# (output rows of each part, number of inputs) of modules to test
SHAPES = (((24, 8), 64), ((3, 17, 1), 33), ((129,), 31), ((5,), 1), ((128, 64, 64), 256))
LONG = ((5, 3), 4100)  # a module with more inputs than one iteration of most kernels reads, and not a multiple of it
MORE_SHAPES = (*SHAPES, ((3, 5), 7), ((1,), 3), ((7, 1), 129))
SHARED = (((24, 12), 48), ((768, 384), 1536))  # modules whose sizes 2, 3 and 4 processes can share evenly
KINDS = ("linear", "linear", "linear", "lm_head", "embedding")


def dtype_of(info: ModuleInfo) -> torch.dtype:
    """Return the torch dtype of a module's products."""
    return getattr(torch, info.dtype)


def random_weight(info: ModuleInfo) -> Tensor:
    """Return a weight of normally distributed numbers for a module, float32 [out, in]."""
    return torch.randn(info.out_features, info.in_features)


def numbers(traits: Mapping[str, Any]) -> dict[str, Any]:
    """Return the traits that describe the numbers of a format, as keyword arguments of ``step`` and ``grid``."""
    names = ("bits", "exponent", "table", "group")
    return {name: traits[name] for name in names if name in traits}


def fields(traits: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields for a tiny config.json: ``model``, with sizes that are multiples of the format's ``group``."""
    group = traits.get("group", 0)
    if group <= 32:
        return dict(model)
    own = {"hidden_size": group, "intermediate_size": 2 * group, "head_dim": group // 4}
    return {**model, **own}


def step(weight: Tensor, bits: int, exponent: int = 0, table: Sequence[float] = (), group: int = 0) -> Tensor:
    """Return the distance between neighbouring numbers of a format at each element of a weight [out, in].

    ``bits``, ``exponent`` and ``table`` describe the numbers, as the traits of a spec do.  The scale of a row makes its
    largest element the largest number of the format.  With a ``table`` each ``group`` of inputs has a scale, and group
    0 means the whole row.
    """
    if table:
        values = torch.tensor(table, dtype=torch.float64)
        return _table_step(weight, values, group)
    largest = weight.abs().amax(1, keepdim=True)
    if not exponent:
        codes = 2 ** (bits - 1) - 1
        return (largest / codes).expand_as(weight)
    digits = bits - 1 - exponent
    smallest = largest * 2.0 ** (2 - 2**exponent - digits)
    relative = weight.abs() * 2.0**-digits
    return torch.maximum(relative, smallest)


def _table_step(weight: Tensor, table: Tensor, group: int) -> Tensor:
    """Return the distance between the two numbers of a sorted table that enclose each element, in the element's unit.

    The table holds weights divided by the largest absolute weight of their group of ``group`` inputs.
    """
    inputs = weight.shape[1]
    size = min(group or inputs, inputs)
    groups = weight.abs().split(size, 1)
    largest = torch.stack([group.amax(1) for group in groups], 1)
    largest = largest.repeat_interleave(size, 1)
    largest = largest[:, :inputs]
    scaled = weight / largest.clamp(min=1e-300)
    above = torch.bucketize(scaled, table)
    above = above.clamp(1, len(table) - 1)
    distance = table[above] - table[above - 1]
    return distance * largest


def grid(info: ModuleInfo, bits: int, exponent: int = 0, table: Sequence[float] = (), group: int = 0) -> Tensor:
    """Return a random weight [out, in] that a format can hold exactly.

    Its elements are numbers of the format, multiplied by a power of two for each row.  Every 16th element is the
    largest number, so that each row and group contains it.  For float8 it is 1.75 times a power of two.
    """
    shape = (info.out_features, info.in_features)
    top: float = 2 ** (bits - 1) - 1
    if table:
        numbers = torch.tensor(table, dtype=torch.float64)
        chosen = torch.randint(0, len(table), shape)
        values = numbers[chosen]
        top = max(table)
    elif exponent:
        digits = bits - 1 - exponent
        top = 7 * 2 ** (digits - 2)
        scales = 2.0 ** -torch.randint(0, 5, shape)
        mantissas = torch.randint(2**digits, top + 1, shape)
        sizes = mantissas * scales
        signs = 2 * torch.randint(0, 2, shape) - 1
        values = sizes.double() * signs
    else:
        codes = torch.randint(-top, top + 1, shape)
        values = codes.double()
    values[:, ::16] = top
    exponents = torch.randint(0, 6, (info.out_features, 1))
    scale = 2.0**-exponents
    return values * scale


def input_rounding(x: Tensor, held: Tensor, traits: Mapping[str, Any]) -> Tensor | float:
    """Return the extra tolerance of each product [tokens, out] of a scheme that rounds its inputs x.

    The unit is 6 eps of the dtype of x, the relative tolerance of other products.  The result is 0 for a format that
    does not round x (without the trait ``inputs``).
    """
    if "inputs" not in traits:
        return 0.0
    exponent = traits.get("exponent", 0)
    exact = x.cpu().double()
    moved = step(exact, traits["inputs"], exponent) / 2
    moved_sums = moved @ held.abs().T
    unit = 6 * torch.finfo(x.dtype).eps
    return 1.01 * moved_sums / unit


def ones(tokens: int, info: ModuleInfo) -> Tensor:
    """Return inputs of ones [tokens, in]."""
    return torch.ones(tokens, info.in_features, dtype=dtype_of(info), device=info.device)


def identity(info: ModuleInfo) -> Tensor:
    """Return the identity matrix [in, in] for a module; its product is the module's transposed weight."""
    return torch.eye(info.in_features, dtype=dtype_of(info), device=info.device)


def dequantized(scheme: WeightScheme, info: ModuleInfo) -> Tensor:
    """Return the weight that a scheme multiplies by, float64 [out, in] on the CPU.

    It is the product with the identity matrix, so it is rounded to the dtype of the products.
    """
    product = scheme.apply(identity(info))
    weight = product.double().cpu().T
    return weight.contiguous()


def by_part(weight: Tensor, info: ModuleInfo) -> dict[str, Tensor]:
    """Split a merged weight [out, in] into the rows of each part, by name of the part."""
    sizes = dict(info.parts)
    parts = weight.split(list(sizes.values()))
    return dict(zip(sizes, parts, strict=True))


def cut(weight: Tensor, info: ModuleInfo, shard: Shard) -> Tensor:
    """Return the shard of a merged weight [out, in] that a process holds."""
    if info.split == "row":
        shards = weight.chunk(shard.size, 1)
        return shards[shard.rank]
    parts = by_part(weight, info).values()
    shards = []
    for rows in parts:
        chunks = rows.chunk(shard.size)
        shards.append(chunks[shard.rank])
    return torch.cat(shards)


def compare(held: Tensor, want: Tensor, tolerance: Tensor, info: ModuleInfo, what: str) -> None:
    """Fail if a held weight [out, in] differs from the expected one by more than the tolerance of an element."""
    assert held.shape == want.shape, f"{what}: holds {list(held.shape)}, expected {list(want.shape)}"
    off = (held - want).abs()
    allowed = tolerance.expand_as(off)
    bad = ~(off <= allowed)
    if not bad.any():
        return
    row, column = bad.nonzero()[0].tolist()
    numbers = [rows for _, rows in info.parts]
    ends = torch.tensor(numbers).cumsum(0)
    parts_before = int((row >= ends).sum())
    part, _ = info.parts[parts_before]
    pytest.fail(
        f"{what}: {int(bad.sum())} of {bad.numel()} elements are off; output row {row} (part {part!r}), input "
        f"{column}: holds {held[row, column]:.6g}, expected {want[row, column]:.6g} within "
        f"{float(allowed[row, column]):.2g}",
        pytrace=False,
    )


def inputs(tokens: int, info: ModuleInfo) -> Iterator[tuple[str, Tensor]]:
    """Yield (name of a memory layout, random inputs [tokens, in] in that layout)."""
    x = torch.randn(tokens, info.in_features + 3)
    x = x.to(info.device, dtype_of(info))
    narrow = x[:, :-3].contiguous()
    yield "contiguous", narrow
    yield "columns of a wider tensor", x[:, 3:]
    yield "transposed", narrow.T.contiguous().T


def product(scheme: WeightScheme, x: Tensor, what: str) -> Tensor:
    """Return the product of a scheme with inputs x [tokens, in], after some checks.

    A call with ``out`` must write the same product there.  A call may change neither x nor an earlier product.
    """
    before = x.clone()
    got = scheme.apply(x)
    assert got.dtype == x.dtype, f"{what}: returns {got.dtype}, expected {x.dtype}"
    kept = got.clone()
    out = torch.full_like(got, torch.nan)
    rounding = 8 * torch.finfo(x.dtype).eps
    largest = float(got.abs().max())
    x.neg_()  # the next step may place its inputs in the same memory, and a format may round large inputs differently
    negated = scheme.apply(x)
    assert torch.equal(got, kept), f"{what}: the next call writes into the tensor that was returned"
    x.copy_(before)
    near = torch.allclose(negated, -got, rtol=rounding, atol=2e-4 * largest)
    assert near, f"{what}: for -x in the memory of x the result is not the negated product"
    back = scheme.apply(x, out)
    assert back is out or back.data_ptr() == out.data_ptr(), f"{what}: does not return the tensor passed as out"
    near = torch.allclose(out, got, rtol=rounding, atol=1e-4 * largest)
    assert near, f"{what}: out does not hold the product"
    assert torch.equal(x, before), f"{what}: x is changed"
    return got


def alone(scheme: WeightScheme, x: Tensor, got: Tensor, what: str) -> None:
    """Fail unless rows of a product have the same bits when each is computed without the other rows."""
    n = len(x)
    middle = n // 2
    for start, end in {(0, 1), (middle, middle + 1), (n // 3, n)}:
        part = scheme.apply(x[start:end])
        same = torch.equal(part, got[start:end])
        assert same, f"{what}: rows {start} to {end} have other bits by themselves"


def storages() -> dict[int, int]:
    """Return address -> bytes of the storages of all tensors in this process."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, Parameter)]
    found = {}
    for tensor in tensors:
        if _has_memory(tensor):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return {address: size for address, size in found.items() if size}


def _has_memory(t: Tensor) -> bool:
    return t.layout is torch.strided and t.device.type != "meta"


FILLS = (
    "normal", "rows of all sizes", "zero rows among normal", "outliers among normal", "positive", "huge", "tiny",
)  # fmt: skip


def filled(fill: str, info: ModuleInfo, low: float, high: float) -> Tensor:
    """Return a random weight, float32 [out, in], of a kind of numbers among ``FILLS``.

    ``low`` is the size of numbers of a tiny weight, ``high`` that of a huge one.
    """
    rows = info.out_features
    inp = info.in_features
    if fill == "positive":
        return torch.rand(rows, inp) + 0.5
    weight = torch.randn(rows, inp)
    if fill == "rows of all sizes":
        weight *= torch.logspace(-2, 1, rows)[:, None]
    elif fill == "zero rows among normal":
        weight *= torch.rand(rows, 1) < 0.5
    elif fill == "outliers among normal":
        chosen = torch.randint(inp, (rows,))
        weight[torch.arange(rows), chosen] *= 1000
    elif fill == "huge":
        weight = weight.clamp(-4, 4) * high
    elif fill == "tiny":
        weight *= low
    return weight
