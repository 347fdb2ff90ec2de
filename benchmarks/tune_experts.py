"""Find the fastest tiles of the experts' kernels for a shape, and print the time of every variant.

    python benchmarks/tune_experts.py --experts 128 --chosen 8 --hidden 2048 --inner 768 --rows 8 64 256 2048

Routing is uniform, so that the expected number of experts is used.  Times are those of a replayed graph of ten
launches, each with its own routing.  Compilation is spread over ``--processes``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from typing import Any

import torch
import triton

from minivllm.device.kernels import experts as kernels
from minivllm.device.kernels.router import assign

SHARED = 224 * 1024  # bytes of shared memory that a program may take


def variants(rows: int, pairs_each: float, few: bool, gated: bool, size: int = 2) -> list[dict[str, int]]:
    found = []
    if few:
        sizes = itertools.product((2, 4, 8, 16), (256, 512, 1024), (2, 3, 4), (4, 8))
        for bn, bk, stages, warps in sizes:
            if 1024 <= bn * bk <= 8192:
                found.append(dict(BN=bn, BK=bk, STAGES=stages, num_warps=warps))
        return found
    rows_of_block = (16,) if pairs_each <= 8 else (16, 32, 64) if pairs_each <= 32 else (64, 128)
    for bm, bn, bk, stages, warps in itertools.product(
        rows_of_block, (32, 64, 128, 256), (64, 128, 256), (2, 3, 4, 5, 6), (4, 8)
    ):
        stage = (bm + bn * (2 if gated else 1)) * bk * size
        sums = bm * bn * (2 if gated else 1)
        if not 24 * 1024 <= stage * stages <= SHARED or sums > 128 * 256 or (warps == 8 and bn * bm < 2048):
            continue
        if (bm >= 64 and (bk > 64 or bn < 64)) or (bm < 64 and bk < 128):
            continue
        found.append(dict(BM=bm, BN=bn, BK=bk, STAGES=stages, num_warps=warps))
    return found


class Bench:
    """Ten launches of one kernel, each with its own routing."""

    def __init__(self, args: argparse.Namespace, rows: int) -> None:
        e, k, h, n = args.experts, args.chosen, args.hidden, args.inner
        self.rows, self.k = rows, k
        torch.manual_seed(rows)
        make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / 32  # noqa: E731
        self.made = kernels.ExpertProducts(make(e, 2 * n, h), make(e, h, n))
        self.x = make(rows, h)
        draw = lambda: torch.rand(rows, e, device="cuda").topk(k).indices.int().contiguous()  # noqa: E731
        self.ids = [draw() for _ in range(10)]
        self.weights = torch.rand(rows, k, device="cuda")
        self.few = rows <= kernels.FEW
        self.each = rows * k / e

    def touched(self) -> float:
        return sum(len(i.unique()) for i in self.ids) / len(self.ids)

    def call(self, gated: bool, tile: dict[str, int], ids: Any, order: Any, expert: Any) -> None:
        made, (t, k) = self.made, self.ids[0].shape
        h, n = made.hidden, made.inner
        norm = dict(PARTS=0, PARTS_P=1)
        launch = kernels.pdl(self.x)
        if self.few and gated:
            inner = self.x.new_empty(t * k, n)
            kernels._up_few[(triton.cdiv(n, tile["BN"]), t * k)](
                self.x,
                made.up,
                self.x,
                ids,
                self.x,
                inner,
                0.0,
                0.0,
                0.0,
                K=k,
                N=n,
                H=h,
                BIAS=False,
                ACT=0,
                **norm,
                **tile,
                **launch,
            )
        elif self.few:
            inner = self.x.new_empty(t * k, n)
            kernels._down_few[(triton.cdiv(h, tile["BN"]), t)](
                inner,
                made.down,
                self.x,
                ids,
                self.weights,
                torch.empty_like(self.x),
                K=k,
                H=h,
                N=n,
                BIAS=False,
                **tile,
                **launch,
            )
        elif gated:
            inner = self.x.new_empty(len(order), n)
            kernels._up[(triton.cdiv(n, tile["BN"]), len(expert))](
                self.x,
                kernels._tiled(made.up, tile),
                self.x,
                order,
                expert,
                self.x,
                inner,
                t * k,
                0.0,
                0.0,
                0.0,
                K=k,
                N=n,
                H=h,
                FROM=0,
                IEEE=False,
                BIAS=False,
                ACT=0,
                **norm,
                **tile,
                **launch,
            )
        else:
            inner = self.x.new_empty(len(order), n)
            kernels._down[(triton.cdiv(h, tile["BN"]), len(expert))](
                kernels.TensorDescriptor.from_tensor(inner, [tile["BM"], tile["BK"]]),
                kernels._tiled(made.down, tile),
                self.x,
                order,
                expert,
                self.weights,
                self.x.new_empty(t * k, h),
                t * k,
                H=h,
                N=n,
                FROM=0,
                IEEE=False,
                BIAS=False,
                **tile,
                **launch,
            )

    def time(self, gated: bool, tile: dict[str, int], repeat: int) -> float:
        """Return the microseconds of a launch."""
        orders = [(None, None)] * 10
        if not self.few:
            orders = [assign(ids, self.made.count, tile["BM"]) for ids in self.ids]

        def ten() -> None:
            for ids, (order, expert) in zip(self.ids, orders, strict=True):
                self.call(gated, tile, ids, order, expert)

        return graph_time(ten, repeat) / 10


def graph_time(run: Any, repeat: int) -> float:
    """Return microseconds, the best of ``repeat`` replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    best = float("inf")
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3)
    return best


