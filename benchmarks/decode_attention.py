"""Time decode attention of the Triton back end by KV format, in microseconds of a layer and bytes read per second.

    python benchmarks/decode_attention.py --rows 256 --context 545
    python benchmarks/decode_attention.py --rows 8 --context 32000

A layer has Llama-3.1-8B's shape (32 query heads of 128 on 8 KV heads) and random keys and values.  Times are medians of
replays of a graph of eight launches.  "off" is the relative error of three rows to float64 attention over the stored
keys and values.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from minivllm.core.interfaces.attention import AttnLayer, AttnSpec
from minivllm.plugins.attention.triton_decode import deal, decode
from minivllm.plugins.kvformat.scaled import Fp8KV, Int8KV
from minivllm.testing.attention_world import make_meta

SPEC = AttnSpec(heads=32, kv_heads=8, dim_qk=128, dim_v=128)
BLOCK = 64
FORMATS = {"int8": (Int8KV, torch.int8), "fp8": (Fp8KV, torch.float8_e4m3fn)}
Cache = dict[str, torch.Tensor]


def make_cache(name: str, blocks: int) -> tuple[Cache, torch.Tensor, torch.Tensor]:
    """Return a cache in the format, and the keys and values that it holds, in float32."""
    shape = (blocks, BLOCK, SPEC.kv_heads, SPEC.dim_qk)
    drawn = {part: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for part in "kv"}
    if name == "bf16":
        return drawn, drawn["k"].float(), drawn["v"].float()
    kind, dtype = FORMATS[name]
    cache: Cache = {}
    for part, x in drawn.items():
        scale = x.abs().amax(-1).float() / kind.most
        steps = x.float() / scale[..., None]
        cache[part] = (steps.round() if name == "int8" else steps).to(dtype)
        cache[part + "_scale"] = scale
    held = [cache[part].float() * cache[part + "_scale"][..., None] for part in "kv"]
    return cache, held[0], held[1]


def error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> float:
    """Return the relative error of one row, with q and out [heads, D], k and v [tokens, kv_heads, D]."""
    queries = q.double().view(SPEC.kv_heads, -1, SPEC.dim_qk)
    weights = torch.einsum("hgd,nhd->hgn", queries, k.double()).mul_(SPEC.softmax_scale).softmax(-1)
    want = torch.einsum("hgn,nhd->hgd", weights, v.double()).reshape(out.shape)
    return float((out.double() - want).norm() / want.norm())


def measure(name: str, rows: int, context: int, repeat: int) -> tuple[float, float, float]:
    """Return (microseconds, bytes read, relative error)."""
    pages = -(-context // BLOCK)
    cache, k, v = make_cache(name, rows * pages + 1)
    lengths = [context - i * 7 % min(60, context) for i in range(rows)]
    table = np.arange(1, rows * pages + 1, dtype=np.int32).reshape(1, rows, pages)
    meta = make_meta([(i, 1, n) for i, n in enumerate(lengths)], table, BLOCK, "cuda")
    layer = AttnLayer(0, 0, SPEC, cache)
    q = torch.randn(rows, SPEC.heads, SPEC.dim_qk, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    work = deal(SPEC, meta.kv_len[0], meta.q_len, meta.slots, rows, context, False, False)

    decode(layer, q, meta, out, None, work, True)
    off = 0.0
    for row in {0, rows // 2, rows - 1}:
        here = slice(1 + row * pages, 1 + (row + 1) * pages)
        keys, values = (x[here].flatten(0, 1)[: lengths[row]] for x in (k, v))
        off = max(off, error(q[row], keys, values, out[row]))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            decode(layer, q, meta, out, None, work, True)
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / 8)
    token = sum(x[0, 0].nbytes for x in cache.values())
    return sorted(times)[repeat // 2], float(sum(lengths) * token), off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["bf16", *FORMATS], choices=["bf16", *FORMATS])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--context", type=int, default=545)
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    torch.manual_seed(0)
    for name in args.formats:
        us, size, off = measure(name, args.rows, args.context, args.repeat)
        print(f"{name:5} {us:8.1f} us, {size / us / 1e3:6.0f} GB/s, off {off:.1e}", flush=True)


if __name__ == "__main__":
    main()
