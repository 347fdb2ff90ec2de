"""Few rows of a ``FixedProduct`` in equal bits, one row optionally with the residual addition and the norm before it.

Launches and latencies take most of the time of few rows.  So each program loads its share of the weight while the
preceding kernel still runs, and waits only before it reads x.

    qkv       grid (N / 64)       x, or residual + x ── norm ──► a in each program;  a · W^T by one warp group
    gate_up   grid (N / 64, 2)    the same, with a program for gate and one for up;  the later one applies the gate
    o, down   grid (N / 16)       each of eight warps adds a leaf;  then the leaves are added in order

A leaf is a range of inputs with a sum of its own.  As in ``fixed_products``, it adds 16 products at a time, ascending.
The tensor cores have two kinds of instructions, ``wgmma`` and ``mma``, and the norm is a second implementation of
``kernels.norm``.  Equal bits are therefore tested on the device before the kernels are used (``agreeing_rows``).

Bytes: W once.  References: ``FixedProduct`` and ``add_rms_norm``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .activation import NUMBER, gate_rounded
from .fixed_products import FixedProduct
from .launch import capability, kernel, pdl, power, release, roomy, settle
from .norm import add_rms_norm

MOST_ROWS = 32  # largest number of rows for which these kernels were measured to be faster (H200)
LINES = 16  # least number of rows of x in an instruction (wgmma); those behind the last row are 0
OUTPUTS = 64  # number of outputs of a program, the weight's side of the instruction (wgmma)
MOST_INPUTS = 1024  # largest number of inputs, whose weights fit in shared memory
LEAF_LINES = 8  # least number of rows of x in an instruction (mma), if the sums have eight leaves
LEAF_OUTPUTS = 16  # number of outputs of a program with eight leaves, the weight's side of its instruction
MOST_LEAF = 512  # largest number of inputs of one of eight leaves, whose weights fit in registers
WARPS_OF_LEAVES = 8
MOST_CHUNKS = 3  # largest number of parts in which a leaf is loaded; the size of a part is a power of two
MOST_TILES = 132  # largest number of tiles; the programs of more tiles would load one after another
WARPS = 4  # number of warps, equal to that of ``kernels.norm`` for so few inputs


class Addition(NamedTuple):
    """The residual addition and norm that the kernel computes before its product."""

    residual: Tensor  # [1, K], before the addition
    stream: Tensor  # [1, K], to which the kernel stores the sum
    weight: Tensor  # [K] of the norm
    eps: float


@triton.jit
def _normed(x, residual, stream, norm, eps, store, K: tl.constexpr, LINES: tl.constexpr):
    """Return the norm of residual + x as [LINES, K], of which all lines but the first are 0.  Store the sum if
    ``store``.

    The order of the sum of squares is that of ``kernels.norm``, because the loads have the same division over
    threads."""
    ok = tl.arange(0, K)
    value = (tl.load(residual + ok) + tl.load(x + ok)).to(x.dtype.element_ty)
    w = tl.load(norm + ok[None, :], mask=(tl.arange(0, LINES) == 0)[:, None], other=0.0).to(tl.float32)
    tl.store(stream + ok, value, mask=(ok < K) & store)
    wide = value.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / K + eps)
    return (wide[None, :] * w).to(x.dtype.element_ty)


@triton.jit
def _both_sides(acc, scratch, arrived, LINES: tl.constexpr, BN: tl.constexpr):
    """Store the sums of this program's side, gate or up.

    Return whether it is the second one of its tile, and then the sums of gate and up."""
    tile, tiles, size = tl.program_id(0), tl.num_programs(0), LINES * BN
    at = scratch + tile * size + tl.arange(0, BN)[:, None] * LINES + tl.arange(0, LINES)[None, :]
    tl.store(at + tl.program_id(1) * tiles * size, acc)
    tl.debug_barrier()  # all of the program's stores come before its arrival
    last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == 1
    gate = acc
    up = acc
    if last:
        gate = tl.load(at, cache_modifier=".cg")
        up = tl.load(at + tiles * size, cache_modifier=".cg")
        tl.store(arrived + tile, 0)
    return last, gate, up


@kernel("M")
def _row(
    x, residual, stream, norm, weight, y, scratch, arrived, eps, M, N, K: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, NORM: tl.constexpr, LINES: tl.constexpr, BN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply M rows, with NORM one row, by the weight.  ``weight`` is a descriptor with blocks [BN, K].

    With GATED the weight is [2 N, K], gate | up, and y is activation(gate) * up of the rounded gate and up.
    """
    release(PDL)
    tile, side = tl.program_id(0), tl.program_id(1)
    w = weight.load([side * N + tile * BN, 0])
    settle(PDL)
    if NORM:
        a = _normed(x, residual, stream, norm, eps, (tile == 0) & (side == 0), K, LINES)
    else:
        line = tl.arange(0, LINES)[:, None]
        a = tl.load(x + line * K + tl.arange(0, K)[None, :], mask=line < M, other=0.0)
    acc = tl.dot(w, a.T, tl.zeros([BN, LINES], tl.float32))
    last = True
    up = acc
    if GATED:
        last, acc, up = _both_sides(acc, scratch, arrived, LINES, BN)
    if last:
        if GATED:
            acc = gate_rounded(acc, up, y.dtype.element_ty, ACT)
        _store(y, acc, tile, M, N, LINES, BN)


