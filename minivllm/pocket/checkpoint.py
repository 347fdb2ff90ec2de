"""Files of a training run: checkpoints, from which it can continue, and finished model directories.

A checkpoint is a folder of safetensors files of at most `PART` bytes, so that it can be copied in small pieces.  It has
the weights and the optimizer in float32.  The metadata of each file has the step, which is also the number of the next
batch.
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

PART = 15_000_000  # largest size in bytes of a file of a checkpoint
HEADER = 100_000  # bytes that are reserved for the header of a part, which is one file of a checkpoint


def save(folder: Path, net: Net, optimizer: Optimizer, facts: dict) -> None:
    """Write a checkpoint of a net and its optimizer into a folder, in place of an older one there.

    `facts` are stored with it as JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"net.{name}": parameter.detach() for name, parameter in net.named_parameters()}
    tensors |= {f"state.{name}": tensor for name, tensor in optimizer.state.items()}
    parts: list[dict[str, Tensor]] = []
    free = 0  # number of bytes that are free in the last part
    for name, tensor in tensors.items():
        if tensor.nbytes > free:
            parts.append({})
            free = PART - HEADER
        parts[-1][name] = tensor.cpu().contiguous()
        free -= tensor.nbytes
    for old in folder.glob("part-*.safetensors"):
        old.unlink()
    metadata = {"facts": json.dumps(facts | {"parts": len(parts)})}
    for i, part in enumerate(parts):
        save_file(part, folder / f"part-{i}.safetensors", metadata)


def restore(folder: Path, net: Net, optimizer: Optimizer) -> dict:
    """Copy a checkpoint into a net and its optimizer, and return the facts stored with it."""
    with safe_open(folder / "part-0.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    tensors: dict[str, Tensor] = {}
    for i in range(facts["parts"]):
        tensors |= load_file(folder / f"part-{i}.safetensors")
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(tensors[f"net.{name}"])
        for name, tensor in optimizer.state.items():
            tensor.copy_(tensors[f"state.{name}"])
    return facts


def export(folder: Path, net: Net, tokenizer_folder: Path) -> None:
    """Write a finished model directory in the format of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if folder.resolve() != tokenizer_folder.resolve():
            shutil.copyfile(tokenizer_folder / name, folder / name)
    tokenizer = tok.load(folder)
    ids = {name: tokenizer.token_to_id(name) for name in tok.SPECIALS}
    end_of_text = ids[tok.END_OF_TEXT]
    generation = {"eos_token_id": [ids[tok.TURN_END], end_of_text]}
    generation["pad_token_id"] = end_of_text
    generation["do_sample"] = False
    _write_json(folder / "config.json", hf_config(net.shape, ids))
    _write_json(folder / "generation_config.json", generation)
    save_file(to_hf(net), folder / "model.safetensors", {"format": "pt"})


def _write_json(path: Path, content: dict) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def load_net(folder: Path, model: str) -> Net:
    """Return a `Net` of the shape `model` with the weights of a finished model directory."""
    net = Net(SHAPES[model])
    from_hf(net, load_file(folder / "model.safetensors"))
    return net
