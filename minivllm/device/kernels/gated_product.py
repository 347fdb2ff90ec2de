"""A product of many rows and silu(gate) * up in one kernel for a Hopper (compute capability 9.0), in Gluon.

    x [T, K], weight [2 N, K] with the rows gate | up     y [T, N] = silu(x gate^T) * (x up^T)
    a tile is 128 rows of x and 128 columns of y, so 128 rows of gate and 128 of up

    warp          copies x, gate and up     ──TMA──► shared memory, STAGES steps of 64 inputs each
    warp group 0  rows  0 ..  63    [x gate^T | x up^T] (wgmma, 256 columns) ──► y ──TMA──►
    warp group 1  rows 64 .. 127    the same

A thread has the sums of gate and up of the same columns in its registers.  So the product [T, 2 N] is never written
or read.

Programs take tiles in groups of GROUP tiles of rows, so those that run at the same time read few rows of x and of the
weight, which stay in the second-level cache.

The reference is ``gate_mul`` of the product, which rounds the product before the gate.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from minivllm.errors import describe_error

from .activation import gate_mul
from .ahead import rehearsing
from .launch import capability, cdiv, multiprocessors

log = logging.getLogger(__name__)
ROWS = COLUMNS = 128  # of a tile
INPUTS = 64  # inputs of a step, the width of the swizzle
STAGES = 4  # steps that shared memory holds
GROUP = 16  # tiles of rows in a group
# Fewest tiles for which the kernel is used.  With fewer, many of the multiprocessors are idle while the last tiles run.
LEAST_TILES = 1024
FAR = 0.03  # largest accepted distance of a row's output from the reference, relative to its norm


@gluon.jit
def _place(tile, row_tiles, N: gl.constexpr, GROUP: gl.constexpr):
    """Return the tile of rows and the tile of columns of a program's tile."""
    column_tiles: gl.constexpr = N // 128
    group = tile // (GROUP * column_tiles)
    first = group * GROUP
    size = gl.minimum(row_tiles - first, GROUP)
    left = tile - group * GROUP * column_tiles
    return first + left % size, left // size


