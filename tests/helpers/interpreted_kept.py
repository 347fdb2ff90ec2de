"""The kernels of compressions, compared with torch; run by device/kernels/test_kernels.py.

Under Triton's interpreter they run on a CPU.  Without it a GPU is needed.
"""

from __future__ import annotations

import os

import pytest
import torch

from minivllm import LLM, SamplingParams, Tap
from minivllm.device.kernels import kept_tokens
from minivllm.device.kernels.kept_tokens import GroupTensors, Move, choose, gather
from minivllm.device.worker import compaction
from minivllm.testing.tiny import tiny_dir

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
BLOCK, HEADS = 4, 3
FORMATS = {
    "16 bits": {"k": ((64,), torch.float16), "v": ((32,), torch.float16)},
    "odd": {"k": ((5,), torch.float16), "v": ((3,), torch.float16)},
    "32 bits": {"k": ((24,), torch.float32)},
    "scaled": {
        "k": ((32,), torch.int8),
        "v": ((32,), torch.int8),
        "k_scale": ((), torch.float32),
        "v_scale": ((), torch.float32),
    },
}


def chosen_by_sorts(scores, kept):
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :kept].sort(dim=-1).values.int()


@pytest.mark.parametrize(("stored", "kept"), [(1, 1), (5, 5), (7, 1), (40, 13), (64, 63), (1500, 700), (1024, 1)])
@pytest.mark.parametrize("kind", ["normal", "few values", "equal", "infinite", "zeros"])
def test_the_highest_scores_stay_and_the_first_of_equal_ones(stored, kept, kind):
    generator = torch.Generator().manual_seed(stored)
    scores = torch.randn(2, 2, stored, generator=generator)
    if kind == "few values":
        scores = scores.round()
    elif kind == "equal":
        scores = torch.full_like(scores, -0.25)
    elif kind == "infinite":
        scores[scores < 0.3] = float("-inf")
        scores[scores > 1.2] = float("inf")
    elif kind == "zeros":
        scores = torch.where(scores > 0, 0.0, -0.0)
    assert torch.equal(choose(scores.to(DEVICE), kept).cpu(), chosen_by_sorts(scores, kept))


def caches(kind, layers, blocks, generator):
    """Return random caches of some layers."""
    made = []
    for _ in range(layers):
        cache = {}
        for name, (shape, dtype) in FORMATS[kind].items():
            numbers = torch.randint(-100, 100, (blocks, BLOCK, HEADS, *shape), generator=generator)
            cache[name] = numbers.to(dtype).to(DEVICE)
        made.append(cache)
    return made


@pytest.mark.parametrize("kind", FORMATS)
def test_kept_tokens_of_several_rows_move_in_place_and_to_other_blocks(kind, monkeypatch):
    monkeypatch.setattr(kept_tokens, "MOVED", 1 << 9)  # several chunks
    generator = torch.Generator().manual_seed(3)
    layers, rows = 2, [(37, 20), (9, 9), (41, 5)]
    found = caches(kind, layers, 40, generator)
    expected = [{name: tensor.clone() for name, tensor in cache.items()} for cache in found]
    free, moves = (torch.randperm(39, generator=generator) + 1).int().tolist(), []
    for number, (stored, kept) in enumerate(rows):
        used, needed = -(-stored // BLOCK), -(-kept // BLOCK)
        sources = torch.tensor([free.pop() for _ in range(used)], dtype=torch.int32)
        targets = sources[:needed].clone()
        if number:  # a part of the blocks is shared with another row
            targets[::2] = torch.tensor([free.pop() for _ in range(len(targets[::2]))], dtype=torch.int32)
        tokens = choose(torch.rand(layers, HEADS, stored, generator=generator).to(DEVICE), kept)
        moves.append(Move(tokens, sources.to(DEVICE), targets.to(DEVICE)))
        place = lambda blocks, at: blocks.long()[at // BLOCK] * BLOCK + at % BLOCK  # noqa: E731
        to = place(targets, torch.arange(kept))
        for cache, of_layer in zip(expected, tokens.cpu().long(), strict=True):
            for name, tensor in cache.items():
                flat = tensor.cpu().flatten(0, 1)
                moved = flat[place(sources, of_layer), torch.arange(HEADS)[:, None]]
                flat[to, torch.arange(HEADS)[:, None]] = moved
                cache[name] = flat.view(tensor.shape)
    GroupTensors(found).move(moves)
    for cache, other in zip(found, expected, strict=True):
        for name, tensor in cache.items():
            assert torch.equal(tensor.cpu(), other[name].cpu()), name


@pytest.mark.parametrize("kind", ["16 bits", "odd", "32 bits"])
def test_gathered_tokens_are_those_of_the_blocks(kind, monkeypatch):
    monkeypatch.setattr(kept_tokens, "GATHERED", 8)
    found = caches(kind, 3, 20, torch.Generator().manual_seed(1))
    blocks, stored = torch.tensor([7, 2, 19, 4, 11], dtype=torch.int32), 18
    tensors = [cache["k"] for cache in found]
    lines = gather(tensors, blocks.to(DEVICE), stored).cpu()
    for i, tensor in enumerate(tensors):
        tokens = tensor.cpu()[blocks.long()].flatten(0, 1)[:stored]
        assert torch.equal(lines[i * HEADS : (i + 1) * HEADS], tokens.transpose(0, 1))


PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8, 11, 22, 34, 45, 31, 10, 4, 18, 15]


@pytest.mark.skipif(DEVICE != "cpu", reason="the engine is one on a CPU")
@pytest.mark.parametrize(
    ("scorer", "options"),
    [
        ("knorm", {}),
        ("snapkv", {"enable_prefix_caching": False}),
        ("tova", {"kv_format": "int8"}),
        ("streaming", {"kv_format": "fp16"}),
    ],
)
def test_an_engine_keeps_and_moves_the_same_tokens_with_the_kernels_and_with_torch(
    scorer, options, tmp_path, monkeypatch
):
    path, *_ = tiny_dir(tmp_path)
    moved, gathered, found = [], [], []
    real, real_gather = GroupTensors.move, kept_tokens.gather
    monkeypatch.setattr(GroupTensors, "move", lambda self, moves: moved.append(len(moves)) or real(self, moves))
    monkeypatch.setattr(kept_tokens, "gather", lambda *args: gathered.append(args[2] > 1) or real_gather(*args))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, kv_budget=0.5)
    fixed = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=64, max_num_seqs=4, kvcache_block_size=4)
    for kernels in (False, True):
        monkeypatch.setattr(compaction, "has_kernels", lambda wiring, kernels=kernels: kernels)
        with LLM(str(path), compressor=scorer, compress_every=3, graph="off", **fixed, **options) as llm:
            taps = [Tap("compression.kept", read=True)]
            outs = llm.generate([PROMPT, PROMPT[::-1], PROMPT[3:]], params, use_tqdm=False, taps=taps)
        assert [out.error for out in outs] == [None] * 3
        assert bool(moved) == kernels
        events = [event for out in outs for event in out.taps["compression.kept"]]
        kept = [(e.computed, layer, e.positions[layer].tolist()) for e in events for layer in e.positions]
        found.append(([out.outputs[0].token_ids for out in outs], kept))
    assert found[0] == found[1] and max(moved) > 1
    # kernels load keys that are stored as they are; the start loads one token
    assert any(gathered) == (scorer in ("knorm", "snapkv"))
