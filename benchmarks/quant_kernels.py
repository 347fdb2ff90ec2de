"""Measure which kernel and tile is fastest for each number of rows of a quantized weight, compared with the library's
bfloat16 product.

    python benchmarks/quant_kernels.py --out quant.json

The shapes are those of Llama-3.1-8B.  Every variant is compiled first in separate processes.  Then it is compared with
a float64 product of the stored weight, and timed as a replayed graph of launches over copies of the weight that do not
fit in the second-level cache.  A variant that fails is printed with its error.

Tiles are, for gemv BN/BK/stages/warps, small BN/BK/parts/stages/warps, matmul and tma
BM/BN/BK/split/stages/warps, dense elements at once, w8a8 BM/BN/BK/split/stages/warps/turned/ahead/fast.  "now" is the
kernel and tile in use.  "rows" is the time to quantize x, which w8a8 and the library's 8-bit product need first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import triton

from minivllm.device.kernels import eight_bits, quant, quant_gemv, quant_large_m, quant_small_m, scaled
from minivllm.device.kernels.quant import FusedProduct
from minivllm.device.kernels.quant_epilogue import Around, EpilogueProduct

SHAPES = {
    "o": (4096, 4096), "qkv": (6144, 4096), "down": (4096, 14336), "gate_up": (28672, 4096), "head": (128256, 4096),
}  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
FEW_TILES = (
    (2, 1024, 3, 2), (4, 512, 3, 4), (4, 1024, 3, 4), (4, 1024, 4, 2), (8, 512, 4, 4), (8, 1024, 3, 4),
    (4, 2048, 3, 4), (8, 512, 3, 2), (16, 256, 4, 4), (2, 2048, 3, 4),
)  # fmt: skip
# outputs, inputs, loads in flight, warps; twice as many inputs with 4 bits
WORDS_TILES = (
    (4, 512, 3, 2), (4, 1024, 3, 4), (8, 512, 3, 4), (8, 512, 4, 2), (8, 1024, 2, 4), (8, 1024, 3, 4), (16, 512, 3, 4),
    (16, 512, 4, 4), (16, 512, 3, 8), (16, 1024, 3, 8), (32, 512, 3, 8), (16, 256, 4, 4), (8, 256, 5, 2),
)  # fmt: skip
# format -> dtype, inputs of a group
FORMATS = {
    "int8": (torch.int8, 0), "fp8": (torch.float8_e4m3fn, 0), "int4": (torch.uint8, 32), "int4-128": (torch.uint8, 128),
}  # fmt: skip
# outputs, inputs, parts at once, loads in flight, warps
SLIM_TILES = (
    (16, 128, 2, 6, 2), (16, 128, 4, 3, 4), (16, 128, 4, 4, 4), (16, 128, 4, 6, 4), (16, 128, 8, 2, 8),
    (16, 128, 8, 3, 8), (16, 128, 8, 4, 8), (32, 128, 2, 4, 2), (32, 128, 4, 3, 4), (32, 128, 4, 4, 4),
    (32, 128, 8, 2, 8), (32, 128, 8, 3, 8), (64, 128, 4, 3, 4), (16, 64, 8, 4, 8), (16, 128, 16, 2, 16),
    (32, 64, 8, 3, 8), (64, 128, 2, 4, 4), (16, 64, 16, 3, 16),
)  # fmt: skip
# rows, outputs, inputs, parts of the sum, loads in flight, warps, by the largest number of rows
TILES = {
    16: (
        (16, 128, 128, 1, 4, 8), (16, 128, 128, 2, 4, 8), (16, 128, 128, 4, 4, 8), (16, 64, 128, 1, 5, 4),
        (16, 64, 128, 2, 5, 4), (16, 64, 128, 4, 5, 4),
    ),
    32: (
        (32, 128, 128, 1, 4, 8), (32, 128, 128, 2, 4, 8), (32, 128, 128, 4, 4, 8), (32, 64, 128, 1, 5, 4),
        (32, 64, 128, 2, 5, 4), (32, 64, 128, 4, 5, 4),
    ),
    64: (
        (64, 128, 128, 1, 4, 8), (64, 64, 128, 1, 4, 4), (64, 64, 128, 2, 4, 4), (64, 64, 128, 4, 4, 4),
        (64, 64, 128, 8, 4, 4), (64, 64, 64, 1, 6, 4), (64, 128, 128, 2, 4, 8), (64, 128, 128, 4, 4, 8),
        (64, 128, 64, 4, 5, 8), (64, 128, 256, 2, 2, 8),
    ),
    128: ((128, 128, 128, 1, 3, 8), (128, 128, 64, 1, 4, 8), (128, 64, 64, 2, 4, 4), (128, 64, 128, 4, 3, 4)),
    256: (
        (128, 64, 128, 1, 3, 4), (128, 64, 128, 2, 3, 4), (128, 64, 128, 1, 2, 4), (128, 64, 128, 2, 2, 4),
        (128, 64, 128, 4, 3, 4), (64, 64, 128, 1, 4, 4), (64, 64, 128, 2, 4, 4), (64, 128, 128, 1, 4, 8),
        (128, 128, 128, 1, 3, 8), (128, 64, 256, 1, 2, 4), (128, 64, 128, 1, 4, 4), (128, 64, 128, 3, 3, 4),
        (128, 64, 128, 1, 3, 8), (64, 64, 128, 1, 3, 4), (64, 64, 128, 4, 3, 4), (128, 64, 256, 2, 2, 4),
        (256, 64, 64, 1, 3, 4), (128, 128, 128, 1, 2, 8), (128, 128, 64, 1, 4, 8), (256, 128, 64, 1, 4, 8),
    ),
}  # fmt: skip
# products of 8 bits: rows (0 means all), outputs, inputs, parts of the sum, loads in flight, warps
EIGHT_FEW = (
    (0, 64, 256, 1, 6, 4), (0, 64, 256, 1, 4, 4), (0, 64, 256, 1, 3, 4), (0, 64, 256, 2, 6, 4), (0, 64, 256, 2, 4, 4),
    (0, 64, 256, 3, 4, 4), (0, 64, 256, 4, 4, 4), (0, 64, 256, 4, 5, 4), (0, 64, 128, 1, 10, 4), (0, 64, 128, 2, 6, 4),
    (0, 128, 256, 1, 3, 8), (0, 128, 256, 1, 4, 8), (0, 128, 128, 1, 5, 8), (0, 256, 256, 1, 3, 8),
)  # fmt: skip
EIGHT_MANY = (
    (128, 64, 128, 1, 8, 4), (128, 64, 128, 2, 8, 4), (128, 64, 256, 1, 4, 4), (128, 64, 256, 2, 4, 4),
    (64, 128, 128, 1, 8, 4), (64, 128, 128, 2, 8, 4), (64, 128, 256, 1, 4, 4), (128, 128, 128, 1, 6, 4),
    (128, 128, 128, 1, 3, 4), (128, 128, 128, 2, 6, 8), (256, 128, 128, 1, 4, 8), (128, 256, 128, 1, 4, 8),
)  # fmt: skip
FIXED_TILES = (
    (64, 128, 128, 4, 8), (64, 128, 128, 3, 4), (128, 128, 128, 4, 8), (64, 256, 128, 3, 8), (64, 64, 128, 4, 4),
)  # fmt: skip
FORMS = ("gemv", "small", "matmul", "tma", "int8", "dense", "w8a8", "library", "rows", "now")
COLD = 160 << 20  # bytes of copies of a weight; the cache holds 50 MiB
Job = tuple[str, str, int, str, dict[str, int]]  # format, shape, rows, form, tile


def gemv_tiles(fmt: str) -> Iterator[dict[str, int]]:
    """Yield tiles of single codes of float8, or of words with four or eight codes."""
    times = 2 if fmt.startswith("int4") else 1
    for bn, bk, stages, warps in FEW_TILES if fmt == "fp8" else WORDS_TILES:
        yield dict(BN=bn, BK=times * bk, STAGES=stages, num_warps=warps)


def matmul_tiles(fmt: str, rows: int, n: int) -> Iterator[dict[str, int]]:
    """Yield tiles.

    More than 128 rows are tried in tiles of 128 and of 256 rows, because the latter convert the weight once.
    """
    four = fmt.startswith("int4")
    for bm in {min(max(16, triton.next_power_of_2(rows)), most) for most in (128, 256)}:
        if bm <= 16:
            tiles = [(64, 128, 1, 4, 4), (64, 256, 1, 3, 4), (64, 256, 2, 3, 4), (64, 128, 2, 4, 4), (64, 128, 4, 5, 4)]
            tiles += [(64, 256, 4, 4, 4), (128, 128, 1, 4, 8), (128, 256, 1, 3, 8), (128, 128, 2, 4, 8)]
        else:
            tiles = [
                (64, 128, 1, 3, 4),
                (64, 128, 2, 3, 4),
                (128, 128, 1, 3, 8),
                (128, 64, 1, 4, 8),
                (128, 64, 2, 4, 8),
            ]
            tiles += [(64, 64, 1, 5, 4), (256, 64, 1, 3, 8), (64, 64, 2, 4, 4), (64, 64, 4, 4, 4)]
            tiles += [(64, 128, 4, 3, 4), (64, 128, 8, 3, 4), (128, 128, 2, 3, 8), (128, 128, 4, 3, 8)]
            tiles += [(64, 64, 1, 4, 8), (128, 64, 1, 3, 4), (128, 32, 1, 5, 8), (64, 32, 2, 6, 4), (128, 128, 1, 2, 8)]
        for bn, bk, sk, stages, warps in tiles:
            held = (bn * bk // (2 if four else 1) + 2 * bm * bk + (bn * bk // 8 if four else 0)) * stages
            crowded = n >= 28672 and sk > 1
            if held <= 224 * 1024 and not crowded and bm * bn <= 4096 * warps and bk >= FORMATS[fmt][1]:
                yield dict(BM=bm, BN=bn, BK=bk, SK=sk, STAGES=stages, num_warps=warps)


def product_tiles(fmt: str, rows: int, n: int) -> Iterator[dict[str, int]]:
    """Yield tiles.  Sums are split if few tiles of outputs would leave most of the device idle."""
    few, many = [*product(EIGHT_FEW, (1,), (0, 256, 512), (0,))], [*product(EIGHT_MANY, (0,), (0, 256), (0, 1))]
    for (bm, bn, bk, sk, stages, warps), turned, ahead, fast in few if rows <= 64 else many:
        bm = bm or max(16, triton.next_power_of_2(rows))
        if (bm + bn) * bk * stages <= 225 << 10 and (sk == 1 or n < 28672) and not (fast and fmt == "int8"):
            parts = dict(BM=bm, BN=bn, BK=bk, SK=sk, STAGES=stages, num_warps=warps)
            yield parts | dict(TURNED=turned, AHEAD=ahead, FAST=fast)


def variants(fmt: str, shape: str, rows: int) -> Iterator[tuple[str, dict[str, int]]]:
    n_out = SHAPES[shape][0]
    if rows <= quant_gemv.FEW:
        yield from (("gemv", tile) for tile in gemv_tiles(fmt))
    if rows <= quant_small_m.ROWS and not fmt.startswith("int4"):
        names = ("BN", "BK", "P", "STAGES", "num_warps")
        yield from (("small", dict(zip(names, t, strict=True))) for t in SLIM_TILES)
    if rows <= 256:
        yield from (("matmul", tile) for tile in matmul_tiles(fmt, rows, n_out))
    if 8 < rows <= 256:
        names = ("BM", "BN", "BK", "SK", "STAGES", "num_warps")
        for tile in TILES[next(most for most in TILES if rows <= most)]:
            if tile[3] == 1 or n_out < 28672:
                yield "tma", dict(zip(names, tile, strict=True))
    if fmt == "int8" and rows >= 64:
        names = ("BM", "BN", "BK", "STAGES", "num_warps")
        yield from (("int8", dict(zip(names, tile, strict=True))) for tile in FIXED_TILES)
    yield "now", {}
    if rows >= 32:
        yield from (("dense", {"at_once": 1 << p}) for p in (23, 25, 27))
    if not fmt.startswith("int4"):
        yield from (("w8a8", tile) for tile in product_tiles(fmt, rows, n_out))
        if fmt == "fp8" or rows > 16:  # limits of the library's int8 product
            yield "library", {"fast": 0}
        if fmt == "fp8":
            yield "library", {"fast": 1}
        yield "rows", {}


def jobs(shapes: list[str], rows: list[int], formats: list[str], forms: list[str]) -> Iterator[Job]:
    for shape in shapes:
        for fmt in formats:
            for m in rows:
                if shape == "head" and m > 256:
                    continue  # the head only computes rows that sample
                yield from ((fmt, shape, m, form, tile) for form, tile in variants(fmt, shape, m) if form in forms)


def weights(fmt: str, shape: str, device: str, copies: int) -> list[quant.Quantized]:
    n, k = SHAPES[shape]
    made = []
    for _ in range(copies):
        dtype, group = FORMATS[fmt]
        if group:
            q = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
            scale = torch.rand(n, k // group, device=device) / 256 + 1e-3
            made.append(quant.Quantized(q, scale, None, group))
        else:
            q = torch.empty(n, k, dtype=torch.int8, device=device).random_(-127, 128)
            q = q if fmt == "int8" else (q.to(torch.bfloat16) * 3).to(dtype)
            made.append(quant.Quantized(q, torch.rand(n, device=device) / 4096 + 1e-4))
    return made


def held(kernels: quant.Quantized) -> torch.Tensor:
    """Return the weight in float64, converted by torch."""
    if kernels.form.bits == 8:
        return kernels.weight.to(torch.float32).double() * kernels.scale.double()[:, None]
    form = kernels.form
    halves = kernels.weight.view(form.n, -1, 1, 16)
    codes = torch.cat((halves & 15, halves >> 4), 2).view(form.n, -1, form.group).to(torch.int8) - 8
    return (codes.double() * kernels.scale.double()[..., None]).view(form.n, -1)


def call(kernels: quant.Quantized, form: str, tile: dict[str, int], x: torch.Tensor) -> Callable[[], Any]:
    """Return the timed call.  For 8-bit products the rows are quantized before."""
    if form == "gemv":
        return lambda: quant_gemv.gemv(EpilogueProduct(kernels), x, tile=tile)[0]
    if form in ("matmul", "tma"):
        return partial(quant_large_m.matmul, kernels, x, tile=tile, tma=form == "tma")
    if form == "small":
        product = FusedProduct(kernels)
        return lambda: quant_small_m.small_m(product, x, Around(), product.arrived, tile)[0]
    if form == "int8":
        return partial(quant_large_m.int8_large, x, kernels.weight, kernels.scale, None, tile)
    if form == "now":
        return partial(kernels, x)
    if form == "dense":
        return partial(kernels.dense, x, tile["at_once"])
    if form == "rows":
        return partial(scaled.rows, x, kernels.weight.dtype)
    q, by_row = scaled.rows(x, kernels.weight.dtype)
    y = x.new_empty(len(x), kernels.form.n)
    if form == "w8a8":
        return partial(scaled.product, q, by_row, kernels.weight, kernels.scale, y, tile, kernels.arrived)
    if kernels.weight.dtype == torch.int8:
        return partial(torch._int_mm, q, kernels.weight.t())
    fast, by_column = bool(tile["fast"]), kernels.scale[None]
    given = dict(out_dtype=x.dtype, use_fast_accum=fast, out=y)
    return partial(torch._scaled_mm, q, kernels.weight.t(), by_row, by_column, **given)


# ---- compiling -------------------------------------------------------------------------------------------------------


class Compiled:
    """Replaces a kernel, so that a launch only compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **options: self.kernel.warmup(*args, grid=grid, **options)


