"""Product x W^T for up to 256 rows with its epilogue in one kernel, which is a gate, or residual addition and norm.

    o, down:       s = residual + x W^T, kept as the residual;  y = s * norm;  squares = sums of s^2 per tile
    qkv, gate_up:  y = (x W^T) * 1 / sqrt(sum(squares) / dim + eps);  gate_up also: activation(gate) * up

So a norm is no separate kernel.  Its weight is applied when the stream is written, and its factor, one number per row,
at the end of the next product.  One row is a *matvec* on the CUDA cores, which reads little more than the weight (small
weights: ``one_row``).  Up to 256 rows are a *GEMM* on the tensor cores.  TMA loads its tiles, and the weight's rows are
on the long side of the tile::

    grid (M / BM, N / BN, SK)     y^T [BN, BM] = W [BN, K / SK] x^T;   with SK > 1 the last program adds the parts

With few rows of a small model the latency of the weights takes more time than a separate norm.  There the kernels of
``fixed_rows`` load the weight before they wait.

The weight is read once, x and y a few times.  Sums are float32 in an order that depends only on the shapes.  The
reference is ``device.layers.fused``, which states each of the three operations in torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .activation import NUMBER
from .fixed_products import FixedProduct, leaves_of
from .fixed_rows import MOST_INPUTS, FixedRow, chunk_of
from .launch import cdiv, kernel, pdl, power, roomy, wait
from .norm import add_rms_norm
from .one_row import OUTPUTS, SMALL, multiply_row, serves
from .product_epilogue import ADDED, GATED, PLAIN, ahead, finish, weight_of
from .split_sums import scratch_of

# largest number of rows for which these kernels are faster than a library's product and a second kernel for the
# epilogue (measured on an H200)
MOST_ROWS = 64
# largest number of rows for kernels that load the weight before they wait, and have no epilogue but a gate
FEW_ROWS = 16
SLOTS = 132  # number of multiprocessors of an H100 or H200
STAGE_BYTES = 208 * 1024  # bytes of shared memory for tiles that are being loaded or multiplied
LARGE_TILES = ((32, 64), (64, 128), (128, 64))  # BM and BN of more than 128 rows
MANY_ROWS = {PLAIN: 256, GATED: 128, ADDED: 256}  # mode -> largest number of rows for small weights


class Limit(NamedTuple):
    """The outputs of a product that are needed: the first ``fixed``, and ``each`` for each of ``used`` i32 [1].

    Programs of other outputs compute nothing."""

    used: Tensor
    fixed: int
    each: int


@kernel("used")
def _matvec(
    x, weight, y, bias, residual, norm, in_squares, out_squares, used, eps, N: tl.constexpr, K: tl.constexpr,
    DIM: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr, MODE: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, FIXED: tl.constexpr, EACH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one row x by a large weight in a pipelined loop, and apply the epilogue."""
    om, on, ok = tl.arange(0, 1), tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    after = weight_of(norm, on, N, MODE)
    w_at = weight + on.to(tl.int64)[:, None] * K + ok[None, :]
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    wait(PDL)
    if EACH > 0:
        needed = FIXED + tl.load(used) * EACH
        if tl.program_id(0) * BN >= needed:
            return
    factor, stream = ahead(om, on, residual, in_squares, eps, 1, N, DIM, PARTS, PARTS_P, MODE)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        on_w = (on < N)[:, None] & (k + ok < K)[None, :]
        w = tl.load(w_at + k, mask=on_w, other=0.0, eviction_policy="evict_first")
        v = tl.load(x + k + ok, mask=k + ok < K, other=0.0).to(tl.float32)[None, :]
        acc += w.to(tl.float32) * v
        if MODE == 1:
            u = tl.load(w_at + N * K + k, mask=on_w, other=0.0, eviction_policy="evict_first")
            up += u.to(tl.float32) * v
    finish(tl.sum(acc, 1)[None, :], tl.sum(up, 1)[None, :], om, on, tl.program_id(0), factor, stream, after, y, bias,
           residual, out_squares, 1, N, PARTS, MODE, BIAS, ACT)  # fmt: skip


