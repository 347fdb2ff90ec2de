"""Products of the experts for each token and its k chosen experts, and the weighted sums of their results.

    x [T, H] ──up──► activation(gate) * up [pairs, I] ──down──► weight * output [pairs, H] ──combine──► [T, H]

Up to ``FEW`` tokens are computed as *matvecs* on the CUDA cores, with a program for each tile and pair.  Each weight of
a chosen expert is read once for each of its pairs.  More tokens are computed as *grouped GEMMs*.  ``router.assign``
sorts the pairs by expert into blocks.  TMA loads the tiles of the weights, whose rows are on the long side of the tile
(``products``)::

    up     grid (I / BN, blocks)   y^T [BN, BM] = W [e, BN, H] x[tokens of the block]^T
    down   grid (H / BN, blocks)   the same from the order of the blocks to the order of the pairs
    combine grid (T)               sum of k rows, one after another, and of the shared MLP's row times its gate

The weights of the chosen experts are read once.  Sums are float32 in an order that depends only on the shapes.  The
reference is ``device.layers.experts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minivllm.errors import ModelError

from .activation import NUMBER, activate
from .launch import cdiv, kernel, pdl, power, wait
from .router import assign

FEW = 4  # up to this number of tokens each (token, expert) pair reads the weights of its expert separately
# up to this number of (token, expert) pairs, the blocks of a grouped product find their pairs without ``assign``
MOST_PAIRS = 128
OAI = 5  # number by which kernels are told the activation "swiglu_oai", a function of both gate and up
# each line: most (token, expert) pairs of an expert; then for ``up`` and ``down`` BM, BN, BK for elements of 2 bytes,
# stages and warps
TILES = (
    (12, (16, 64, 128, 2, 4), (16, 64, 128, 3, 4)),
    (32, (32, 128, 128, 3, 8), (32, 64, 128, 3, 4)),
    (64, (64, 64, 64, 3, 4), (64, 128, 64, 3, 4)),
    (float("inf"), (128, 128, 64, 4, 8), (128, 128, 64, 3, 4)),
)
FIXED = (64, 64, 64, 4, 4)
CONSTANTS = ("BM", "BN", "BK", "STAGES", "num_warps")  # the columns of these tables
Table = Sequence[tuple[float, tuple[int, ...], tuple[int, ...]]]


@triton.jit
def _gated(gate, up, limit, alpha, ACT: tl.constexpr, DTYPE: tl.constexpr):
    """Return activation(gate) * up of float32 numbers, each first rounded to DTYPE as its product would be."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    if ACT == 5:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    return activate(gate, ACT) * up


