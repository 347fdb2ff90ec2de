"""Quantized checkpoints in their documented layouts, and their weights as floating-point numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.testing.harness import Harness
from minivllm.testing.quantizer_data import dequantized
from minivllm.testing.quantizer_written import awq_words, packed
from minivllm.testing.tiny import ARCHS, tiny_dir

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 64}  # sizes of a tiny model
LLM_SIZES = {
    "max_num_seqs": 4, "num_kvcache_blocks": 64, "max_model_len": 64, "device": "cpu", "dtype": "float32",
    "skip_tokenizer_init": True,
}  # fmt: skip
STATE = "weight.quant_state.bitsandbytes__"
TABLES = {
    "nf4": [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0,
            0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1],
    "fp4": [0, 0.0052, 0.6667, 1, 0.3333, 0.5, 0.1667, 0.25, 0, -0.0052, -0.6667, -1, -0.3333, -0.5, -0.1667, -0.25],
}  # fmt: skip
MATRIX = re.compile(r"(_proj(_[a-z]+)?|lm_head|\.w[123])\.weight$")  # names of the weights that are packed
PROMPT = [5, 17, 3, 44, 60, 21, 9, 33]


@dataclass(frozen=True)
class Coded:
    """A weight w[n, k] = (codes[n, k] - zero[n, g]) * scale[n, g] with g = group_of[k]."""

    codes: Tensor  # i64
    scale: Tensor  # f32 with the digits of float16
    zero: Tensor  # i64
    group_of: Tensor

    @property
    def weight(self) -> Tensor:
        return (self.codes - self.zero[:, self.group_of]).float() * self.scale[:, self.group_of]


def coded(outputs: int, inputs: int, bits: int, group: int, symmetric: bool = True, order: bool = False) -> Coded:
    """Return random numbers in which every code and every zero point occurs.

    ``order`` assigns inputs to groups in random order (act-order).
    """
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


def awq(c: Coded) -> dict[str, Tensor]:
    return {
        "qweight": awq_words(c.codes.t()),
        "qzeros": awq_words(c.zero.t()),
        "scales": c.scale.t().half().contiguous(),
    }


def compressed(c: Coded, bits: int, symmetric: bool, act_order: bool = False) -> dict[str, Tensor]:
    """Return the tensors of pack-quantized, with zero points packed along the outputs."""
    made = {
        "weight_packed": packed(c.codes, bits),
        "weight_scale": c.scale.half(),
        "weight_shape": torch.tensor(c.codes.shape),
    }
    if not symmetric:
        made["weight_zero_point"] = packed(c.zero.t(), bits).t().contiguous()
    if act_order:
        made["weight_g_idx"] = c.group_of.int()
    return made


class Four:
    """A random weight of 4 bits in the layout of bitsandbytes, element after element."""

    def __init__(self, n, k, kind="nf4", nested=False, block=64, stored=torch.uint8):
        codes = torch.randint(0, 16, (n * k,))
        table = torch.tensor(TABLES[kind])
        blocks = -(-n * k // block)
        sizes = (torch.rand(blocks) + 0.5) / 10
        state = {"quant_type": kind, "blocksize": block, "dtype": "float32", "shape": [n, k]}
        self.tensors = {"weight.absmax": sizes, "weight.quant_map": table}
        if nested:
            values, outer = torch.linspace(-1, 1, 256), torch.rand(-(-blocks // 256)) / 50
            inner = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.07}
            sizes = values[inner.long()] * outer[torch.arange(blocks) // 256] + 0.07
            self.tensors |= {"weight.absmax": inner, "weight.nested_absmax": outer, "weight.nested_quant_map": values}
        self.weight = (table[codes] * sizes[torch.arange(n * k) // block]).view(n, k)
        raw = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)
        self.tensors["weight"] = raw.view(stored).view(-1, 1)
        self.tensors[STATE + kind] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


class Eight:
    def __init__(self, n, k):
        codes, sizes = torch.randint(-127, 128, (n, k)), torch.rand(n) + 0.1
        self.weight = codes * sizes[:, None] / 127
        self.tensors = {
            "weight": codes.to(torch.int8),
            "SCB": sizes,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }


# (name of a module, outputs, inputs) -> the codes, or None for a plain weight
Code = Callable[[str, int, int], "Coded | None"]


def packed_dir(path: Path, config: Mapping[str, Any], code: Code, write: Any, kind: str = "llama", **more: Any) -> Any:
    """Write a tiny model whose linear layers are the results of ``code``, by ``write``.

    Return (config, transformers' model with the same weights as floating-point numbers).
    """
    path, cfg, hf = tiny_dir(path, kind, **{**SIZES, **more})
    state, tensors = hf.state_dict(), load_file(path / "model.safetensors")
    for name in [n for n in tensors if MATRIX.search(n)]:
        made = code(name.removesuffix(".weight"), *tensors[name].shape)
        if made is not None:
            _place(state, name).copy_(made.weight)
            stem = name.removesuffix(".weight")
            del tensors[name]
            tensors |= {f"{stem}.{param}": t for param, t in write(made, stem).items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    say(path, config)
    cfg.quantization_config = dict(config)
    return cfg, hf


def _place(state: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the weight in transformers' model, which has one tensor for all experts."""
    expert = re.fullmatch(r"(.*experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight", name)
    if expert is None:
        return state[name]
    mixture, e, which = expert.groups()
    if which in ("down_proj", "w2"):
        return state[f"{mixture}.down_proj"][int(e)]
    return state[f"{mixture}.gate_up_proj"][int(e)].chunk(2)[which in ("up_proj", "w3")]


def say(path: Path, config: Mapping[str, Any]) -> None:
    """Set ``quantization_config`` in config.json."""
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "quantization_config": dict(config)}))