COMPILED: dict[Any, tuple[str, ...]] = {  # the kernels of each module
    quant: ("_numbers",),
    quant_gemv: ("_gemv",),
    quant_large_m: ("_matmul", "_halves", "_int8_large"),
    eight_bits: ("_halved",),
    quant_small_m: ("_small_m8",),
    scaled: ("_product",),
}


def compile_share(share: list[Job]) -> None:
    """Compile a share of the variants into Triton's cache, without device memory."""
    launch = {"PDL": True, "launch_pdl": True}
    for module in (eight_bits, quant, quant_gemv, quant_large_m, quant_small_m, scaled):
        module.pdl = lambda like: launch
    for module in (quant, quant_gemv, quant_large_m, quant_small_m, scaled):
        module.capability = lambda device: 9
    for module, names in COMPILED.items():
        for name in names:
            setattr(module, name, Compiled(getattr(module, name)))
    for fmt, shape, rows, form, tile in share:
        try:
            kernels = weights(fmt, shape, "meta", 1)[0]
            x = torch.empty(rows, kernels.form.k, dtype=torch.bfloat16, device="meta")
            if form == "w8a8":
                q = torch.empty_like(x, dtype=kernels.weight.dtype)
                y = x.new_empty(rows, kernels.form.n)
                scaled.product(q, kernels.scale, kernels.weight, kernels.scale, y, tile, kernels.arrived)
            else:
                call(kernels, form, tile, x)()
        except Exception as e:  # reported when the variant is measured
            if os.environ.get("TELL"):
                print("not compiled", fmt, shape, rows, form, tile, repr(e)[:200], flush=True)