@triton.jit
def _store(y, sums, tile, M, N, LINES: tl.constexpr, BN: tl.constexpr):
    """Store the first M of the LINES lines of sums [BN, LINES] as the outputs of a tile."""
    on, line = tile * BN + tl.arange(0, BN), tl.arange(0, LINES)
    at = y + line[None, :] * N + on[:, None]
    tl.store(at, sums.to(y.dtype.element_ty), mask=(on >= 0)[:, None] & (line < M)[None, :])


@triton.jit
def _eighths(acc):
    """Return the sum of acc [8, BN, LINES] over the first axis, ascending from 0."""
    BN: tl.constexpr = acc.shape[1]
    LINES: tl.constexpr = acc.shape[2]
    even, odd = tl.split(tl.permute(acc, (1, 2, 0)).reshape(BN, LINES, 4, 2))
    zero_four, two_six = tl.split(even.reshape(BN, LINES, 2, 2))
    one_five, three_seven = tl.split(odd.reshape(BN, LINES, 2, 2))
    zero, four = tl.split(zero_four)
    one, five = tl.split(one_five)
    two, six = tl.split(two_six)
    three, seven = tl.split(three_seven)
    return 0.0 + zero + one + two + three + four + five + six + seven


@kernel("M")
def _row_of_leaves(
    x, weight, y, M, N, K: tl.constexpr, LINES: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply M rows by the weight [N, K], whose inputs are eight leaves: each of the eight warps adds one of them."""
    release(PDL)
    tile = tl.program_id(0)
    on, ok, leaf = tile * BN + tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, 8) * (K // 8)
    at = weight + on.to(tl.int64)[None, :, None] * K + leaf[:, None, None] + ok[None, None, :]
    weights = ()
    for i in tl.static_range(CHUNKS):
        weights = weights + (tl.load(at + i * BK),)  # noqa: RUF005 - not in kernels
    settle(PDL)
    line = tl.arange(0, LINES)[None, :, None]
    acc = tl.zeros([8, BN, LINES], tl.float32)
    for i in tl.static_range(CHUNKS):
        a_at = x + line * K + leaf[:, None, None] + (i * BK + ok)[None, None, :]
        a = tl.load(a_at, mask=line < M, other=0.0)
        acc = tl.dot(weights[i], tl.permute(a, (0, 2, 1)), acc)
    _store(y, _eighths(acc), tile, M, N, LINES, BN)


def chunk_of(product: FixedProduct) -> int:
    """Return the number of inputs that a kernel loads at a time from a leaf (a range of inputs with its own sum); 0 if
    no kernel supports the weight."""
    leaf = product.k // product.leaves
    chunk = leaf & -leaf
    if product.leaves == 1:
        outputs = OUTPUTS
        fits = chunk == leaf <= MOST_INPUTS
    else:
        outputs = LEAF_OUTPUTS
        fits = product.leaves == WARPS_OF_LEAVES and leaf <= min(MOST_LEAF, MOST_CHUNKS * chunk)
    if not fits or chunk < 16 or product.n % outputs or product.n // outputs > MOST_TILES:
        return 0
    return chunk


class FixedRow:
    """x [M, K] -> the result [M, N] of a ``FixedProduct`` in equal bits, for M up to ``MOST_ROWS``.

    One row may be added to a residual and normalised before.
    The object keeps the counters of programs that share a tile, which are 0 between launches."""

    def __init__(self, product: FixedProduct) -> None:
        self.product = product
        self.chunk = chunk_of(product)
        tiles = product.n // OUTPUTS if product.activation is not None else 1
        self.arrived = torch.zeros(max(tiles, 1), dtype=torch.int32, device=product.weight.device)

    def __call__(self, x: Tensor, before: Addition | None = None) -> Tensor:
        """Return the result for x, or with ``before`` for the norm of its residual + x."""
        product = self.product
        k = product.k
        m = x.shape[0]
        y = torch.empty((m, product.n), dtype=x.dtype, device=x.device)
        constants = pdl(x)
        constants["K"] = k
        if product.leaves == 1:
            self._whole(x, y, before, constants)
            return y
        constants["BK"] = self.chunk
        constants["CHUNKS"] = k // product.leaves // self.chunk
        constants["LINES"] = max(LEAF_LINES, power(m))
        constants["BN"] = LEAF_OUTPUTS
        constants["num_warps"] = WARPS_OF_LEAVES
        _row_of_leaves[(product.n // LEAF_OUTPUTS,)](x, product.weight, y, m, product.n, **constants)
        return y

    def _whole(self, x: Tensor, y: Tensor, before: Addition | None, constants: dict[str, Any]) -> None:
        """Store the result in y, for inputs that are one leaf."""
        product = self.product
        gated = product.activation is not None
        tiles = product.n // OUTPUTS
        sides = 2 if gated else 1
        lines = max(LINES, power(x.shape[0]))
        sums = sides * product.n * lines if gated else 1
        scratch = torch.empty(sums, dtype=torch.float32, device=x.device)
        constants["GATED"] = gated
        constants["ACT"] = NUMBER[product.activation or "silu"]
        constants["NORM"] = before is not None
        constants["LINES"] = lines
        constants["BN"] = OUTPUTS
        constants["num_warps"] = WARPS
        residual, stream, norm, eps = before or (y, y, y, 0.0)  # the kernel does not read absent tensors
        weight = TensorDescriptor.from_tensor(product.weight, [OUTPUTS, self.chunk])
        tensors = (x, residual, stream, norm, weight, y, scratch, self.arrived)
        _row[(tiles, sides)](*tensors, eps, x.shape[0], product.n, **constants)


@cache
def agreeing_rows(device: torch.device, dtype: torch.dtype, k: int, leaves: int, activation: str | None) -> bool:
    """Return whether the kernel has the bits of ``FixedProduct`` and of the norm before it, tested with a small weight.

    ``k`` is the number of inputs.  True without a GPU."""
    if capability(device) == 0:
        return True
    random = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    rows = 8 * OUTPUTS
    product = FixedProduct(drawn(rows, k), leaves, activation, check=False)
    row = FixedRow(product)
    x, residual = drawn(32, k), drawn(32, k) * 30
    x[::3] *= 1000
    norm = drawn(k)
    plain = product(x)
    equal = all(torch.equal(row(x[i : i + 1]), plain[i : i + 1]) for i in range(32))
    for rows in (LEAF_LINES, LINES, MOST_ROWS):  # each has other instructions
        equal &= torch.equal(row(x[:rows]), plain[:rows])
    if leaves > 1:
        return equal
    normed, sums = add_rms_norm(x, residual.clone(), norm, 1e-6)
    want = product(normed)
    for i in range(32):
        one = slice(i, i + 1)
        stream = torch.empty_like(x[one])
        got = row(x[one], Addition(residual[one], stream, norm, 1e-6))
        equal &= torch.equal(got, want[one]) and torch.equal(stream, sums[one])
    return equal


def row_of_product(product: FixedProduct) -> FixedRow | None:
    """Return the kernel for one row of a product, None if the device or the weight does not support it."""
    weight = product.weight
    interpreted = weight.device.type == "cpu"
    if not interpreted and (not roomy(weight.device) or weight.element_size() != 2):
        return None
    if not chunk_of(product):
        return None
    if not agreeing_rows(weight.device, weight.dtype, product.k, product.leaves, product.activation):
        return None
    return FixedRow(product)


class FixedLinear:
    """The result of a ``FixedProduct`` for x [M, K], with another kernel for few rows.

    It is also the joined kernel of a norm and a product, as ``layers.fused`` calls it."""

    def __init__(self, weight: Tensor, leaves: int = 1, activation: str | None = None) -> None:
        self.product = FixedProduct(weight, leaves, activation)
        self.row = row_of_product(self.product)

    def __call__(self, x: Tensor, before: Addition | None = None) -> Tensor:
        """Return the result for x, or with ``before``, if it ``adds``, for the norm of its residual + x."""
        if self.row is not None and 0 < x.shape[0] <= MOST_ROWS:
            return self.row(x.contiguous(), before)
        assert before is None
        return self.product(x)

    def adds(self, x: Tensor) -> bool:
        """Return whether a call computes the residual addition and the norm before the product of x."""
        product = self.product
        return self.row is not None and x.shape[0] == 1 and product.leaves == 1


class FixedJoined:
    """A ``FixedLinear`` as ``layers.fused`` calls joined kernels: a norm, the product, and the gate if it has one."""

    def __init__(self, linear: FixedLinear) -> None:
        self.linear = linear

    def fits(self, x: Tensor) -> bool:
        """Return whether one kernel for x replaces several: it computes the gate, or the addition and the norm."""
        return self.linear.product.activation is not None or self.adds(x)

    def adds(self, x: Tensor) -> bool:
        return self.linear.adds(x)

    def __call__(
        self, x: Tensor, squares: Tensor | None = None, eps: float = 0.0, before: Addition | None = None
    ) -> tuple[Tensor, None]:
        """Return the result for x [M, K] and None.  ``squares`` is None, because norms are computed fully."""
        assert squares is None
        return self.linear(x, before), None
