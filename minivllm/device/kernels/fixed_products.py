"""x W^T in which the bits of a row do not depend on the number of rows (``batch_invariant``).

Every tile adds the products of an output in one order.  The inputs are cut into leaves of equal length.  Within a leaf
a tensor core adds 16 products at a time to one float32 accumulator, from the first input to the last one::

    leaf i:   a = 0;  a = a + x[k .. k + 15] · w[k .. k + 15]      for each k of the leaf, ascending
    output:   t = 0;  t = t + leaf 0;  t = t + leaf 1; ...         then rounded once to the dtype of x

The order depends on the number of inputs and on the kind of the layer only.  The tile is free: it may have any number
of rows, and either one program adds all leaves or each leaf has a program.  A layer whose inputs are split over
processes has up to 8 leaves, and other layers have one.  So few rows of a narrow layer still occupy the device::

    grid (row tiles * output tiles, 1)        t [BN, BM] over all leaves
    grid (row tiles * output tiles, leaves)   leaves -> float32 scratch; the last program to arrive adds them in order

The weight has the 64-row side of the tensor cores' instruction (wgmma) in every tile.  Instructions of other shapes
may add the 16 products in another order, so ``agreeing`` compares the tiles' bits on the device before their use.

Bytes: W once for each row tile that does not find it in the cache, x and y.  Reference: ``x @ W.T`` in float64.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minivllm.errors import ModelError

from .activation import NUMBER, gate_rounded
from .launch import capability, cdiv, kernel, pdl, wait

MOST_LEAVES = 8
UNIT = 64  # number of inputs; a leaf has a multiple of it, so that each tile's loop over the inputs ends with the leaf
STAGE_BYTES = 208 * 1024  # bytes of shared memory for tiles that are being loaded or multiplied
GROUP = 8  # number of row tiles over which neighbouring programs are distributed, so that they share cached weights
# The numbers of this file were measured on an H200 (2026-11-30, ``docs/performance.md``).
SPREAD_TILES = 32  # largest number of tiles with few rows for which each leaf has a program
NARROW, WIDE = 2048, 8192  # up to NARROW outputs, tiles have fewer outputs; from WIDE outputs on, a gated tile has more
MANY_TILES = 264  # number of tiles from which on fewer stages are used; two for each multiprocessor of an H200
COUNTERS = 1024  # number of counters of arrived programs, one for each tile of a product with a program for each leaf


class ProductTile(NamedTuple):
    """The sizes of the part of a product that one program computes."""

    rows: int  # BM
    outputs: int  # BN, number of outputs of a tile; a multiple of 64
    inputs: int  # BK, number of inputs of one step of the loop
    warps: int = 4
    spread: bool = False  # whether each leaf (part of the inputs) has its own program
    stages: int = 0  # steps of the loop whose tiles are loaded at the same time; 0 means as many as fit, at most 6


@triton.jit
def _place(M, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the index of the row tile and that of the output tile of this program.

    Programs of neighbouring numbers share GROUP row tiles, which stay in the second-level cache."""
    rows, tiles = (M + BM - 1) // BM, (N + BN - 1) // BN
    group = tl.program_id(0) // (GROUP * tiles)
    size = tl.minimum(rows - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles)
    return group * GROUP + within % size, within // size


@triton.jit
def _last_sum(acc, scratch, arrived, row, tile, M, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              LEAVES: tl.constexpr):  # fmt: skip
    """Store the sum of this program's leaf.  Return whether it is the last of its tile, and then all leaves' sum."""
    tiles: tl.constexpr = (N + BN - 1) // BN
    rows = (M + BM - 1) // BM
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    at = scratch + om.to(tl.int64)[None, :] * (tiles * BN) + on[:, None]
    step = rows.to(tl.int64) * BM * (tiles * BN)
    tl.store(at + tl.program_id(1) * step, acc)
    tl.debug_barrier()  # all of the program's stores come before its arrival
    counter = arrived + row * tiles + tile
    last = tl.atomic_add(counter, 1, sem="acq_rel") == LEAVES - 1
    total = tl.zeros([BN, BM], tl.float32)
    if last:
        for leaf in tl.static_range(LEAVES):
            total += tl.load(at + leaf * step, cache_modifier=".cg")
        tl.store(counter, 0)
    return last, total


