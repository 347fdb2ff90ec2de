"""Two gloo processes on the loopback compute what one process computes: a merged GQA projection, and whole models."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from minivllm.testing.tiny import ARCHS, tiny_dir

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12]


def _rank(rank: int, size: int, folder: str, cases: list[tuple[str, str, str]]) -> None:
    """One process of ``size``: writes its logits beside the models.  A process that waits too long ends itself."""
    sys.path.insert(0, os.path.dirname(__file__))
    if size > 1:
        faulthandler.dump_traceback_later(120, exit=True)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    from transformers import AutoConfig

    from minivllm.core.interfaces.quantizer import Shard
    from minivllm.plugins.quantizer.int8 import Int8
    from minivllm.testing.harness import Harness

    for name, family, load_format in cases:
        cfg = AutoConfig.from_pretrained(f"{folder}/{name}")
        quantizer = Int8() if load_format == "int8" else None
        harness = Harness(
            f"{folder}/{name}",
            ARCHS[family](),
            cfg,
            quantizer=quantizer,
            shard=Shard(rank, size),
            group=dist.group.WORLD if size > 1 else None,
            load_format="dummy" if load_format == "dummy" else "auto",
        )
        modules = harness.parts.modules
        x = torch.linspace(-1, 1, 3 * 32).view(3, 32)
        q, k, v = modules["layers.0.attn.qkv"](x).split([harness.parts.heads(n) * 8 for n in (4, 2, 2)], dim=-1)
        k, v = (t.view(3, -1, 8).repeat_interleave(2, dim=1).flatten(1) for t in (k, v))  # each KV head serves two
        mixed = modules["layers.0.attn.o"](q + k + v)
        logits = torch.cat([harness.step({0: PROMPT[:6], 1: [7]})[0], harness.step({0: PROMPT[6:], 1: [8]})[0]])
        torch.save({"logits": logits, "mixed": mixed}, f"{folder}/{name}.{load_format}.{rank}.of{size}")
    if size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tp")
    tiny_dir(path / "llama", "llama", attention_bias=True, mlp_bias=True)
    tiny_dir(path / "qwen3", "qwen3", tie_word_embeddings=True)
    mp.start_processes(_rank, (2, str(path), CASES), nprocs=2, start_method="spawn")
    _rank(0, 1, str(path), CASES)
    return path


CASES = [
    ("llama", "llama", "auto"),
    ("qwen3", "qwen3", "auto"),
    ("llama", "llama", "dummy"),
    ("llama", "llama", "int8"),
]


@pytest.mark.parametrize(("name", "family", "load_format"), CASES)
def test_two_processes_equal_one(folder, name, family, load_format):
    one = torch.load(folder / f"{name}.{load_format}.0.of1", weights_only=True)
    room = 0.05 if load_format == "int8" else 1e-5  # a row-split weight has a scale per share
    for rank in range(2):
        share = torch.load(folder / f"{name}.{load_format}.{rank}.of2", weights_only=True)
        for key, value in one.items():
            assert (share[key] - value).abs().max() <= room * value.abs().max(), (rank, key)
        assert share["logits"].std() > 0.01