@kernel("M", "used")
def _gemm(
    x, weight, y, bias, residual, norm, in_squares, out_squares, used, scratch, arrived, eps, M,
    N: tl.constexpr, K: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr,
    MODE: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, FIXED: tl.constexpr, EACH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SK: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows by the weight.

    ``x`` and ``weight`` are descriptors with blocks [BM, BK] and [BN, BK], which return 0 outside the tensors.
    """
    row, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    om, on = row * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN)
    after = weight_of(norm, on, N, MODE)
    wait(PDL)
    if EACH > 0:
        needed = FIXED + tl.load(used) * EACH
        if tile * BN >= needed:
            return
    factor, stream = ahead(om, on, residual, in_squares, eps, M, N, DIM, PARTS, PARTS_P, MODE)
    each: tl.constexpr = (K + BK * SK - 1) // (BK * SK) * BK
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(part * each, tl.minimum(part * each + each, K), BK, num_stages=STAGES):
        a = x.load([row * BM, k]).T
        acc = tl.dot(weight.load([tile * BN, k]), a, acc, input_precision="ieee" if IEEE else "tf32")
        if MODE == 1:
            up = tl.dot(weight.load([tile * BN + N, k]), a, up, input_precision="ieee" if IEEE else "tf32")
    last = True
    if SK > 1:
        rows = tl.num_programs(0) * BM
        wide: tl.constexpr = (N + BN - 1) // BN * BN
        at = scratch + om[None, :] * wide + on[:, None]
        step = rows * wide
        tl.store(at + part * step, acc)
        if MODE == 1:
            tl.store(at + (SK + part) * step, up)
        tl.debug_barrier()  # all threads must have stored their sums before one thread counts the program as arrived
        counter = arrived + row * tl.num_programs(1) + tile
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SK - 1
        if last:
            acc = tl.zeros([BN, BM], tl.float32)
            for i in tl.static_range(SK):
                acc += tl.load(at + i * step, cache_modifier=".cg")
            if MODE == 1:
                up = tl.zeros([BN, BM], tl.float32)
                for i in tl.static_range(SK):
                    up += tl.load(at + (SK + i) * step, cache_modifier=".cg")
            tl.store(counter, 0)
    if last:
        finish(tl.trans(acc), tl.trans(up), om, on, tile, factor, stream, after, y, bias, residual, out_squares, M, N,
               PARTS, MODE, BIAS, ACT)  # fmt: skip


def vector_tile(k: int, gated: bool) -> dict[str, int]:
    """Return the tile sizes of the kernel for one row and a large weight of k inputs."""
    sums = 2 if gated else 1  # of an output
    warps = 8 if k > 8192 else 4
    return dict(BN=8 // sums, BK=1024, STAGES=3, num_warps=warps)


def _cost(rows: int, n: int, bm: int, bn: int) -> int:
    """Return the time of the tiles of a product, in elements that a multiprocessor computes one after another.

    The elements that a tile loads count with a small weight.
    """
    tiles = cdiv(rows, bm) * cdiv(n, bn)
    waves = cdiv(tiles, SLOTS)
    loaded = bm + bn
    return waves * (bm * bn + 24 * loaded)


def matrix_tile(rows: int, n: int, k: int, gated: bool, limited: bool = False) -> dict[str, int]:
    """Return the tile of 2 to 256 rows, with enough programs for 132 multiprocessors and full use of shared memory.

    ``limited`` means that the product has a ``Limit``."""
    if rows > 128 and not gated:
        bm, bn = min(LARGE_TILES, key=lambda tile: _cost(rows, n, *tile))
        return _staged(bm, bn, 128, 1, gated)
    bn = 64
    bm = 16
    columns = cdiv(n, bn)
    while bm < min(rows, 64) and cdiv(rows, bm) * columns > 160:
        bm *= 2
    programs = cdiv(rows, bm) * columns
    if limited and bm == 16 and 16 < rows <= 32 and programs > SLOTS:
        # Two of these programs fit on a multiprocessor, so none waits for the others: 20 us less in each layer of 8B
        # with 32 adapters of rank 16 behind its weights (H200, 32 rows; two such products in a layer).
        return {"BM": 32, "BN": bn, "BK": 128, "SK": 2, "STAGES": 4, "num_warps": 4}
    if programs > 200 and not gated:
        bn = 128
        programs = cdiv(rows, bm) * cdiv(n, bn)
    bk = 128
    if gated and bm == 64:
        bk = 64
    elif bm == 16 and not gated and k >= 1024:
        bk = 256
    if bm == 32 and not gated and SLOTS < programs <= 3 * SLOTS // 2:
        # three programs fit on a multiprocessor: 6 % faster (H200, 32 rows, n of 10,240 and 12,352)
        return {"BM": bm, "BN": bn, "BK": 64, "SK": 1, "STAGES": 5, "num_warps": 4}
    sk = 1
    while sk < 4 and programs * sk < 48 and k >= 4 * sk * bk:
        sk *= 2
    return _staged(bm, bn, bk, sk, gated)


def _staged(bm: int, bn: int, bk: int, sk: int, gated: bool) -> dict[str, int]:
    """Return a tile with as many stages as shared memory holds, at most 6."""
    weight_rows = 2 * bn if gated else bn
    stage = (bm + weight_rows) * bk * 2
    stages = min(6, STAGE_BYTES // stage)
    return {"BM": bm, "BN": bn, "BK": bk, "SK": sk, "STAGES": stages, "num_warps": 4}


def loaded_row(weight: Tensor, mode: int, activation: str) -> FixedRow | None:
    """Return the kernel for up to FEW_ROWS rows and a weight of a small model, None for other weights.

    The residual stream has at most ``MOST_INPUTS`` elements, so the kernel serves the products before and behind it.
    """
    outputs, inputs = weight.shape
    width = outputs if mode == ADDED else inputs
    if width > MOST_INPUTS or inputs * weight.element_size() % 16:
        return None
    leaves = leaves_of(inputs) if mode == ADDED else 1
    gate = activation if mode == GATED else None
    product = FixedProduct(weight, leaves, gate, check=False)
    return FixedRow(product) if chunk_of(product) else None


class Product:
    """The kernels for one weight [N, K], with ``mode`` PLAIN, GATED (N = gate | up) or ADDED.

    The object keeps the counters of split sums, which are 0 between launches.  A replacement (``WeightScheme.joined``)
    may also have ``rounds`` and ``of_rows``, which handle many rows in 8 bits, and ``takes_tops``
    (``quant.FusedProduct``).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, mode: int = PLAIN, activation: str = "silu") -> None:
        self.weight = weight
        self.bias = bias
        self.mode = mode
        self.activation = activation
        outputs, self.k = weight.shape
        self.n = outputs // 2 if mode == GATED else outputs
        self.arrived = torch.zeros(256, dtype=torch.int32, device=weight.device)
        # largest number of rows for which the kernel is faster than the library's product with a separate norm or gate
        self.rows = 1
        if roomy(weight.device) and weight.dtype == torch.bfloat16 and self.k % 8 == 0:
            self.rows = MANY_ROWS[mode] if weight.numel() <= SMALL else MOST_ROWS
        self.loaded: FixedRow | None = None
        if bias is None and (self.rows > 1 or weight.device.type == "cpu"):
            self.loaded = loaded_row(weight, mode, activation)

    def fits(self, x: Tensor) -> bool:
        """Return whether the kernel supports x [M, K].

        x may be the residual stream times the weight of its norm, not yet divided by its root mean square.  Such values
        may overflow float16, so x in float16 is not supported.
        """
        weight = self.weight
        if not x.dtype == weight.dtype != torch.float16:
            return False
        return 0 < x.shape[0] <= self.rows and x.is_contiguous() and weight.is_contiguous()

    def __call__(
        self,
        x: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        norm: Tensor | None = None,
        limit: Limit | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute y [M, N] of x [M, K], and in mode ADDED the sums of squares [M, tiles] of the new ``residual`` [M,
        N], or None if y is already divided by its root mean square.

        The residual is changed in place.  ``squares`` [M, P] are the sums of squares of x, and ``eps`` is that of its
        norm, in mode ADDED that of the next norm.  Outputs outside ``limit`` may have any value.
        """
        m = x.shape[0]
        n = self.n
        k = self.k
        gated = self.mode == GATED
        if self.loaded is not None and 1 < m <= FEW_ROWS and squares is None and limit is None:
            return self._few(self.loaded, x, eps, residual, norm), None
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        small = m == 1 and serves(n, k)
        if small:
            tile = {"BN": OUTPUTS}
        elif m == 1:
            tile = vector_tile(k, gated)
        else:
            tile = matrix_tile(m, n, k, gated, limit is not None)
        tiles = cdiv(n, tile["BN"])
        sums = None
        if self.mode == ADDED:
            sums = torch.empty((m, tiles), dtype=torch.float32, device=x.device)
        given = (y, self.bias, residual, norm, squares, sums)
        tensors = [y if one is None else one for one in given]  # the kernels do not read absent tensors
        parts = 0 if squares is None else squares.shape[1]
        constants = pdl(x) | tile
        constants["N"] = n
        constants["K"] = k
        constants["PARTS"] = parts
        constants["MODE"] = self.mode
        constants["BIAS"] = self.bias is not None
        constants["ACT"] = NUMBER[self.activation]
        if small:
            multiply_row(x, self.weight, tensors, eps, constants)
            return y, sums
        tensors.append(y if limit is None else limit.used)
        constants["DIM"] = k
        constants["PARTS_P"] = power(max(parts, 1))
        constants["FIXED"] = 0 if limit is None else limit.fixed
        constants["EACH"] = 0 if limit is None else limit.each
        if m == 1:
            _matvec[(tiles,)](x, self.weight, *tensors, eps, **constants)
            return y, sums
        self._multiply(x, tensors, eps, constants)
        return y, sums

    def _few(self, kernel: FixedRow, x: Tensor, eps: float, residual: Tensor | None, norm: Tensor | None) -> Tensor:
        """Return y, in mode ADDED normalized, by a kernel that loads the weight before it waits."""
        y = kernel(x)
        if self.mode == ADDED:
            assert norm is not None
            y, _ = add_rms_norm(y, residual, norm, eps)
        return y

    def _multiply(self, x: Tensor, tensors: list[Tensor], eps: float, constants: dict[str, Any]) -> None:
        """Launch the kernel for more than one row, with the tile in ``constants``."""
        y, *_ = tensors
        m = x.shape[0]
        bm = constants["BM"]
        bn = constants["BN"]
        bk = constants["BK"]
        sk = constants["SK"]
        rows = cdiv(m, bm)
        tiles = cdiv(self.n, bn)
        columns = 2 * bn if self.mode == GATED else bn
        scratch = scratch_of(y, sk, rows * bm * tiles * columns)
        inputs = TensorDescriptor.from_tensor(x, [bm, bk])
        weight = TensorDescriptor.from_tensor(self.weight, [bn, bk])
        constants["IEEE"] = x.dtype == torch.float32
        _gemm[(rows, tiles, sk)](inputs, weight, *tensors, scratch, self.arrived, eps, m, **constants)
