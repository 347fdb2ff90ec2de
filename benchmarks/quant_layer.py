"""Time a layer of Llama-3.1-8B's shape in steps of few rows, with norms, gates and residual additions, by format.

    python benchmarks/quant_layer.py --rows 1 2 --formats int8 fp8-weight fp8 int4-128

First every tile of the joined kernels is compiled in separate processes, compared with the separate kernels, and timed
as a replayed graph of launches over more copies of the weight than the second-level cache holds.  Then whole layers
without attention are timed, with bfloat16, with each format's separate kernels, and with the joined ones and the
fastest tiles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import quant_kernels
import torch

from minivllm.device.kernels import eight_bits, quant, quant_gemv, scaled
from minivllm.device.kernels.activation import gate_mul
from minivllm.device.kernels.norm import add_rms_norm
from minivllm.device.kernels.products import ADDED, GATED, PLAIN, Product
from minivllm.device.kernels.quant import FusedProduct

HIDDEN, EPS = 4096, 1e-5
# outputs, inputs, mode
SHAPES = {
    "qkv": (6144, 4096, PLAIN), "o": (4096, 4096, ADDED), "gate_up": (28672, 4096, GATED), "down": (4096, 14336, ADDED),
}  # fmt: skip
FP8 = torch.float8_e4m3fn
# format -> name in quant_kernels.FORMATS, and the dtype to which rows of x are rounded
FORMATS = {
    "int8": ("int8", None), "int8-w8a8": ("int8", torch.int8), "fp8-weight": ("fp8", None), "fp8": ("fp8", FP8),
    "int4": ("int4", None), "int4-128": ("int4-128", None),
}  # fmt: skip
# outputs (half as many with a gate, each twice), programs per multiprocessor, loads in flight (0 means registers),
# warps
SHORT: dict[Any, tuple[tuple[int, ...], ...]] = {
    "fp8": (
        (4, 5, 0, 4), (4, 6, 0, 4), (4, 4, 0, 4), (4, 7, 0, 4), (2, 6, 0, 4), (2, 8, 0, 4), (8, 3, 0, 8), (8, 2, 0, 8),
        (4, 3, 0, 8), (8, 4, 0, 4), (8, 3, 0, 4), (2, 5, 0, 4), (16, 2, 0, 8), (4, 6, 2, 4),
    ),
    8: (
        (4, 4, 0, 4), (2, 4, 0, 4), (8, 2, 0, 8), (4, 6, 3, 4), (4, 6, 2, 4), (4, 5, 2, 4), (4, 4, 4, 4), (8, 3, 3, 4),
        (8, 3, 2, 4), (8, 2, 4, 8),
    ),
    4: (
        (8, 4, 0, 4), (8, 3, 0, 4), (8, 5, 0, 4), (4, 4, 0, 4), (4, 5, 0, 4), (4, 6, 0, 4), (4, 7, 0, 4), (4, 8, 0, 4),
        (8, 2, 0, 8), (8, 3, 0, 8), (16, 2, 0, 4), (16, 2, 0, 8), (2, 8, 0, 4), (8, 4, 3, 4),
    ),
}  # fmt: skip
# outputs, inputs at once, loads in flight, warps
LONG: dict[Any, tuple[tuple[int, ...], ...]] = {
    "fp8": (
        (8, 2048, 0, 4), (4, 2048, 0, 4), (16, 2048, 0, 4), (16, 2048, 0, 8), (8, 4096, 0, 8), (4, 4096, 0, 8),
        (2, 2048, 0, 4), (8, 1024, 0, 4), (8, 1024, 0, 2), (16, 1024, 0, 4), (4, 1024, 0, 2), (8, 2048, 3, 4),
    ),
    8: (
        (8, 1024, 0, 2), (4, 1024, 3, 4), (8, 1024, 3, 4), (8, 1024, 4, 4), (16, 512, 4, 4), (8, 512, 4, 2),
        (8, 1024, 0, 4), (8, 2048, 0, 4),
    ),
    4: (
        (8, 2048, 0, 2), (16, 2048, 3, 8), (16, 2048, 4, 8), (16, 1024, 4, 4), (8, 2048, 3, 4), (8, 4096, 0, 4),
        (8, 2048, 0, 4), (4, 2048, 0, 4), (16, 2048, 0, 8), (8, 4096, 0, 8), (8, 2048, 0, 8), (16, 4096, 0, 8),
        (4, 4096, 0, 4), (16, 2048, 2, 8),
    ),
}  # fmt: skip


class Job(NamedTuple):
    format: str
    shape: str
    tile: tuple[int, ...]


def jobs(formats: list[str]) -> Iterator[Job]:
    for fmt in formats:
        bits = 4 if fmt.startswith("int4") else 8
        for shape, (_, inputs, mode) in SHAPES.items():
            tiles = SHORT if inputs == HIDDEN else LONG
            for bn, *rest in tiles[fmt if fmt in tiles else bits]:
                yield Job(fmt, shape, (max(bn // 2, 1) if mode == GATED else bn, *rest))


def named(shape: str, tile: tuple[int, ...]) -> dict[str, int]:
    second = "EACH" if SHAPES[shape][1] == HIDDEN else "BK"
    return dict(zip(("BN", second, "STAGES", "num_warps"), tile, strict=True))


def made(fmt: str, shape: str, device: str) -> quant.Quantized:
    """Return a weight of random codes whose products have about the size of their inputs."""
    n, k, _ = SHAPES[shape]
    dtype, group = quant_kernels.FORMATS[FORMATS[fmt][0]]
    if group:
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        return quant.Quantized(codes, torch.rand(n, k // group, device=device) / 300 + 1e-3, None, group)
    codes = torch.empty(n, k, dtype=torch.int8, device=device).random_(-127, 128)
    codes = codes if dtype == torch.int8 else codes.to(torch.bfloat16).to(dtype)
    return quant.Quantized(codes, torch.rand(n, device=device) / 8192 + 1e-4)


class Inputs:
    """Inputs of products of any shape."""

    def __init__(self, rows: int, device: str) -> None:
        draw = lambda *size: torch.randn(*size, device=device).to(torch.bfloat16)  # noqa: E731
        self.x = {k: draw(rows, k) for k in (HIDDEN, 14336)}
        self.squares = {parts: self.x[HIDDEN].float().square().view(rows, parts, -1).sum(2) for parts in (512,)}
        sizes = self.x[14336].float().abs().view(rows, 512, -1).amax(2)
        self.tops = sizes.view(torch.int32)  # in the form in which a gate returns them
        self.norm, self.residual = draw(HIDDEN).abs() + 0.5, draw(rows, HIDDEN)

    def joined(self, product: Any, shape: str, tile: dict[str, int] | None) -> Any:
        _, k, mode = SHAPES[shape]
        if mode == ADDED:
            tops = {"tops": self.tops} if k != HIDDEN and len(self.tops) == 1 else {}
            return product(self.x[k], residual=self.residual, norm=self.norm, tile=tile, **tops)
        return product(self.x[k], self.squares[512], EPS, tile=tile)


# ---- compiling -------------------------------------------------------------------------------------------------------


def compile_share(share: list[Job], count: int) -> None:
    """Compile a share of the variants into Triton's cache, without device memory."""
    for module in (eight_bits, quant_gemv):
        module.pdl = lambda like: {"PDL": True, "launch_pdl": True}
    quant_gemv.capability = lambda device: 9
    quant_gemv.multiprocessors = lambda device: count
    quant_gemv._gemv, eight_bits._rows = (quant_kernels.Compiled(k) for k in (quant_gemv._gemv, eight_bits._rows))
    for fmt, shape, tile in share:
        try:
            product = FusedProduct(made(fmt, shape, "meta"), None, SHAPES[shape][2], rounded=FORMATS[fmt][1])
            Inputs(1, "meta").joined(product, shape, named(shape, tile))
        except Exception as e:
            print("not compiled", fmt, shape, tile, repr(e)[:200], flush=True)