def jobs(args: argparse.Namespace) -> list[tuple[int, bool, dict[str, int]]]:
    return [
        (rows, gated, tile)
        for rows in args.rows
        for gated in (True, False)
        for tile in variants(rows, rows * args.chosen / args.experts, rows <= kernels.FEW, gated)
    ]


def compile_share(args: argparse.Namespace, share: list[tuple[int, bool, dict[str, int]]]) -> None:
    """Compile a share of the variants into Triton's cache, for the process that measures."""
    benches: dict[int, Bench] = {}
    for rows, gated, tile in share:
        if rows not in benches:
            benches = {rows: Bench(args, rows)}
        try:
            benches[rows].time(gated, tile, 1)
        except Exception as e:  # variants that do not fit are left out
            print("left out", rows, gated, tile, str(e).splitlines()[0][:80], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("experts", 128), ("chosen", 8), ("hidden", 2048), ("inner", 768), ("processes", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 2048])
    parser.add_argument("--top", type=int, default=4, help="variants that are printed")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", default="", help="a file for all times, JSON lines")
    args = parser.parse_args()

    todo, unique = jobs(args), {}
    for job in todo:  # a kernel is the same for all numbers of rows that are not compiled in
        unique.setdefault((job[0] <= kernels.FEW, job[1], *sorted(job[2].items())), job)
    work = sorted(unique.values(), key=lambda job: job[0])
    context = multiprocessing.get_context("spawn")
    shares = [work[i :: args.processes] for i in range(args.processes)]
    workers = [context.Process(target=compile_share, args=(args, share)) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"{len(work)} variants compiled", flush=True)
    out = open(args.out, "w") if args.out else None  # noqa: SIM115
    for rows in args.rows:
        bench = Bench(args, rows)
        for gated in (True, False):
            found = []
            for r, g, tile in todo:
                if r != rows or g != gated:
                    continue
                try:
                    us = bench.time(gated, tile, args.repeat)
                except Exception:
                    continue
                found.append((us, tile))
                if out is not None:
                    out.write(json.dumps({"rows": rows, "gated": gated, "us": round(us, 2), **tile}) + "\n")
            moved = bench.touched() * args.hidden * args.inner * (2 if gated else 1) * 2
            work_done = 2 * rows * args.chosen * args.hidden * args.inner * (2 if gated else 1)
            for us, tile in sorted(found, key=lambda pair: pair[0])[: args.top]:
                speed = f"{moved / us / 1e6:5.2f} TB/s {work_done / us / 1e6:6.1f} TFLOP/s"
                print(f"rows {rows:6} {'up  ' if gated else 'down'} {us:9.2f} us  {speed}  {tile}", flush=True)


if __name__ == "__main__":
    main()
