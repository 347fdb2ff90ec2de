"""Reading and writing what training leaves: checkpoints to go on from, and finished model directories.

A checkpoint is a folder of safetensors files of at most `PART` bytes each (weights and optimizer in float32, with the
step and the number of the next batch in the first file's metadata), so that it can be moved in small pieces.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import tokenizer as tok
from .muon import Optimizer
from .net import SHAPES, Net, from_hf, hf_config, to_hf

PART = 15_000_000


def save(folder: Path, net: Net, optimizer: Optimizer, facts: dict) -> None:
    """Write a checkpoint; `facts` is anything that JSON can hold."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"net.{n}": p.detach() for n, p in net.named_parameters()}
    tensors |= {f"state.{n}": t for n, t in optimizer.state.items()}
    parts: list[dict[str, Tensor]] = [{}]
    room = PART - 100_000
    for name, tensor in tensors.items():
        if tensor.nbytes > room:
            parts.append({})
            room = PART - 100_000
        parts[-1][name] = tensor.cpu().contiguous()
        room -= tensor.nbytes
    for old in folder.glob("part-*.safetensors"):
        old.unlink()
    for i, part in enumerate(parts):
        save_file(part, folder / f"part-{i}.safetensors", {"facts": json.dumps(facts | {"parts": len(parts)})})


def restore(folder: Path, net: Net, optimizer: Optimizer) -> dict:
    """Take over a checkpoint and return its facts."""
    with safe_open(folder / "part-0.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    tensors: dict[str, Tensor] = {}
    for i in range(facts["parts"]):
        tensors |= load_file(folder / f"part-{i}.safetensors")
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(tensors[f"net.{name}"])
        for name, t in optimizer.state.items():
            t.copy_(tensors[f"state.{name}"])
    return facts


def export(folder: Path, net: Net, tokenizer_folder: Path) -> None:
    """Write a finished model directory, as transformers reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if folder.resolve() != tokenizer_folder.resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    tokenizer = tok.load(folder)
    ids = {name: tokenizer.token_to_id(name) for name in tok.SPECIALS}
    generation = {
        "eos_token_id": [ids[tok.TURN_END], ids[tok.END_OF_TEXT]],
        "pad_token_id": ids[tok.END_OF_TEXT],
        "do_sample": False,
    }
    for name, content in (("config.json", hf_config(net.shape, ids)), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    save_file(to_hf(net), folder / "model.safetensors", {"format": "pt"})


def load_net(folder: Path, model: str) -> Net:
    """The weights of a finished model directory as a `Net`."""
    net = Net(SHAPES[model])
    from_hf(net, load_file(folder / "model.safetensors"))
    return net