@kernel("M")
def _fixed(
    x, weight, y, scratch, arrived, M, N: tl.constexpr, K: tl.constexpr, LEAVES: tl.constexpr, SPREAD: tl.constexpr,
    GATED: tl.constexpr, ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the weight.  ``x`` and ``weight`` are descriptors with blocks [BM, BK] and [BN, BK].

    With GATED the weight is [2 N, K], gate | up, and y is activation(gate) * up, both rounded before as by two kernels.
    """
    row, tile = _place(M, N, BM, BN, GROUP)
    wait(PDL)
    leaf: tl.constexpr = K // LEAVES
    first, end = 0, K
    if SPREAD:
        first = tl.program_id(1) * leaf
        end = first + leaf
    acc = tl.zeros([BN, BM], tl.float32)
    total = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(first, end, BK, num_stages=STAGES):
        a = x.load([row * BM, k]).T
        acc = tl.dot(weight.load([tile * BN, k]), a, acc, input_precision="ieee" if IEEE else "tf32")
        if GATED:
            up = tl.dot(weight.load([tile * BN + N, k]), a, up, input_precision="ieee" if IEEE else "tf32")
        if LEAVES > 1 and not SPREAD:  # noqa: SIM102
            if (k + BK) % leaf == 0:
                total += acc
                acc = tl.zeros([BN, BM], tl.float32)
    if LEAVES == 1:
        total = acc
    last = True
    if SPREAD:
        last, total = _last_sum(acc, scratch, arrived, row, tile, M, N, BM, BN, LEAVES)
    if last:
        om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
        at = om.to(tl.int64)[:, None] * N + on[None, :]
        if GATED:
            total = gate_rounded(total, up, y.dtype.element_ty, ACT)
        tl.store(y + at, tl.trans(total.to(y.dtype.element_ty)), mask=(om < M)[:, None] & (on < N)[None, :])


def leaves_of(inputs: int) -> int:
    """Return the number of leaves of a layer whose inputs processes may split: a power of two, 8 at most."""
    leaves = MOST_LEAVES
    while leaves > 1 and inputs % (leaves * UNIT):
        leaves //= 2
    return leaves


def tiles_of(outputs: int, leaf: int, leaves: int, wide: bool, gated: bool) -> list[tuple[int, ProductTile]]:
    """Return the tiles of a weight by the largest number of rows that uses each, ascending.  The last has no limit.

    ``leaf`` is the number of inputs of each of ``leaves`` leaves.  ``wide`` means float32, which the tensor cores
    multiply with fewer bits, so that other units compute it.  ``gated`` means that a tile has two sums for an output.
    """
    if wide:
        return [(0, ProductTile(64, 64, 32))]
    step = 128 if leaf % 128 == 0 else 64
    spread = leaves > 1 and cdiv(outputs, 64) <= SPREAD_TILES
    # with many tiles (a head), fewer stages let several programs run on a multiprocessor
    stages = 3 if cdiv(outputs, 64) > MANY_TILES and not gated else 0
    of_16 = ProductTile(16, 64, step, 4, spread, stages)
    of_32 = ProductTile(32, 64, step, 4, False, stages)
    of_64 = ProductTile(64, 64, 64 if gated else step, 4, False, stages)
    if gated:
        of_512 = ProductTile(128, 64, 64, 4, False, 0 if outputs <= 2 * NARROW else 3)
        many = ProductTile(128, 64, 64, 4, False, 3) if outputs < WIDE else ProductTile(128, 128, 64, 8)
    else:
        many = ProductTile(256, 128, 64, 8) if leaves > 1 else ProductTile(128, 128, 64, 8, False, 3)
        if outputs < NARROW:
            of_512 = ProductTile(64, 64, step)
        elif leaves > 1 or outputs <= 2 * NARROW:
            of_512 = ProductTile(128, 64, 64)
        else:
            of_512 = ProductTile(128, 128, 64, 8, False, stages)
    of_256 = of_32 if not gated and outputs < NARROW else of_512
    return [(16, of_16), (32, of_32), (64, of_64), (256, of_256), (512, of_512), (0, many)]


@cache
def _sums(device: torch.device, dtype: torch.dtype, leaves: int, gated: bool, tile: ProductTile) -> Tensor:
    """Compute the product of random rows and a small random weight with a tile, on a GPU.

    A third of the rows is a thousand times as large as the others."""
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(300, 1024, generator=random, device=device).to(dtype)
    x[::3] *= 1000
    weight = torch.randn(384, 1024, generator=random, device=device).to(dtype)
    activation = "silu" if gated else None
    product = FixedProduct(weight, leaves, activation, check=False)
    return product.multiply(x, tile)


def agreeing(device: torch.device, dtype: torch.dtype, leaves: int, gated: bool, tiles: Iterable[ProductTile]) -> bool:
    """Return whether all ``tiles`` give the same bits on a device, tested with a small weight.  True without a GPU."""
    if capability(device) == 0:
        return True
    compared = {}  # a dict, because a set would have another order in each run
    for tile in tiles:
        alone = tile._replace(spread=False)
        compared |= {tile: True, alone: True}
    first, *others = [_sums(device, dtype, leaves, gated, tile) for tile in compared]
    return all(torch.equal(first, other) for other in others)


class FixedProduct:
    """x [M, K] -> x W^T [M, N] in which a row's bits do not depend on M.

    ``leaves`` divides the sum over K as in the module's text.  If the device's tiles do not agree, one tile is used.
    With an ``activation`` the weight is [2 N, K], gate | up, and the result is activation(gate) * up [M, N], with the
    bits of the product and ``activation.gate_mul``."""

    def __init__(self, weight: Tensor, leaves: int = 1, activation: str | None = None, check: bool = True) -> None:
        rows, k = weight.shape
        gated = activation is not None
        if k * weight.element_size() % 16:
            raise ModelError(
                f"batch_invariant=true: a weight has {k} inputs of {weight.element_size()} bytes: "
                "expected a multiple of 16 bytes, which its kernel reads at a time"
            )
        whole = leaves == 1 or (leaves > 1 and not gated and k % (leaves * UNIT) == 0)
        if not whole:
            raise ValueError(
                f"{leaves} leaves of {k} inputs: expected leaves of a multiple of {UNIT} inputs, and no activation"
            )
        self.weight = weight
        self.leaves = leaves
        self.activation = activation
        self.n = rows // 2 if gated else rows
        self.k = k
        wide = weight.dtype == torch.float32
        self.tiles = tiles_of(self.n, k // leaves, leaves, wide, gated)
        counters = COUNTERS if leaves > 1 else 1
        self.arrived = torch.zeros(counters, dtype=torch.int32, device=weight.device)
        used = [tile for _, tile in self.tiles]
        if check and not agreeing(weight.device, weight.dtype, leaves, gated, used):
            self.tiles = self.tiles[-1:]

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        _, without_limit = self.tiles[-1]
        tile = next((tile for most, tile in self.tiles if rows <= most), without_limit)
        return self.multiply(x.contiguous(), tile)

    def multiply(self, x: Tensor, tile: ProductTile) -> Tensor:
        """Compute the product by one tile, for any number of rows."""
        n = self.n
        m = x.shape[0]
        gated = self.activation is not None
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        if not m:
            return y
        bm, bn, bk, warps, spread, stages = tile
        rows = cdiv(m, bm)
        columns = cdiv(n, bn)
        programs = self.leaves if spread else 1  # of a tile of outputs
        size = programs * rows * bm * columns * bn if spread else 1
        scratch = torch.empty(size, dtype=torch.float32, device=x.device)
        weight_rows = 2 * bn if gated else bn
        stage_bytes = (bm + weight_rows) * bk * x.element_size()
        constants = pdl(x)
        constants["N"] = n
        constants["K"] = self.k
        constants["LEAVES"] = self.leaves
        constants["SPREAD"] = spread
        constants["GATED"] = gated
        constants["ACT"] = NUMBER[self.activation or "silu"]
        constants["BM"] = bm
        constants["BN"] = bn
        constants["BK"] = bk
        constants["GROUP"] = GROUP
        constants["STAGES"] = stages or min(6, STAGE_BYTES // stage_bytes)
        constants["IEEE"] = x.dtype == torch.float32
        constants["num_warps"] = warps
        inputs = TensorDescriptor.from_tensor(x, [bm, bk])
        weight = TensorDescriptor.from_tensor(self.weight, [bn, bk])
        grid = (rows * columns, programs)
        _fixed[grid](inputs, weight, y, scratch, self.arrived, m, **constants)
        return y
