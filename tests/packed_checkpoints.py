"""Quantized checkpoints, written by the documented layouts, and what they stand for in floating numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm.testing.quantizer_written import packed
from minivllm.testing.tiny import tiny_dir

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 64}  # of a tiny model
PROMPT = [5, 17, 3, 44, 60, 21, 9, 33]


@dataclass(frozen=True)
class Coded:
    """w[n, k] = (codes[n, k] - zero[n, g]) * scale[n, g], g = group_of[k]; all but the last [n, ...]."""

    codes: Tensor  # i64
    scale: Tensor  # f32 with the digits of float16
    zero: Tensor  # i64
    group_of: Tensor

    @property
    def weight(self) -> Tensor:
        return (self.codes - self.zero[:, self.group_of]).float() * self.scale[:, self.group_of]


def coded(outputs: int, inputs: int, bits: int, group: int, symmetric: bool = True, order: bool = False) -> Coded:
    """Random numbers, of which every code and every zero point comes up; ``order``: groups lie anyhow (act-order)."""
    group = inputs if group == -1 else group
    groups = -(-inputs // group)
    codes = torch.randint(0, 1 << bits, (outputs, inputs))
    scale = (torch.rand(outputs, groups) + 0.5) * 0.5 / (1 << bits)
    zero = torch.full((outputs, groups), 1 << (bits - 1))
    if not symmetric:
        zero = torch.randint(0, 1 << bits, (outputs, groups))
        zero.view(-1)[:2] = torch.tensor([0, (1 << bits) - 1])
    group_of = torch.arange(inputs) // group
    if order:
        group_of = group_of[torch.randperm(inputs)]
    return Coded(codes, scale.half().float(), zero, group_of)


def gptq(c: Coded, bits: int, v1: bool = True) -> dict[str, Tensor]:
    zero = c.zero.t().contiguous()
    return {
        "qweight": packed(c.codes, bits).t().contiguous(),
        "qzeros": packed((zero - 1) % (1 << bits) if v1 else zero, bits),
        "scales": c.scale.t().half().contiguous(),
        "g_idx": c.group_of.int(),
    }


Code = Callable[[str, int, int], "Coded | None"]  # name of a module, outputs, inputs -> None: it stays plain


def packed_dir(path: Path, config: Mapping[str, Any], code: Code, write: Any, kind: str = "llama", **more: Any) -> Any:
    """A tiny model whose linear layers are what ``code`` gives, written by ``write``; (config, transformers' model of
    the same weights in floating numbers)."""
    path, cfg, hf = tiny_dir(path, kind, **{**SIZES, **more})
    state, tensors = hf.state_dict(), load_file(path / "model.safetensors")
    for name in [n for n in tensors if n.endswith(("_proj.weight", "lm_head.weight"))]:
        made = code(name.removesuffix(".weight"), *tensors[name].shape)
        if made is not None:
            state[name].copy_(made.weight)
            stem = name.removesuffix(".weight")
            del tensors[name]
            tensors |= {f"{stem}.{param}": t for param, t in write(made, stem).items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    say(path, config)
    cfg.quantization_config = dict(config)
    return cfg, hf


def say(path: Path, config: Mapping[str, Any]) -> None:
    """What config.json has as ``quantization_config``."""
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "quantization_config": dict(config)}))


def change(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """The tensors of a checkpoint, changed in place."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def cut(c: Coded, rows: slice) -> Coded:
    return replace(c, codes=c.codes[rows], scale=c.scale[rows], zero=c.zero[rows])