def compile_all(todo: list[Job], processes: int) -> int:
    unique: dict[Any, Job] = {}
    for job in todo:
        fmt, shape, rows, form, tile = job
        if form in ("gemv", "small", "matmul", "tma", "int8", "w8a8", "now"):
            # the number of rows is compiled in, as a power of two of few rows
            by_rows = rows if form in ("gemv", "now") else 0
            unique.setdefault((fmt, shape, form, by_rows, *sorted(tile.items())), job)
    work = list(unique.values())
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_share, args=(work[i::processes],)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return len(work)


# ---- measuring -------------------------------------------------------------------------------------------------------


def graph_time(calls: list[Callable[[], Any]], repeat: int) -> float:
    """Return the microseconds of a call, the median of replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in calls:
            run()
    graph.replay()
    found = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(found)[len(found) // 2]


class Place:
    """The copies of a weight in a format, and the expected products."""

    def __init__(self, fmt: str, shape: str, device: str = "cuda") -> None:
        n, k = SHAPES[shape]
        each = n * k * ({0: 32, 32: 20, 128: 17}[FORMATS[fmt][1]]) // 32
        self.bytes, self.made = each, weights(fmt, shape, device, max(2, min(24, COLD // each + 1)))
        self.held = held(self.made[0])
        self.x: dict[int, torch.Tensor] = {}
        self.want: dict[int, torch.Tensor] = {}

    def inputs(self, rows: int) -> torch.Tensor:
        if rows not in self.x:
            self.x[rows] = torch.randn(rows, self.held.shape[1], device=self.held.device).to(torch.bfloat16)
            self.want[rows] = self.x[rows][-64:].double() @ self.held.T
        return self.x[rows]

    def measure(self, rows: int, form: str, tile: dict[str, int], repeat: int) -> tuple[float, float]:
        """Return (microseconds, relative error)."""
        x, off = self.inputs(rows), 0.0
        if form != "rows" and not (form == "library" and self.made[0].weight.dtype == torch.int8):
            got = call(self.made[0], form, tile, x)()[-64:].double()
            off = float((got - self.want[rows]).norm() / self.want[rows].norm())
            if not off < (5e-2 if form in ("w8a8", "library") else 1e-2):
                raise ValueError(f"wrong: off by {off:.1e}")
        many = self.made if rows <= 1024 else self.made[:2]
        calls = [call(kernels, form, tile, x) for kernels in many]
        return graph_time(calls * (1 if len(calls) > 4 or rows > 256 else 4), repeat), off


def baseline(shape: str, rows: int, repeat: int) -> float:
    n, k = SHAPES[shape]
    made = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, COLD // (n * k * 2) + 1))]
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    return graph_time([partial(torch.mm, x, w.t()) for w in made[: 2 if rows > 1024 else None]], repeat)


def table(found: list[dict[str, Any]], base: dict[tuple[str, int], float]) -> None:
    """Print a line for each number of rows.

    For each kernel it has the microseconds, the speed relative to bfloat16's product, and the tile.  The last column is
    the best kernel's share of the memory's speed.
    """
    best: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = {}
    for one in found:
        forms = best.setdefault((one["shape"], one["format"], one["rows"]), {})
        if one["form"] not in forms or one["us"] < forms[one["form"]]["us"]:
            forms[one["form"]] = one
    for (shape, fmt, rows), forms in best.items():
        plain, reported = base[shape, rows], []
        for form, one in forms.items():
            ratio = "" if form == "rows" else f" {plain / one['us']:.2f}x"
            reported.append(f"{form} {one['us']:.1f}{ratio} {'/'.join(map(str, one['tile'].values()))}")
        fastest = min((one for form, one in forms.items() if form != "rows"), key=lambda one: one["us"])
        speed = fastest["bytes"] / fastest["us"] / 1e3
        print(f"{shape} {fmt} {rows}: bf16 {plain:.1f}; {'; '.join(reported)}; {speed:.0f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=140.0, help="after which no more is measured")
    parser.add_argument("--out", default="", help="a file for all times, JSON")
    args = parser.parse_args()

    began = time.perf_counter()
    todo = list(jobs(args.shapes, args.rows, args.formats, args.forms))
    print(f"{compile_all(todo, args.processes)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    base: dict[tuple[str, int], float] = {}
    found: list[dict[str, Any]] = []
    failed, place, at = 0, None, ("", "")
    for fmt, shape, rows, form, tile in todo:
        if time.perf_counter() - began > args.seconds:
            print(f"out of time: {len(todo)} variants, {len(found)} measured", flush=True)
            break
        try:
            if (shape, rows) not in base:
                base[shape, rows] = baseline(shape, rows, args.repeat)
            if at != (fmt, shape):
                place = None  # frees its memory before the next is allocated
                place, at = Place(fmt, shape), (fmt, shape)
            assert place is not None
            us, off = place.measure(rows, form, tile, args.repeat)
        except Exception as e:
            failed += 1
            print("failed", fmt, shape, rows, form, tile, repr(e).replace("\n", " ")[:160], flush=True)
            if "illegal" in str(e) or "misaligned" in str(e):
                print("the device is lost to this process: no more is measured")
                break
            continue
        found.append(dict(format=fmt, shape=shape, rows=rows, form=form, tile=tile, us=us, off=off, bytes=place.bytes))
    if args.out:
        with open(args.out, "w") as file:
            plain = [{"shape": shape, "rows": rows, "us": us} for (shape, rows), us in base.items()]
            json.dump({"bfloat16": plain, "variants": found}, file)
    table(found, base)
    print(f"{len(found)} variants measured, {failed} failed, {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
