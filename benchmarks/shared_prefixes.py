"""Decode attention of rows that share prefixes, read once and read by each row: microseconds of a layer.

    python benchmarks/shared_prefixes.py --heads 32 --rows 512 --groups 8 --prefix 2048 --own 160
    python benchmarks/shared_prefixes.py --rows 32 --groups 1 8 --prefix 512 2048 8192

Random keys and values in bfloat16, blocks of 64 tokens; medians of replays of a graph of eight layers.  "floor" is the
time in which 4.8 TB/s give each block once, the memory of an H200.  "off" is the relative error of three rows to
float64 attention.  "find" is the time of the kernels that run once for a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch

from minivllm.core.interfaces.attention import AttnLayer, AttnMeta, AttnSpec
from minivllm.plugins.attention.triton_decode import DecodeWork, deal, decode
from minivllm.plugins.attention.triton_shared import SharedWork, attend_shared, find_shared
from minivllm.testing.attention_world import make_meta

BLOCK, LAYERS = 64, 8
BANDWIDTH = 4.8e12  # bytes a second


class Case:
    """Decode rows, ``groups`` of which share ``prefix`` tokens; each has ``own`` more or less tokens of its own."""

    def __init__(self, spec: AttnSpec, rows: int, groups: int, prefix: int, own: int) -> None:
        rng = np.random.default_rng(0)
        shared = prefix // BLOCK if groups else 0
        pages = -(-(own + 33) // BLOCK) + (prefix // BLOCK if not groups else 0)
        blocks = rng.permutation(groups * shared + rows * pages) + 1
        heads, tails = blocks[: groups * shared].reshape(groups, shared), blocks[groups * shared :].reshape(rows, pages)
        of = rng.permutation(rows) % max(groups, 1)
        self.table = np.concatenate([heads[of], tails], 1)[None].astype(np.int32) if groups else tails[None]
        self.lengths = [prefix + own - i * 7 % 33 for i in range(rows)]
        self.table = np.ascontiguousarray(self.table, np.int32)
        self.meta: AttnMeta = make_meta([(i, 1, n) for i, n in enumerate(self.lengths)], self.table, BLOCK, "cuda")
        self.spec, self.rows = spec, rows
        shape = (len(blocks) + 1, BLOCK, spec.kv_heads, spec.dim_qk)
        self.cache = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name in "kv"}
        self.layer = AttnLayer(0, 0, spec, self.cache)
        self.q = torch.randn(rows, spec.heads, spec.dim_qk, device="cuda", dtype=torch.bfloat16)
        self.out = torch.full_like(self.q, torch.nan)
        unique = groups * prefix + sum(self.lengths) - (rows * prefix if groups else 0)
        self.floor = unique * 2 * spec.kv_heads * spec.dim_qk * 2 / BANDWIDTH * 1e6

    def find(self, share: bool) -> tuple[SharedWork | None, DecodeWork]:
        meta, longest = self.meta, max(self.lengths)
        shared = None
        if share:
            shared = find_shared(self.spec, meta.kv_len[0], meta, meta.table[0], self.rows, False, False)
        columns = meta.kv_len[0], meta.q_len, meta.slots
        parts = None if shared is None else shared.parts
        return shared, deal(self.spec, *columns, self.rows, longest, False, False, parts)

    def run(self, work: tuple[SharedWork | None, DecodeWork]) -> None:
        if work[0] is not None:
            attend_shared(self.layer, self.q, self.meta, work[0])
        decode(self.layer, self.q, self.meta, self.out, None, work[1], True)

    def off(self) -> float:
        """Return the largest relative error of three rows."""
        worst = 0.0
        for row in {0, self.rows // 2, self.rows - 1}:
            n = self.lengths[row]
            blocks = torch.from_numpy(self.table[0, row, : -(-n // BLOCK)]).long().cuda()
            k, v = (self.cache[name][blocks].flatten(0, 1)[:n].double() for name in "kv")
            q = self.q[row].double().view(self.spec.kv_heads, -1, self.spec.dim_qk)
            weights = torch.einsum("hgd,nhd->hgn", q, k).mul_(self.spec.softmax_scale).softmax(-1)
            want = torch.einsum("hgn,nhd->hgd", weights, v).reshape(self.out[row].shape)
            worst = max(worst, float((self.out[row].double() - want).norm() / want.norm()))
        return worst


def micros(run: Callable[[], object], times: int, repeat: int = 7) -> float:
    """Return the median time of one of ``times`` calls in a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            run()
    found = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / times)
    return sorted(found)[repeat // 2]


def measure(case: Case, share: bool) -> tuple[float, float, float]:
    """Return (microseconds of a layer, microseconds of the work of a step, relative error)."""
    work = case.find(share)
    case.out.fill_(torch.nan)
    case.run(work)
    off = case.off()
    return micros(lambda: case.run(work), LAYERS), micros(lambda: case.find(share), LAYERS), off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[512])
    parser.add_argument("--groups", type=int, nargs="+", default=[8])
    parser.add_argument("--prefix", type=int, nargs="+", default=[2048])
    parser.add_argument("--own", type=int, default=160)
    args = parser.parse_args()
    torch.manual_seed(0)
    for heads in args.heads:
        spec = AttnSpec(heads, args.kv_heads, args.dim, args.dim)
        for rows in args.rows:
            for groups in args.groups:
                for prefix in args.prefix:
                    case = Case(spec, rows, groups, prefix, args.own)
                    alone, deal_us, off_alone = measure(case, False)
                    once, find_us, off = measure(case, True)
                    name = f"{heads:3} heads {rows:4} rows {groups:3} prefixes of {prefix:6}"
                    times = f"alone {alone:8.1f} us, once {once:8.1f} us, floor {case.floor:7.1f} us"
                    step = f"deal {deal_us:5.1f} us, find {find_us:5.1f} us"
                    print(
                        f"{name}: {times} ({once / case.floor:.2f}), {step}, off {off_alone:.1e} {off:.1e}", flush=True
                    )
                    del case


if __name__ == "__main__":
    main()
