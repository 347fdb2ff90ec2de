"""Products of the experts, as in ``experts``, with quantized weights that are read in their packed form.

    up     grid (I / BN, blocks)   y^T [BN, BM] = W [e, BN, H] x[tokens of the block]^T, gate and up at once
    down   grid (H / BN, blocks)   the same from the order of the blocks to the order of the pairs

Blocks, their pairs and the sum over a token's k experts are those of ``experts``, and tiles of weights those of
``packed_tiles``.  The packed weights of the chosen experts are read once for each block of an expert.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from minivllm.core.interfaces.quantizer import StoredWeight

from .experts import Division, ExpertProducts, _block, _gated, chosen_tile
from .launch import capability, cdiv, kernel, pdl, power, wait
from .packed_tiles import add_tile, inputs_of, load_x
from .quant_formats import zeros_of
from .split_sums import drained

# By bits: most pairs of an expert; then BM, BN, BK, stages and warps of ``up`` and of ``down``. For 4 bits these are
# the fastest of benchmarks/packed_products.py on an H200. For 8 bits and few pairs they are the fastest of one weight,
# for many pairs the largest tiles that spill no register.
OF_16 = (16, 64, 128, 3, 4)
OF_32 = (32, 128, 64, 3, 8)
OF_64 = (64, 64, 64, 3, 4)
ANY = float("inf")
TILES = {
    4: ((12, OF_16, OF_16), (32, OF_32, OF_32), (ANY, OF_64, OF_64)),
    8: ((12, OF_16, OF_16), (ANY, OF_32, OF_32)),
}


@kernel("pairs")
def _up(
    x, weight, scale, zero, bias, order, expert, squares, y, pairs, eps, limit, alpha, K: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, FROM: tl.constexpr, PARTS: tl.constexpr, PARTS_P: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate) * up for a block of (token, expert) pairs: y [blocks * BM, N], in the order of the
    blocks.

    The weight is [E * 2 N, H]."""
    wait(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    e, pair = _block(order, expert, pairs, block, BM, FROM)
    if e < 0:
        return
    om, on, inputs = block * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN), inputs_of(FORM, BK)
    real, row = pair < pairs, pair // K
    x_at, first = x + row.to(tl.int64)[None, :] * H, e.to(tl.int64) * 2 * N + on
    acc = tl.zeros([BN, BM], tl.float32)
    up = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        a, b = load_x(x_at, k, inputs, real, H, FORM)
        acc = add_tile(acc, a, b, weight, scale, zero, first, on < N, k, inputs, H, FORM, GROUP, ZERO, BN, BK, IEEE,
                       ASM)  # fmt: skip
        up = add_tile(up, a, b, weight, scale, zero, first + N, on < N, k, inputs, H, FORM, GROUP, ZERO, BN, BK, IEEE,
                      ASM)  # fmt: skip
        acc, up = drained(acc, PDL), drained(up, PDL)
    if PARTS > 0:
        part = tl.arange(0, PARTS_P)
        s = tl.load(squares + row[:, None] * PARTS + part[None, :],
                    mask=real[:, None] & (part < PARTS)[None, :], other=0.0)  # fmt: skip
        factor = tl.rsqrt(tl.sum(s, 1) / H + eps)[None, :]
        acc = acc * factor
        up = up * factor
    if BIAS:
        b_at = bias + e.to(tl.int64) * 2 * N + on
        acc += tl.load(b_at, mask=on < N, other=0.0).to(tl.float32)[:, None]
        up += tl.load(b_at + N, mask=on < N, other=0.0).to(tl.float32)[:, None]
    z = tl.trans(_gated(acc, up, limit, alpha, ACT, y.dtype.element_ty).to(y.dtype.element_ty))
    tl.store(y + om.to(tl.int64)[:, None] * N + on[None, :], z, mask=(on < N)[None, :])


