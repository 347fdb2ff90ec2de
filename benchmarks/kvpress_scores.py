"""Compare the tokens that built-in compressors keep with those of the presses of the package ``kvpress``.

    python benchmarks/kvpress_scores.py            # in an environment that has kvpress 0.5.5

Keys, values and queries are random, in float32.  A press gets the attention of the last queries, or of all queries for
sums, as transformers computes it with the implementation "eager".  The table counts the heads that keep other tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from minivllm.plugin import CompressorContext, StoredTokens
from minivllm.plugins.compressor.attention_weights import H2O, SnapKV, Tova, last_attention
from minivllm.plugins.compressor.keys import KeyDiff, KNorm, Streaming
from minivllm.plugins.compressor.options import H2OOptions, SnapKVOptions, StreamingOptions

SHAPES = ((8, 8, 64), (8, 2, 64), (16, 4, 128))  # query heads, KV heads, dimension
LENGTHS = (150, 257, 1000)  # a quarter of each is more than the window
SHARES = (0.25, 0.5, 0.9)
WINDOW = 32


def pairs() -> list[tuple[str, Any, Any]]:
    """Return (name, built-in compressor, press) of each pair."""
    import kvpress

    ctx = CompressorContext("cpu", "float32", 4096)
    snap = SnapKVOptions(window=WINDOW)
    return [
        ("streaming", Streaming(StreamingOptions(), ctx), kvpress.StreamingLLMPress()),
        ("knorm", KNorm(None, ctx), kvpress.KnormPress()),
        ("keydiff", KeyDiff(None, ctx), kvpress.KeyDiffPress()),
        ("snapkv", SnapKV(snap, ctx), kvpress.SnapKVPress(window_size=WINDOW, kernel_size=snap.kernel)),
        ("tova", Tova(None, ctx), kvpress.TOVAPress()),
        ("h2o, mean", H2O(H2OOptions(recent=0, mean=True), ctx), kvpress.ObservedAttentionPress()),
    ]


def stored_tokens(n: int, shape: tuple[int, int, int], keep: int, window: int, seed: int) -> StoredTokens:
    """Return random stored tokens.  If all n queries are in the ``window``, they have sums of attention too."""
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(n, kv_heads, dim, generator=generator) for _ in range(2))
    queries = torch.randn(window, heads, dim, generator=generator) if window else None
    stored = StoredTokens(0, keys, values, queries, dim**-0.5, keep, n, seed)
    if window < n:
        return stored
    sums = last_attention(stored, stored.queries).sum(dim=(1, 2))
    return replace(stored, attention_sums=sums, sum_queries=torch.arange(n, 0, -1.0).expand(kv_heads, n))


def kept(scores: torch.Tensor, heads: int, keep: int) -> torch.Tensor:
    """Return the tokens that the engine keeps, i64 [kv_heads, keep], ascending."""
    order = scores.float().expand(heads, -1).sort(dim=-1, descending=True, stable=True).indices
    return order[:, :keep].sort(dim=-1).values


def kept_by_press(press: Any, stored: StoredTokens, share: float) -> torch.Tensor:
    """Return the tokens that a press keeps, i64 [kv_heads, keep], ascending."""
    n, kv_heads, dim = stored.keys.shape
    press.compression_ratio = 1 - share
    attention = None
    heads = kv_heads
    if stored.queries is not None:
        heads = stored.queries.shape[1]
        attention = last_attention(stored, stored.queries).flatten(0, 1)[None]
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=kv_heads)
    module = SimpleNamespace(config=config, head_dim=dim, layer_idx=0)
    keys, values = (x.transpose(0, 1)[None] for x in (stored.keys, stored.values))
    scores = press.score(module, torch.empty(1, n, 1), keys, values, attention, {})
    return scores[0].topk(stored.keep, dim=-1).indices.sort(dim=-1).values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    print("compressor   heads   other tokens kept")
    for name, made, press in pairs():
        heads = other = 0
        for seed in range(seeds):
            for shape in SHAPES:
                for n in LENGTHS:
                    for share in SHARES:
                        keep = int(n * share)
                        window = n if made.attention_sums else made.window
                        stored = stored_tokens(n, shape, keep, window, seed)
                        ours = kept(made.score(stored), shape[1], keep)
                        theirs = kept_by_press(press, stored, share)
                        heads += len(ours)
                        other += int((ours != theirs).any(dim=-1).sum())
        print(f"{name:<10} {heads:>7} {other:>8}")


if __name__ == "__main__":
    main()