@kernel()
def _up_few(
    x, weight, bias, ids, squares, y, eps, limit, alpha, K: tl.constexpr, N: tl.constexpr, H: tl.constexpr,
    PARTS: tl.constexpr, PARTS_P: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate) * up for one (token, expert) pair and a tile of outputs: y [pairs, N]."""
    wait(PDL)
    pair = tl.program_id(1)
    row = pair // K
    e = tl.load(ids + pair).to(tl.int64)
    on, ok = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    at = weight + (e * 2 * N + on)[:, None] * H + ok[None, :]
    acc = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        there = (on < N)[:, None] & (k + ok < H)[None, :]
        w = tl.load(at + k, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
        u = tl.load(at + N * H + k, mask=there, other=0.0, eviction_policy="evict_first").to(tl.float32)
        v = tl.load(x + row.to(tl.int64) * H + k + ok, mask=k + ok < H, other=0.0).to(tl.float32)[None, :]
        acc += w * v
        up += u * v
    gate, other = tl.sum(acc, 1), tl.sum(up, 1)
    if PARTS > 0:
        part = tl.arange(0, PARTS_P)
        s = tl.load(squares + row * PARTS + part, mask=part < PARTS, other=0.0)
        factor = tl.rsqrt(tl.sum(s, 0) / H + eps)
        gate *= factor
        other *= factor
    if BIAS:
        gate += tl.load(bias + e * 2 * N + on, mask=on < N, other=0.0).to(tl.float32)
        other += tl.load(bias + e * 2 * N + N + on, mask=on < N, other=0.0).to(tl.float32)
    z = _gated(gate, other, limit, alpha, ACT, y.dtype.element_ty)
    tl.store(y + pair * N + on, z.to(y.dtype.element_ty), mask=on < N)


@kernel()
def _down_few(
    h, weight, bias, ids, weights, residual, norm, squares, y, K: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute the output of a token with all its experts, y [T, H].

    With ADD the output is added to the residual.  y is then the sum times the norm's weight, and ``squares`` receives
    the sum of squares of the tile.
    """
    wait(PDL)
    row = tl.program_id(1)
    on, ok = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    each: tl.constexpr = (N + BK - 1) // BK
    acc = tl.zeros([BN, BK], tl.float32)
    offset = tl.zeros([BN], tl.float32)
    for i in tl.range(0, K * each, num_stages=STAGES):
        pair, k = row * K + i // each, i % each * BK
        e = tl.load(ids + pair).to(tl.int64)
        there = (on < H)[:, None] & (k + ok < N)[None, :]
        w = tl.load(weight + (e * H + on)[:, None] * N + (k + ok)[None, :], mask=there, other=0.0,
                    eviction_policy="evict_first").to(tl.float32)  # fmt: skip
        v = tl.load(h + pair * N + k + ok, mask=k + ok < N, other=0.0).to(tl.float32)
        acc += w * (v * tl.load(weights + pair))[None, :]
    if BIAS:
        for i in tl.static_range(K):
            e = tl.load(ids + row * K + i).to(tl.int64)
            b = tl.load(bias + e * H + on, mask=on < H, other=0.0).to(tl.float32)
            offset += b * tl.load(weights + row * K + i)
    out = (tl.sum(acc, 1) + offset).to(y.dtype.element_ty)
    place = row.to(tl.int64) * H + on
    if ADD:
        out = (tl.load(residual + place, mask=on < H, other=0.0) + out).to(y.dtype.element_ty)
        tl.store(residual + place, out, mask=on < H)
        wide = out.to(tl.float32)
        tl.store(squares + row * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(on < H, wide * wide, 0.0), 0))
        out = (wide * tl.load(norm + on, mask=on < H, other=0.0).to(tl.float32)).to(y.dtype.element_ty)
    tl.store(y + place, out, mask=on < H)


@triton.jit
def _block(order, expert, pairs, block, BM: tl.constexpr, FROM: tl.constexpr):
    """Return the expert of a block, or -1, and its pairs [BM].

    FROM > 0 means that ``assign`` did not run, and that ``order`` and ``expert`` are both the expert ids of at most
    FROM pairs.  A block then belongs to a pair, and every BM-th pair of an expert handles the pairs up to the next such
    pair.
    """
    e = tl.load(expert + block)
    if FROM == 0:
        pair = tl.load(order + block * BM + tl.arange(0, BM))
    else:
        at, place = tl.arange(0, FROM), tl.arange(0, BM)
        same = (tl.load(order + at, mask=at < pairs, other=-1) == e).to(tl.int32)
        before = tl.sum(tl.where(at < block, same, 0), 0)
        rank = tl.cumsum(same, 0) - 1 - before
        here = (same > 0)[:, None] & (rank[:, None] == place[None, :])
        pair = tl.sum(tl.where(here, at[:, None], 0), 0)
        pair = tl.where(place < tl.sum(same, 0) - before, pair, pairs)
        e = tl.where(before % BM == 0, e, -1)
    return e, pair