@kernel("pairs")
def _down(
    h, weight, scale, zero, bias, order, expert, weights, y, pairs, H: tl.constexpr, N: tl.constexpr,
    FROM: tl.constexpr, BIAS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, IEEE: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the experts' outputs for a block of h [blocks * BM, N], times the router's weights: y [pairs, H].

    The weight is [E * H, N].
    """
    wait(PDL)
    tile, block = tl.program_id(0), tl.program_id(1)
    e, pair = _block(order, expert, pairs, block, BM, FROM)
    if e < 0:
        return
    om, on, inputs = block * BM + tl.arange(0, BM), tile * BN + tl.arange(0, BN), inputs_of(FORM, BK)
    h_at, first, real = h + om.to(tl.int64)[None, :] * N, e.to(tl.int64) * H + on, pair < pairs
    acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(0, N, BK, num_stages=STAGES):
        a, b = load_x(h_at, k, inputs, real, N, FORM)
        acc = add_tile(acc, a, b, weight, scale, zero, first, on < H, k, inputs, N, FORM, GROUP, ZERO, BN, BK, IEEE,
                       ASM)  # fmt: skip
        acc = drained(acc, PDL)
    if BIAS:
        acc += tl.load(bias + e.to(tl.int64) * H + on, mask=on < H, other=0.0).to(tl.float32)[:, None]
    z = acc * tl.load(weights + pair, mask=real, other=0.0)[None, :]
    z = tl.trans(z.to(y.dtype.element_ty))
    tl.store(y + pair.to(tl.int64)[:, None] * H + on[None, :], z, mask=real[:, None] & (on < H)[None, :])


class _Packed:
    """The quantized gate-and-up weight, or the down weight, of all experts, in the form that the kernels read."""

    def __init__(self, stored: StoredWeight) -> None:
        zero = stored.scale if stored.zero is None else stored.zero
        self.tensors = (stored.weight, stored.scale, zero)
        self.form = 4 if takes(stored) == 4 else 8
        inputs = stored.weight.shape[1] * 8 // self.form
        self.constants = {"FORM": self.form, "GROUP": stored.group or inputs}
        self.constants["ZERO"] = zeros_of(stored.zero)


def takes(stored: StoredWeight | None) -> int:
    """Return the bits of a weight that the kernels can read, 4 or 8, or 0 if they cannot read it."""
    if stored is None or stored.scale is None:
        return 0
    if not all(t is None or t.is_contiguous() for t in stored[:3]):
        return 0
    rows, inputs = stored.weight.shape
    group = stored.group or inputs
    if group & (group - 1) and (group <= 64 or stored.scale.numel() != rows):
        # A tile of the kernels has up to 128 inputs.  It must lie in one group or consist of whole groups, which is
        # impossible for groups of this size.
        return 0
    if stored.weight.dtype in (torch.int8, torch.float8_e4m3fn):
        return 8
    if stored.weight.dtype != torch.uint8 or not stored.group:
        return 0
    each = stored.scale.numel() // rows * stored.group  # number of inputs that the scales of a row cover
    if each == 2 * inputs:
        return 0 if stored.group % 32 else 4
    return 8 if each == inputs and stored.zero is not None else 0


def runs(weight: Tensor) -> bool:
    """Return whether Triton supports the dtype of a weight on its device."""
    if weight.device.type != "cuda" or torch.version.hip is not None:
        return False
    least = (8, 9) if weight.dtype == torch.float8_e4m3fn else (8, 0)
    return torch.cuda.get_device_capability(weight.device) >= least


class PackedExperts(ExpertProducts):
    """Kernels for quantized experts of one layer, with ``gate_up`` [E * 2 I, H] and ``down`` [E * H, I].

    The gate of each expert comes first.  ``takes`` accepts both weights.  ``count`` is the number of experts E.  Biases
    are [E, 2 I] and [E, H].
    """

    few = 0  # no separate kernel for few tokens, because blocks of one pair are as fast

    def __init__(
        self,
        count: int,
        gate_up: StoredWeight,
        down: StoredWeight,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        activation: str = "silu",
        limit: float | None = None,
        alpha: float = 1.702,
    ) -> None:
        self.count = count
        self.packed = (_Packed(gate_up), _Packed(down))
        self.hidden = len(down.weight) // count
        self.inner = len(gate_up.weight) // count // 2
        self._around(gate_up_bias, down_bias, activation, limit, alpha)
        self.fixed = False

    def _tile(self, pairs: int, gated: bool) -> dict[str, int]:
        """Return the tile for ``pairs`` pairs of a token and an expert, of the kernel for gate and up (``gated``) or
        for down."""
        # Both kernels use the same entry of the table, because they share the blocks of pairs.
        form = max(one.form for one in self.packed)
        return chosen_tile(TILES[form], pairs / self.count, gated)

    def _grouped(
        self, x: Tensor, ids: Tensor, weights: Tensor, order: Tensor, expert: Tensor, division: Division
    ) -> Tensor:
        h = self.hidden
        n = self.inner
        blocks = len(expert)
        up_bias, down_bias = self._biases(x)
        up, down = self.packed
        pairs = ids.numel()
        tile = self._tile(pairs, True)
        inner = x.new_empty(blocks * tile["BM"], n)
        both = pdl(x) | {"N": n, "H": h}
        both["FROM"] = power(pairs) if order is ids else 0
        both["IEEE"] = x.dtype == torch.float32
        both["ASM"] = x.dtype == torch.bfloat16 and capability(x.device) >= 9
        constants = both | tile | up.constants | division.constants()
        constants["K"] = ids.shape[1]
        constants["ACT"] = self.activation
        constants["BIAS"] = self.up_bias is not None
        squares, eps, _ = division
        of_blocks = (up_bias, order, expert, squares, inner, pairs)
        programs = cdiv(n, tile["BN"])
        _up[(programs, blocks)](x, *up.tensors, *of_blocks, eps, self.limit, self.alpha, **constants)
        tile = self._tile(pairs, False)
        y = x.new_empty(pairs, h)
        constants = both | tile | down.constants
        constants["BIAS"] = self.down_bias is not None
        of_blocks = (down_bias, order, expert, weights, y, pairs)
        programs = cdiv(h, tile["BN"])
        _down[(programs, blocks)](inner, *down.tensors, *of_blocks, **constants)
        return y
