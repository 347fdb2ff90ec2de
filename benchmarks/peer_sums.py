"""Check sums and moves between the GPUs of a host against float64, run them under stress, and time them against NCCL.

    python benchmarks/peer_sums.py --ranks 2 --dim 4096

Microseconds are medians of captured chains of twenty kernels of one kind: the sum with residual and norm by words, by
flags and by split flags; the sum alone; NCCL's all-reduce, and the same followed by the kernel of residual and norm.
Gathers of logits are timed with each of ``--tiles``, the elements that a program moves at a time.  The best for each
number of rows belongs in ``device.layers.peer_memory.TILES``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.device.kernels.norm import add_rms_norm
from minivllm.device.layers.peer_memory import PLACE, WORD_ROWS, PeerMemory, region_of, tile_of

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 2e-6}
CHAIN = 20  # calls in a capture


class Bench:
    """The measurements of one rank."""

    def __init__(self, rank: int, size: int, store: str, dim: int, tiles: Sequence[int]) -> None:
        self.tiles = [tile for tile in tiles if tile * 2 <= PLACE]  # of bfloat16
        self.rank, self.size, self.dim, self.device = rank, size, dim, torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        at = dict(store=dist.FileStore(store, size), rank=rank, world_size=size, device_id=self.device)
        dist.init_process_group("nccl", **at)
        self.memory, self.wrong, self.side = PeerMemory.meet(rank, region_of(size, self.device)), 0, torch.cuda.Stream()
        self.norm = SimpleNamespace(weight=torch.ones(dim, device=self.device, dtype=torch.bfloat16), eps=1e-5)

    def say(self, *words: object) -> None:
        if self.rank == 0:
            print(*words, flush=True)

    def drawn_for(self, seed: int, *shape: int) -> Tensor:
        rng = torch.Generator(device=self.device).manual_seed(seed)
        return torch.randn(*shape, generator=rng, device=self.device)

    def ways(self, rows: int) -> list[str]:
        return [way for way in ("words", "flags", "split") if way != "words" or rows <= WORD_ROWS]

    # ---- right ---------------------------------------------------------------------------------------------------

    def check(self, what: object, got: Tensor, want: Tensor, tolerance: float) -> None:
        off = ((got.double() - want).norm() / want.norm()).item()
        if not off < tolerance:
            self.wrong += 1
            print("WRONG", self.rank, what, off, flush=True)

    def check_sums(self, dtype: torch.dtype, dim: int, rows: int, way: str) -> None:
        parts = [self.drawn_for(1000 * r + rows + dim, rows, dim).to(dtype) for r in range(self.size)]
        total, mine, tolerance = sum(part.double() for part in parts), parts[self.rank].clone(), TOLERANCE[dtype]
        self.memory._sum(mine, mine, way=way)
        self.check((way, dtype, rows, dim, "sum"), mine, total, tolerance)
        for wide in (dtype, torch.float32):
            weight, bias = self.drawn_for(5, dim).to(dtype).to(wide), self.drawn_for(6, dim).to(dtype)
            stream = self.drawn_for(7, rows, dim).to(dtype)
            want, y = total + bias.double() + stream.double(), torch.full_like(stream, torch.nan)
            self.memory._sum(parts[self.rank], y, bias, stream, SimpleNamespace(weight=weight, eps=1e-5), way=way)
            normed = want * torch.rsqrt(want.square().mean(1, keepdim=True) + 1e-5) * weight.double()
            self.check((way, dtype, rows, dim, "stream"), stream, want, tolerance)
            self.check((way, dtype, rows, dim, "norm"), y, normed, 3 * tolerance)

    def check_all(self) -> None:
        for dtype, dims in ((torch.bfloat16, (self.dim, 2880)), (torch.float32, (64,)), (torch.float16, (1024,))):
            for dim in dims:
                for rows in (1, 7, 32, 300, 1500):
                    for way in self.ways(rows):
                        self.check_sums(dtype, dim, rows, way)
        for rows, columns, vocab in ((1, 64128, 128256), (256, 64128, 128256), (40, 31, 61), (1000, 75968, 151936)):
            parts = [self.drawn_for(r + rows, rows, columns).bfloat16() for r in range(self.size)]
            for tile in (0, *self.tiles, 0):
                found = self.memory.gather(parts[self.rank], vocab, tile)
                if found is not None and not torch.equal(found, torch.cat(parts, 1)[:, :vocab]):
                    self.wrong += 1
                    print("WRONG gather", rows, columns, vocab, tile, flush=True)
        torch.cuda.synchronize()
        self.say("checked, wrong:", self.wrong)

    def stress(self, rows: int, way: str, replays: int = 200) -> None:
        """Replay with new inputs, while ranks begin at random times."""
        parts = [torch.zeros(rows, self.dim, device=self.device, dtype=torch.bfloat16) for _ in range(self.size)]
        stream, outs = torch.zeros_like(parts[0]), [torch.empty_like(parts[0]) for _ in range(10)]
        turns = iter(range(1 << 30))

        def run() -> None:
            self.memory._sum(parts[self.rank], outs[next(turns) % 10], None, stream.clone(), self.norm, way=way)

        graph, rng, wrong = self.capture(run, 10), random.Random(self.rank), 0
        for replay in range(replays):
            for r, part in enumerate(parts):
                part.copy_(self.drawn_for(10 * replay + r, rows, self.dim))
            if rng.random() < 0.5:
                torch.cuda._sleep(rng.randrange(1_000, 300_000))
            graph.replay()
            total = sum(part.float() for part in parts).bfloat16().float()
            want = total * torch.rsqrt(total.square().mean(1, keepdim=True) + 1e-5)
            for out in outs:
                wrong += int(((out.float() - want).abs().max() > 0.05).item())
                out.fill_(torch.nan)
        self.wrong += wrong
        self.say(f"{replays} replays of {rows} rows by {way}, wrong:", wrong)

    # ---- fast ----------------------------------------------------------------------------------------------------

    def capture(self, run: Callable[[], object], chain: int = CHAIN) -> torch.cuda.CUDAGraph:
        with torch.cuda.stream(self.side):
            run()
            self.side.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(chain):
                run()
            graph.capture_end()
        torch.cuda.synchronize()
        dist.barrier()
        return graph

    def us(self, run: Callable[[], object], chain: int = CHAIN) -> float:
        graph, found = self.capture(run, chain), []
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(15):
            begun.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            found.append(begun.elapsed_time(ended) / chain * 1e3)
        return statistics.median(found)

    def time(self, rows: int) -> None:
        x = torch.randn(rows, self.dim, device=self.device).bfloat16()
        stream, y, other = torch.zeros_like(x), torch.empty_like(x), x.clone()

        def library() -> None:
            dist.all_reduce(other)
            add_rms_norm(other, stream, self.norm.weight, 1e-5)

        times = {
            way: self.us(lambda w=way: self.memory._sum(x, y, None, stream, self.norm, w)) for way in self.ways(rows)
        }
        times |= {"sum": self.us(lambda: self.memory.add(y)), "nccl": self.us(lambda: dist.all_reduce(other))}
        times["nccl, norm"] = self.us(library)
        self.say(f"{rows:6} rows:", ", ".join(f"{name} {value:.1f}" for name, value in times.items()), "us")

    def time_gather(self, rows: int, columns: int = 64128) -> None:
        x = torch.randn(rows, columns, device=self.device).bfloat16()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        vocab = self.size * columns
        ours = {tile: self.us(lambda tile=tile: self.memory.gather(x, vocab, tile), 5) for tile in self.tiles}
        reported = ", ".join(f"{tile} at a time {us:.1f}" for tile, us in ours.items())
        nccl = self.us(lambda: dist.gather(x, parts, 0), 5)
        self.say(f"gather of {rows} rows: {reported}, nccl {nccl:.1f} us; layers.peer_memory.TILES has {tile_of(rows)}")


def ended(ranks: Sequence[subprocess.Popen], limit: float) -> int:
    """Return the worst exit code once all processes have ended.

    If one fails or takes too long, the others are ended, because they would wait in a kernel for ever.
    """
    end = time.monotonic() + limit
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > end or any(rank.returncode for rank in ranks):
            print(f"ended after {limit - (end - time.monotonic()):.0f} s", flush=True)
            for rank in ranks:
                rank.kill()
            return max(1, *(rank.wait() for rank in ranks))
        time.sleep(0.1)
    return max(rank.wait() for rank in ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384])
    parser.add_argument("--tiles", type=int, nargs="+", default=[2048, 4096, 8192, 16384], help="of gathers, tried")
    parser.add_argument("--gathers", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256], help="rows of gathers")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds, after which the ranks are ended")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is None:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, *sys.argv, "--store", f"{folder}/store", "--rank"]
            ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(args.ranks)]
            sys.exit(ended(ranks, args.limit))
    bench = Bench(args.rank, args.ranks, args.store, args.dim, args.tiles)
    bench.check_all()
    for rows, way in ((1, "words"), (16, "words"), (64, "flags"), (256, "flags"), (256, "split")):
        bench.stress(rows, way)
    for rows in args.rows:
        bench.time(rows)
    for rows in args.gathers:
        bench.time_gather(rows)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(bench.wrong > 0)


if __name__ == "__main__":
    main()
