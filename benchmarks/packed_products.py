"""Time products of float8 in blocks, and of experts with 4 and 8 bits, compared with bfloat16, in microseconds.

    python benchmarks/packed_products.py blocks experts

``blocks`` are the shapes of Llama-3.1-8B with scales of 128 x 128 inputs.  ``experts`` is a layer of Qwen3-30B-A3B (128
experts of 768 of 2,048 inputs, 8 for each token) with random choices.  ``--tiles`` tries other tiles than those in use.
Times are of a replayed graph of launches over copies of the weight that do not fit in the second-level cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minivllm.core.interfaces.quantizer import StoredWeight
from minivllm.device.kernels import packed_experts
from minivllm.device.kernels.experts import ExpertProducts
from minivllm.device.kernels.grouped import GroupedProduct, dots_tile

COLD = 160 << 20  # bytes of copies
SHAPES = {"o": (4096, 4096), "gate_up": (28672, 4096)}
ROWS = (1, 4, 16, 32, 64, 128, 256)
TOKENS = (1, 4, 16, 64, 256, 1024)
E, H, INNER, CHOSEN = 128, 2048, 768, 8
WARM: tuple[int, int] | None = None
FORMS = {"4 bits, groups of 128": ("u4", 128), "float8, blocks": ("f8", 128), "int8, a scale a row": ("i8", 0)}
# BN, BK, stages, warps of ``dots``
DOTS_TILES = ((64, 128, 3, 4), (32, 128, 4, 4), (128, 128, 3, 8), (64, 64, 4, 4))
# BM, BN, BK, stages, warps of both products
EXPERT_TILES = (
    (16, 64, 64, 4, 4), (16, 64, 128, 3, 4), (16, 32, 128, 3, 4), (16, 128, 64, 4, 8), (32, 64, 64, 3, 4),
    (32, 128, 64, 3, 8), (64, 64, 64, 3, 4), (64, 128, 64, 3, 8), (64, 128, 128, 3, 8), (128, 64, 64, 3, 8),
)  # fmt: skip


def timed(calls: list[Callable[[], Any]], repeat: int = 5) -> float:
    """Return the microseconds of a call, the smallest of some replays of all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return 1e3 * best / len(calls)


def tried(calls: list[Callable[[], Any]], count: list[int] = [0]) -> float:  # noqa: B006
    """Return the time of a call, infinite if it fails or is only compiled, as a share of ``--warm``."""
    count[0] += 1
    try:
        if WARM is None:
            return timed(calls)
        if count[0] % WARM[1] == WARM[0]:
            calls[0]()
    except Exception as e:
        print(f"  failed: {str(e).splitlines()[0][:100]}", flush=True)
    return float("inf")


def best_of(found: dict[str, float], most: int) -> str:
    return ", ".join(f"{t:.1f} {tile}" for tile, t in sorted(found.items(), key=lambda item: item[1])[:most])


def blocks(tiles: bool) -> None:
    print("blocks: outputs x inputs, rows: bf16, float8 in blocks (tile), dense")
    for name, (n, k) in SHAPES.items():
        copies = max(2, COLD // (n * k))
        weights = [(torch.randn(n, k, device="cuda") * 60).to(torch.float8_e4m3fn) for _ in range(copies)]
        scale = torch.rand(n // 128, k // 128, device="cuda").repeat_interleave(128, 0)
        kernels = [GroupedProduct(w, scale) for w in weights]
        plain = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(max(2, copies // 2))]
        for m in ROWS:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            base = tried([partial(torch.mm, x, w.t(), out=y) for w in plain])
            own = dots_tile(m, n, k)
            found = {"own": tried([partial(q.dots, x, None, y) for q in kernels])}
            for bn, bk, stages, warps in DOTS_TILES if tiles else ():
                for sk in sorted({own["SK"], max(1, own["SK"] // 2)}):
                    tile = dict(BM=own["BM"], BN=bn, BK=bk, SK=sk, STAGES=stages, num_warps=warps)
                    found[str(tuple(tile.values()))] = tried([partial(q.dots, x, tile, y) for q in kernels])
            dense = tried([partial(q.dense, x, y=y) for q in kernels])
            received = f"own {found['own']:.1f} {tuple(own.values())}, best {best_of(found, 3)}, dense {dense:.1f}"
            print(f"{name}, {m}: {base:.1f}, {received}", flush=True)


def weight_of(rows: int, inputs: int, form: str, group: int) -> StoredWeight:
    groups = inputs // group if group else 1
    scale = torch.rand(rows, groups, device="cuda") / 100
    if form == "u4":
        return StoredWeight(torch.randint(0, 256, (rows, inputs // 2), device="cuda").byte(), scale, None, group)
    if form == "f8":
        weight = torch.randn(rows, inputs, device="cuda").to(torch.float8_e4m3fn)
        return StoredWeight(weight, scale, None, group)
    weight = torch.randint(-127, 128, (rows, inputs), device="cuda").to(torch.int8)
    return StoredWeight(weight, scale[:, 0].contiguous())


def routed(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, E, device="cuda").topk(CHOSEN).indices.int()
    return x, ids, torch.full((tokens, CHOSEN), 1 / CHOSEN, device="cuda")


def expert_tiles(tokens: int, form: str) -> Iterator[tuple[int, ...] | None]:
    """Yield the tiles to try for a number of bits and of pairs per expert."""
    yield None
    pairs = tokens * CHOSEN / E
    if form == "u4" and tokens in (4, 64, 1024):
        yield from (tile for tile in EXPERT_TILES if (tile[0] == 16) == (pairs <= 12))


def experts(tiles: bool) -> None:
    sizes = (E, 2 * INNER, H), (E, H, INNER)
    plain = [ExpertProducts(*(torch.randn(*size, device="cuda").bfloat16() for size in sizes)) for _ in range(2)]
    given = {tokens: routed(tokens) for tokens in TOKENS}
    base = {tokens: tried([partial(k, *g) for k in plain * 2]) for tokens, g in given.items()}
    served = packed_experts.TILES
    for name, (form, group) in FORMS.items():
        flat = (E * 2 * INNER, H), (E * H, INNER)
        made = [packed_experts.PackedExperts(E, *(weight_of(*size, form, group) for size in flat)) for _ in range(2)]
        for tokens, g in given.items():
            found = {}
            for tile in expert_tiles(tokens, form) if tiles else (None,):
                packed_experts.TILES = served if tile is None else dict.fromkeys(served, ((float("inf"), tile, tile),))
                found["own" if tile is None else str(tile)] = tried([partial(k, *g) for k in made * 2])
            packed_experts.TILES = served
            received = f"own {found['own']:.1f}, best {best_of(found, 4)}"
            print(f"{name}, {tokens} tokens: bf16 {base[tokens]:.1f}, {received}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=("blocks", "experts"))
    parser.add_argument("--tiles", action="store_true", help="others than those that serve, too")
    parser.add_argument("--warm", metavar="I/N", help="compile that share of all, and time nothing")
    args = parser.parse_args()
    global WARM
    WARM = None if args.warm is None else tuple(map(int, args.warm.split("/")))  # type: ignore[assignment]
    torch.manual_seed(0)
    for which in args.which:
        (blocks if which == "blocks" else experts)(args.tiles)


if __name__ == "__main__":
    main()