def compile_all(todo: list[Job], processes: int) -> None:
    context, count = multiprocessing.get_context("spawn"), quant_gemv.multiprocessors(torch.device("cuda"))
    workers = [context.Process(target=compile_share, args=(todo[i::processes], count)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


# ---- one by one ------------------------------------------------------------------------------------------------------


class Layer:
    """The products of a layer and the operations between them.

    ``calls`` return (h [M, 4096] or with squares, residual).
    """

    def __init__(self, rows: int) -> None:
        self.residual = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)
        self.norm = torch.rand(HIDDEN, device="cuda").to(torch.bfloat16) + 0.5
        self.heads = torch.randn(rows, HIDDEN, device="cuda").to(torch.bfloat16)  # stands for the output of attention


def separate(products: dict[str, Callable[[torch.Tensor], torch.Tensor]], state: Layer) -> Callable[[], Any]:
    """Return the call of a layer with separate kernels for norms and gates."""

    def run() -> torch.Tensor:
        h, _ = add_rms_norm(state.heads, state.residual, state.norm, EPS)
        products["qkv"](h)
        h, _ = add_rms_norm(products["o"](state.heads), state.residual, state.norm, EPS)
        return products["down"](gate_mul(products["gate_up"](h)))

    return run


def joined(products: dict[str, Any], state: Layer, tiles: dict[str, dict[str, int]] | None) -> Callable[[], Any]:
    """Return the call of a layer with ``products.Product`` or an equivalent."""

    def run() -> torch.Tensor:
        more: dict[str, dict[str, Any]] = {name: {} if tiles is None else {"tile": tiles[name]} for name in SHAPES}
        h, squares = products["o"](state.heads, residual=state.residual, norm=state.norm, **more["o"])
        products["qkv"](h, squares, EPS, **more["qkv"])
        h, tops = products["gate_up"](h, squares, EPS, **more["gate_up"])
        if tops is not None:
            more["down"]["tops"] = tops
        return products["down"](h, residual=state.residual, norm=state.norm, **more["down"])[0]

    return run


def plain_layer(rows: int, state: Layer) -> Callable[[], Any]:
    weights = {
        name: torch.randn(n, k, device="cuda").mul_(k**-0.5).to(torch.bfloat16) for name, (n, k, _) in SHAPES.items()
    }
    products = {name: Product(w, None, SHAPES[name][2]) for name, w in weights.items()}
    if all(rows <= product.rows for product in products.values()):
        return joined(products, state, None)
    return separate({name: lambda x, w=w: torch.mm(x, w.t()) for name, w in weights.items()}, state)


def format_layers(fmt: str, rows: int, state: Layer, tiles: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    kernels = {name: made(fmt, name, "cuda") for name in SHAPES}
    rounded = FORMATS[fmt][1]
    alone: dict[str, Any] = kernels
    if rounded is not None:
        alone = {name: scaled.ScaledProduct(of.weight, of.scale) for name, of in kernels.items()}
    yield "one by one", separate(alone, state)
    made_of = {name: FusedProduct(of, None, SHAPES[name][2], rounded=rounded) for name, of in kernels.items()}
    if rows == 1 or rows <= made_of["o"].rows:
        yield "fused", joined(made_of, state, None)
    if rows == 1 and tiles:
        yield "fused, the fastest tiles", joined(made_of, state, tiles)


# ---- measuring -------------------------------------------------------------------------------------------------------


def wanted(of: quant.Quantized, shape: str, given: Inputs, rounded: Any) -> torch.Tensor:
    """Return the expected result in float32, with rows rounded in the same way."""
    n, k, mode = SHAPES[shape]
    x = given.x[k]
    if rounded is not None:
        q, by_row = scaled.rows(x, rounded)
        x = q.float() * by_row
    y = x.float() @ of.numbers(slice(0, n), torch.float32).T
    if mode == ADDED:
        return (given.residual.float() + y) * given.norm.float()
    y = y * torch.rsqrt(given.squares[512].sum(1, keepdim=True) / k + EPS)
    return y if mode == PLAIN else torch.nn.functional.silu(y[:, : n // 2]) * y[:, n // 2 :]


def search(todo: list[Job], repeat: int, until: float) -> dict[tuple[str, str], tuple[float, tuple[int, ...]]]:
    """Return the fastest tile of each format and shape."""
    best: dict[tuple[str, str], tuple[float, tuple[int, ...]]] = {}
    place: tuple[str, str] = ("", "")
    weights: list[Any] = []
    for fmt, shape, tile in todo:
        if time.perf_counter() > until:
            print("out of time", flush=True)
            break
        n, k, mode = SHAPES[shape]
        try:
            if place != (fmt, shape):
                if place in best:
                    say(place, best[place])
                weights, place = [], (fmt, shape)
                size = n * k // (1 if not fmt.startswith("int4") else 2)
                weights = [made(fmt, shape, "cuda") for _ in range(max(2, quant_kernels.COLD // size + 1))]
                given = Inputs(1, "cuda")
                want = wanted(weights[0], shape, given, FORMATS[fmt][1])
            products = [FusedProduct(of, None, mode, rounded=FORMATS[fmt][1]) for of in weights]
            stream = given.residual.clone()
            got = given.joined(products[0], shape, named(shape, tile))[0].float()
            given.residual.copy_(stream)
            off = float((got - want).norm() / want.norm())
            if not off < 1e-2:
                print(f"wrong: {fmt} {shape} {tile}: off by {off:.1e}", flush=True)
                continue
            calls = [partial(given.joined, p, shape, named(shape, tile)) for p in products]
            us = quant_kernels.graph_time(calls * (1 if len(calls) > 4 else 4), repeat)
            given.residual.copy_(stream)
            print(f"  {fmt} {shape} {'/'.join(map(str, tile))}: {us:.2f} us, off {off:.0e}", flush=True)
            if place not in best or us < best[place][0]:
                best[place] = us, tile
        except Exception as e:
            print("failed", fmt, shape, tile, repr(e).replace("\n", " ")[:200], flush=True)
    if place in best:
        say(place, best[place])
    return best


def say(place: tuple[str, str], found: tuple[float, tuple[int, ...]]) -> None:
    n, k, _ = SHAPES[place[1]]
    size = n * k * (1 if not place[0].startswith("int4") else 0.5 + 4 / (32 if place[0] == "int4" else 128))
    print(f"{place[0]} {place[1]}: {found[0]:.2f} us by {found[1]}, {size / found[0] / 1e3:.0f} GB/s", flush=True)


def layers(rows: int, formats: list[str], best: dict[Any, Any], copies: int, repeat: int) -> None:
    """Print the microseconds of a layer, with bfloat16 first and last."""
    state = Layer(rows)
    plain = [plain_layer(rows, state) for _ in range(copies)]
    base = quant_kernels.graph_time(plain, repeat)
    print(f"{rows} rows: bf16 {base:.1f} us a layer", flush=True)
    for fmt in formats:
        tiles = {name: named(name, best[fmt, name][1]) for name in SHAPES if (fmt, name) in best}
        tiles = tiles if len(tiles) == len(SHAPES) else {}
        made_of: dict[str, list[Callable[[], Any]]] = {}
        for _ in range(copies):
            for name, run in format_layers(fmt, rows, state, tiles):
                made_of.setdefault(name, []).append(run)
        for name, runs in made_of.items():
            try:
                us = quant_kernels.graph_time(runs, repeat)
                print(f"{rows} rows: {fmt} {name} {us:.1f} us, {base / us:.2f}x", flush=True)
            except Exception as e:
                print("failed", rows, fmt, name, repr(e)[:300], flush=True)
    print(f"{rows} rows: bf16 again {quant_kernels.graph_time(plain, repeat):.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 8, 32, 256])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--copies", type=int, default=4)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no more tiles are tried")
    args = parser.parse_args()
    began = time.perf_counter()
    todo = list(jobs(args.formats))
    compile_all(todo, args.processes)
    print(f"{len(todo)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    best = search(todo, args.repeat, began + args.seconds)
    for rows in args.rows:
        try:
            layers(rows, args.formats, best, args.copies, args.repeat)
        except Exception as e:
            print("failed", rows, repr(e)[:300], flush=True)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