@gluon.jit
def _produce(
    x, weight, rows, columns, full, empty, tiles, row_tiles,
    N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the inputs and weights of all tiles of a program to shared memory, as soon as a stage is empty."""
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, row_tiles, N, GROUP)
        for k in range(K // 64):
            stage, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.expect(full.index(stage), (128 + 256) * 64 * 2)
            tma.async_copy_global_to_shared(x, [m * 128, k * 64], full.index(stage), rows.index(stage))
            tma.async_copy_global_to_shared(weight, [n * 128, k * 64], full.index(stage), columns.index(stage * 2))
            tma.async_copy_global_to_shared(
                weight, [N + n * 128, k * 64], full.index(stage), columns.index(stage * 2 + 1)
            )
            done += 1


@gluon.jit
def _consume(
    y, stored, halves, columns, full, empty, tiles, row_tiles,
    WG: gl.constexpr, N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute 64 of the 128 rows of all tiles of a program."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    done = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m, n = _place(tile, row_tiles, N, GROUP)
        acc = gl.zeros([64, 256], gl.float32, layout=LAYOUT)
        for k in range(K // 64):
            stage, phase = done % STAGES, done // STAGES & 1
            mbarrier.wait(full.index(stage), phase)
            weights = columns.index(stage).permute((1, 0))
            acc = warpgroup_mma(halves.index(stage * 2 + WG), weights, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the product before this one has ended
            mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), pred=k > 0)
            done += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES))
        gate, up = acc.reshape([64, 2, 128]).permute((0, 2, 1)).split()
        out = gate / (1.0 + gl.exp(-gate)) * up
        tma.store_wait(0)  # the tile before this one has been read
        stored.store(out.to(stored.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [m * 128 + WG * 64, n * 128], stored)
    tma.store_wait(0)


CHANGING = ["tiles", "row_tiles"]


@gluon.jit(do_not_specialize=CHANGING, do_not_specialize_on_alignment=CHANGING)
def _multiply(
    x, weight, y, tiles, row_tiles,
    N: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the first ``tiles`` tiles, those of ``row_tiles`` tiles of rows.

    ``x`` and ``weight`` are descriptors with blocks [128, 64], and ``y`` has blocks [64, 128].  Elements behind the
    last row are read as 0 and not stored."""
    dtype: gl.constexpr = x.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(dtype, [STAGES, 128, 64], layout)
    parts = gl.allocate_shared_memory(dtype, [STAGES * 2, 128, 64], layout)
    halves = rows._reinterpret(dtype, [STAGES * 2, 64, 64], layout)
    columns = parts._reinterpret(dtype, [STAGES, 256, 64], layout)
    y0 = gl.allocate_shared_memory(dtype, [64, 128], layout)
    y1 = gl.allocate_shared_memory(dtype, [64, 128], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (y, y0, halves, columns, full, empty, tiles, row_tiles, 0, N, K, GROUP, STAGES)),
            (_consume, (y, y1, halves, columns, full, empty, tiles, row_tiles, 1, N, K, GROUP, STAGES)),
            (_produce, (x, weight, rows, parts, full, empty, tiles, row_tiles, N, K, GROUP, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


SWIZZLED = gl.NVMMASharedLayout(128, 16, 2)


def fits(weight: Tensor) -> bool:
    """Return whether the kernel multiplies by ``weight`` [2 N, K] on its device."""
    outputs, inputs = weight.shape
    if weight.dtype != torch.bfloat16 or capability(weight.device) != 9 or not weight.is_contiguous():
        return False
    return outputs % (2 * COLUMNS) == 0 and inputs % INPUTS == 0 and weight.data_ptr() % 16 == 0


def pays(rows: int, n: int) -> bool:
    """Return whether the kernel is used for ``rows`` rows and ``n`` outputs."""
    return cdiv(rows, ROWS) * (n // COLUMNS) >= LEAST_TILES


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Return silu(gate) * up [T, N] of gate | up = x weight^T, for a contiguous x [T, K] and a weight that ``fits``."""
    rows, inputs = x.shape
    n = weight.shape[0] // 2
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    row_tiles = cdiv(rows, ROWS)
    tiles = row_tiles * (n // COLUMNS)
    descriptors = (
        TensorDescriptor.from_tensor(x, [ROWS, INPUTS], SWIZZLED),
        TensorDescriptor.from_tensor(weight, [COLUMNS, INPUTS], SWIZZLED),
        TensorDescriptor.from_tensor(y, [ROWS // 2, COLUMNS], SWIZZLED),
    )
    programs = min(tiles, multiprocessors(x.device))
    constants = {"N": n, "K": inputs, "GROUP": GROUP, "STAGES": STAGES, "num_warps": 4}
    _multiply[(programs,)](*descriptors, tiles, row_tiles, **constants)
    return y


_AGREES: dict[tuple[torch.Size, torch.device], bool] = {}  # results of ``agrees`` in this process


def agrees(weight: Tensor) -> bool:
    """Return whether the kernel gives the outputs of the separate product and gate for a weight of this shape.

    Gluon has no interpreter, so the kernel is compared once on each device; this waits for the device.  During a
    capture, where nothing can be compared, the result of an unknown shape is False.  So it is without memory for the
    comparison, and a later call compares again."""
    place = weight.shape, weight.device
    if place in _AGREES:
        return _AGREES[place]
    if rehearsing():
        return True
    if torch.cuda.is_current_stream_capturing():
        return False
    try:
        far = distance(weight)
    except torch.OutOfMemoryError as e:
        log.warning("a product of the gate uses the library: %s", describe_error(e))
        return False
    except Exception as e:  # the compiler and the driver raise errors of many types
        log.warning("products of the gate use the library: %s", describe_error(e))
        far = float("inf")
    else:
        if not far <= FAR:
            log.warning("products of the gate use the library: the kernel's outputs have a distance of %.3g", far)
    _AGREES[place] = far <= FAR
    return _AGREES[place]


def distance(weight: Tensor) -> float:
    """Return the largest distance between a row of the kernel's output and of the reference, relative to its norm."""
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(2 * ROWS + 77, weight.shape[1], generator=generator, device=weight.device).to(weight.dtype)
    found = multiply(x, weight).float()
    want = gate_mul(F.linear(x, weight)).float()
    norms = want.norm(dim=1).clamp(min=1e-20)
    far = (found - want).norm(dim=1) / norms
    return float(far.max())