@kernel("pairs")
def _up(
    x, weight, bias, order, expert, squares, y, pairs, eps, limit, alpha, K: tl.constexpr, N: tl.constexpr,
    H: tl.constexpr, FROM: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr, BIAS: tl.constexpr,
    ACT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate) * up for a block of (token, expert) pairs: y [blocks * BM, N], in the order of the
    blocks.

    ``weight`` is a descriptor over [E * 2 N, H].
    """
    wait(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    e, pair = _block(order, expert, pairs, block, BM, FROM)
    if e < 0:
        return
    om, ok = block * BM + tl.arange(0, BM), tl.arange(0, BK)
    real, row = pair < pairs, pair // K
    at = x + row.to(tl.int64)[:, None] * H + ok[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        a = tl.load(at + k, mask=real[:, None] & (k + ok < H)[None, :], other=0.0).T
        w = weight.load([e * 2 * N + tile * BN, k])
        acc = tl.dot(w, a, acc, input_precision="ieee" if IEEE else "tf32")
        u = weight.load([e * 2 * N + N + tile * BN, k])
        up = tl.dot(u, a, up, input_precision="ieee" if IEEE else "tf32")
    on = tile * BN + tl.arange(0, BN)
    if PARTS > 0:
        part = tl.arange(0, PARTS_P)
        s = tl.load(squares + row[:, None] * PARTS + part[None, :],
                    mask=real[:, None] & (part < PARTS)[None, :], other=0.0)  # fmt: skip
        factor = tl.rsqrt(tl.sum(s, 1) / H + eps)[None, :]
        acc = acc * factor
        up = up * factor
    if BIAS:
        b = bias + e.to(tl.int64) * 2 * N + on
        acc += tl.load(b, mask=on < N, other=0.0).to(tl.float32)[:, None]
        up += tl.load(b + N, mask=on < N, other=0.0).to(tl.float32)[:, None]
    z = _gated(acc, up, limit, alpha, ACT, y.dtype.element_ty)
    z = tl.trans(z.to(y.dtype.element_ty))
    tl.store(y + om.to(tl.int64)[:, None] * N + on[None, :], z, mask=(on < N)[None, :])


@kernel("pairs")
def _down(
    h, weight, bias, order, expert, weights, y, pairs, H: tl.constexpr, N: tl.constexpr, FROM: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    IEEE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the experts' outputs for a block of (token, expert) pairs, times the router's weights: y [pairs, H].

    The descriptors are over h [blocks * BM, N] and [E * H, N].
    """
    wait(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    e, pair = _block(order, expert, pairs, block, BM, FROM)
    if e < 0:
        return
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(0, N, BK, num_stages=STAGES):
        a = h.load([block * BM, k]).T
        w = weight.load([e * H + tile * BN, k])
        acc = tl.dot(w, a, acc, input_precision="ieee" if IEEE else "tf32")
    on, real = tile * BN + tl.arange(0, BN), pair < pairs
    if BIAS:
        acc += tl.load(bias + e.to(tl.int64) * H + on, mask=on < H, other=0.0).to(tl.float32)[:, None]
    z = acc * tl.load(weights + pair, mask=real, other=0.0)[None, :]
    z = tl.trans(z.to(y.dtype.element_ty))
    tl.store(y + pair.to(tl.int64)[:, None] * H + on[None, :], z, mask=real[:, None] & (on < H)[None, :])


@kernel()
def _combine(
    y, residual, norm, shared, x, gate, squares, out, eps, gate_eps, K: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    PARTS: tl.constexpr, PARTS_P: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum the k rows of a token, and with SHARED the token's row of the shared MLP.

    With GATED that row is first multiplied by sigmoid(gate . x), where x may lack the division of its norm.  With ADD
    the sum is added to the residual, and the result is its RMSNorm (``norm.add_rms_norm``).  Each sum is rounded to the
    dtype of ``out``, as that of a layer of its own.
    """
    wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    on = at < H
    total = tl.zeros((P,), tl.float32)
    for i in tl.static_range(K):
        total += tl.load(y + (row * K + i) * H + at, mask=on, other=0.0).to(tl.float32)
    value = total.to(out.dtype.element_ty)
    if SHARED:
        other = tl.load(shared + row * H + at, mask=on, other=0.0).to(tl.float32)
        if GATED:
            inputs = tl.load(x + row * H + at, mask=on, other=0.0).to(tl.float32)
            logit = tl.sum(inputs * tl.load(gate + at, mask=on, other=0.0).to(tl.float32), 0)
            if PARTS > 0:
                part = tl.arange(0, PARTS_P)
                s = tl.load(squares + row * PARTS + part, mask=part < PARTS, other=0.0)
                logit *= tl.rsqrt(tl.sum(s, 0) / H + gate_eps)
            share = 1.0 / (1.0 + tl.exp(-logit.to(x.dtype.element_ty).to(tl.float32)))
            other = (other * share.to(x.dtype.element_ty).to(tl.float32)).to(out.dtype.element_ty).to(tl.float32)
        value = (value.to(tl.float32) + other).to(out.dtype.element_ty)
    if ADD:
        value = (tl.load(residual + row * H + at, mask=on, other=0.0) + value).to(out.dtype.element_ty)
        tl.store(residual + row * H + at, value, mask=on)
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
        value = (wide * inverse * tl.load(norm + at, mask=on, other=0.0).to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * H + at, value, mask=on)


class ResidualNorm(NamedTuple):
    """The residual stream to which the experts' output is added in place, and the RMSNorm that is computed of the
    sum."""

    residual: Tensor  # [T, H]
    norm: Tensor  # [H]
    eps: float
    whole: bool  # whether the kernel completes the norm by the division by the root mean square


class SharedOutput(NamedTuple):
    """The output of the shared MLP ``y`` [T, H], and the weight of its gate [H], whose sigmoid multiplies the output.

    ``gate`` None means that the output has no gate.
    """

    y: Tensor
    gate: Tensor | None


NO_DIVISION = {"PARTS": 0, "PARTS_P": 1}  # constants of kernels whose inputs need no division


class Division(NamedTuple):
    """The division of inputs x [T, H] by sqrt(sum of squares / H + eps) in a kernel.

    ``parts`` is the number of ``squares`` f32 [T, parts] of a token.  0 means that nothing is divided and
    ``squares`` is not read.
    """

    squares: Tensor
    eps: float
    parts: int

    def constants(self) -> dict[str, int]:
        """Return the constants of kernels that divide their inputs."""
        if not self.parts:
            return NO_DIVISION
        return {"PARTS": self.parts, "PARTS_P": power(self.parts)}


def few_tiles(inp: int, gated: bool) -> dict[str, int]:
    """Return the tile of the kernels for few tokens (matrix-vector products), for weights of ``inp`` inputs.

    ``gated`` is the product of gate and up, otherwise it is that of down.
    """
    inputs = power(inp)
    if gated:
        return dict(BN=8, BK=min(256, inputs), STAGES=2, num_warps=4)
    return dict(BN=8, BK=min(1024, inputs), STAGES=4, num_warps=8)


def chosen_tile(table: Table, pairs_each: float, gated: bool) -> dict[str, int]:
    """Return the constants in the line of a table for the mean number of pairs per expert."""
    _, up, down = next(line for line in table if pairs_each <= line[0])
    return named_tile(up if gated else down)


def named_tile(columns: tuple[int, ...]) -> dict[str, int]:
    """Return the constants of a tile by their names."""
    return dict(zip(CONSTANTS, columns, strict=True))


def tiles(pairs_each: float, gated: bool, size: int, fixed: bool = False) -> dict[str, int]:
    """Return the tile of a grouped product for the mean number of pairs per expert.

    ``gated`` is the product of gate and up, otherwise it is that of down.  The tiles are from
    ``benchmarks/tune_experts.py`` on an H200.  ``size`` is the bytes of an element.  ``fixed`` returns the same tile
    for all numbers of pairs.
    """
    tile = named_tile(FIXED) if fixed else chosen_tile(TILES, pairs_each, gated)
    tile["BK"] = tile["BK"] * 2 // size
    return tile


def _filled_up(x: Any, missing: int) -> Any:
    """Return [E, 2 I, ...] = gate | up with ``missing`` rows of zeros behind gate and behind up, [E, 2 (I + missing),
    ...].
    """
    if x is None:
        return None
    gate, up = x.chunk(2, dim=1)
    after = (0, 0) * (x.dim() - 2)
    zeros = (*after, 0, missing)
    halves = [F.pad(gate, zeros), F.pad(up, zeros)]
    return torch.cat(halves, dim=1)


class ExpertProducts:
    """Kernels for the experts of one layer with weights ``gate_up`` [E, 2 I, H], gate first, and ``down`` [E, H, I].

    The weights are contiguous.  ``fixed`` means that the bits of a token do not depend on the other tokens.  If the
    inner width I is no multiple of 16 bytes, copies of the weights are filled up with zeros.  ModelError if the hidden
    width H is no multiple of 16 bytes.
    """

    few = FEW

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float = 1.702,
        fixed: bool = False,
    ) -> None:
        size = gate_up.element_size()
        if down.shape[1] * size % 16:
            raise ModelError(
                f"experts of {down.shape[1]} inputs of {size} bytes: expected a multiple of 16 bytes, which the "
                "kernels read at a time; use fuse=false without batch_invariant"
            )
        missing = -down.shape[2] % (16 // size)
        if missing:
            gate_up = _filled_up(gate_up, missing)
            gate_up_bias = _filled_up(gate_up_bias, missing)
            down = F.pad(down, (0, missing))
        self.count, self.hidden, self.inner = down.shape
        self.up = gate_up.flatten(0, 1)
        self.down = down.flatten(0, 1)
        self._around(gate_up_bias, down_bias, activation, limit, alpha)
        self.fixed = fixed

    def _around(
        self, up_bias: Tensor | None, down_bias: Tensor | None, activation: str, limit: float | None, alpha: float
    ) -> None:
        """Store the biases and the activation of the experts."""
        self.up_bias = up_bias
        self.down_bias = down_bias
        self.activation = OAI if activation == "swiglu_oai" else NUMBER[activation]
        self.limit = float("inf") if limit is None else limit
        self.alpha = alpha

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        squares: Tensor | None = None,
        eps: float = 0.0,
        stream: ResidualNorm | None = None,
        shared: SharedOutput | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the sum of the experts' outputs y [T, H] for x [T, H], ids i32 [T, k] below E, and weights f32 [T,
        k].

        ``squares`` f32 [T, P] means that x must still be divided by sqrt(sum of squares / H + eps)
        (``device.layers.fused.Normed``).  ``shared`` is added to the output.  With a ``stream`` the output is added to
        it, and the result is its norm.  If that norm lacks its division, the second result is the squares of the stream
        f32 [T, tiles], otherwise None.
        """
        t, k = ids.shape
        if not t:
            return torch.empty_like(x), None
        x = x.contiguous()
        division = Division(x, eps, 0) if squares is None else Division(squares, eps, squares.shape[1])
        if t <= self.few and not self.fixed:
            # float16 needs a separate norm, because values before the norm's division may overflow it
            apart = stream is not None and (stream.whole or x.dtype == torch.float16)
            apart = apart or shared is not None
            if not apart:
                return self._few(x, ids, weights, division, stream)
            y, _ = self._few(x, ids, weights, division, None)
            return self._sum(y, 1, stream, shared, x, division), None
        pairs = t * k
        if pairs <= MOST_PAIRS:
            order = ids
            expert = ids.view(-1)
        else:
            bm = self._tile(pairs, True)["BM"]
            order, expert = assign(ids, self.count, bm)
        y = self._grouped(x, ids, weights, order, expert, division)
        return self._sum(y, k, stream, shared, x, division), None

    def _tile(self, pairs: int, gated: bool) -> dict[str, int]:
        size = self.up.element_size()
        return tiles(pairs / self.count, gated, size, self.fixed)

    def _biases(self, like: Tensor) -> tuple[Tensor, Tensor]:
        up_bias = like if self.up_bias is None else self.up_bias
        down_bias = like if self.down_bias is None else self.down_bias
        return up_bias, down_bias

    def _few(
        self, x: Tensor, ids: Tensor, weights: Tensor, division: Division, stream: ResidualNorm | None
    ) -> tuple[Tensor, Tensor | None]:
        t, k = ids.shape
        h = self.hidden
        n = self.inner
        up_bias, down_bias = self._biases(x)
        pairs = t * k
        inner = x.new_empty(pairs, n)
        out = torch.empty_like(x)
        sizes = pdl(x) | {"K": k, "N": n, "H": h}
        constants = sizes | few_tiles(h, True) | division.constants()
        constants["ACT"] = self.activation
        constants["BIAS"] = self.up_bias is not None
        programs = cdiv(n, constants["BN"])
        squares, eps, _ = division
        _up_few[(programs, pairs)](x, self.up, up_bias, ids, squares, inner, eps, self.limit, self.alpha, **constants)
        constants = sizes | few_tiles(n, False)
        constants["BIAS"] = self.down_bias is not None
        constants["ADD"] = stream is not None
        programs = cdiv(h, constants["BN"])
        residual = norm = sums = out  # the kernel does not read absent tensors
        found = None
        if stream is not None:
            residual = stream.residual
            norm = stream.norm
            sums = found = torch.empty((t, programs), dtype=torch.float32, device=x.device)
        _down_few[(programs, t)](inner, self.down, down_bias, ids, weights, residual, norm, sums, out, **constants)
        return out, found

    def _grouped(
        self, x: Tensor, ids: Tensor, weights: Tensor, order: Tensor, expert: Tensor, division: Division
    ) -> Tensor:
        h = self.hidden
        n = self.inner
        blocks = len(expert)
        up_bias, down_bias = self._biases(x)
        pairs = ids.numel()
        tile = self._tile(pairs, True)
        bm = tile["BM"]
        inner = x.new_empty(blocks * bm, n)
        sizes = pdl(x) | {"N": n, "H": h}
        sizes["FROM"] = power(pairs) if order is ids else 0
        sizes["IEEE"] = x.dtype == torch.float32
        constants = sizes | tile | division.constants()
        constants["K"] = ids.shape[1]
        constants["ACT"] = self.activation
        constants["BIAS"] = self.up_bias is not None
        weight = _tiled(self.up, tile)
        squares, eps, _ = division
        tensors = (x, weight, up_bias, order, expert, squares, inner)
        programs = cdiv(n, tile["BN"])
        _up[(programs, blocks)](*tensors, pairs, eps, self.limit, self.alpha, **constants)
        tile = self._tile(pairs, False)
        y = x.new_empty(pairs, h)
        constants = sizes | tile
        constants["BIAS"] = self.down_bias is not None
        of_blocks = TensorDescriptor.from_tensor(inner, [bm, tile["BK"]])
        weight = _tiled(self.down, tile)
        arguments = (of_blocks, weight, down_bias, order, expert, weights, y, pairs)
        programs = cdiv(h, tile["BN"])
        _down[(programs, blocks)](*arguments, **constants)
        return y

    def _sum(
        self,
        y: Tensor,
        k: int,
        stream: ResidualNorm | None,
        shared: SharedOutput | None,
        x: Tensor,
        division: Division,
    ) -> Tensor:
        """Sum the k rows of each token and the shared output, and add the sum to the stream.

        ``division`` is that of the inputs ``x`` of the gate as in a call.
        """
        h = y.shape[1]
        tokens = len(y) // k
        out = y.new_empty(tokens, h)
        residual = norm = other = gate = squares = out  # the kernel does not read absent tensors
        eps = 0.0
        if stream is not None:
            residual, norm, eps, _ = stream
        gated = shared is not None and shared.gate is not None
        constants = pdl(y) | {"K": k, "H": h}
        if shared is not None:
            other = shared.y.contiguous()
        if gated:
            gate = shared.gate
            constants |= division.constants()
            if division.parts:
                squares = division.squares
        else:
            constants |= NO_DIVISION
        constants["P"] = power(h)
        constants["SHARED"] = shared is not None
        constants["GATED"] = gated
        constants["ADD"] = stream is not None
        constants["num_warps"] = 4 if h <= 2048 else 16
        arguments = (y, residual, norm, other, x, gate, squares, out, eps)
        _combine[(tokens,)](*arguments, division.eps, **constants)
        return out


def _tiled(weight: Tensor, tile: dict[str, int]) -> Any:
    shape = [tile["BN"], tile["BK"]]
    return TensorDescriptor.from_tensor(weight, shape)