def change(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint in place."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def info(rows=(24, 8), inp=64, name="layers.3.attn.qkv", **more) -> ModuleInfo:
    parts = tuple(zip("abcdefgh", rows, strict=False))
    return ModuleInfo(name, more.pop("kind", "linear"), inp, parts, "float32", "cpu", **more)


def loaded(quantizer: Any, m: ModuleInfo, tensors: Mapping[str, Mapping[str, Tensor]]) -> Any:
    """Return the scheme of a module, loaded with the tensors of each part."""
    scheme = quantizer.scheme(m)
    for part, given in tensors.items():
        for param, tensor in given.items():
            scheme.load(param, scheme.slice(param, tensor, m.split, m.shard), part)
    scheme.finish()
    return scheme


def held(scheme: Any) -> Tensor:
    return dequantized(scheme, scheme.info)


def forms(scheme: Any) -> list[type]:
    """Return the types of the schemes for the parts of a module, or for all of them."""
    return [type(one.scheme) for one in scheme._held]


def logits_of(path: Path, cfg: Any, hf: Any, quantizer: Any, kind: str = "llama") -> tuple[Harness, Tensor, Tensor]:
    """Return (a harness, the engine's logits of a prompt, transformers' logits)."""
    harness = Harness(path, ARCHS[kind](), cfg, quantizer=quantizer(None, cfg.quantization_config))
    with torch.inference_mode():
        return harness, harness.step({0: PROMPT})[0], hf(torch.tensor([PROMPT])).logits[0]


def scaled(
    dtype: torch.dtype, rows: int, columns: int, outputs: int = 96, inputs: int = 192, zero: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Return (the tensors of a weight in bytes whose blocks share a scale, the weight)."""
    codes = torch.randint(-127, 128, (outputs, inputs)).float()
    codes = (codes if dtype == torch.int8 else codes * 3).to(dtype)
    shape = (-(-outputs // rows), -(-inputs // columns))
    scale, zeros = (torch.rand(shape) + 0.5) / 500, torch.randint(-5, 6, shape).to(torch.int8)
    zeros.view(-1)[0] = 1
    down, across = (torch.arange(n) // size for n, size in ((outputs, rows), (inputs, columns)))
    weight = codes.float() - (zeros[down][:, across].float() if zero else 0)
    made = {"weight": codes, "weight_scale": scale.view(()) if shape == (1, 1) else scale}
    return {**made, **({"weight_zero_point": zeros} if zero else {})}, weight * scale[down][:, across]
