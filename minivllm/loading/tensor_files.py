"""The safetensors files of a model directory: their tensors, what their headers say, what is wrong with them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from minivllm import files
from minivllm.errors import ModelError, shown
from minivllm.gguf_file import is_gguf

from .gguf import gguf_tensors

PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Header:
    """What a safetensors file says of a tensor before it is read."""

    path: Path
    shape: tuple[int, ...]
    name: str
    dtype: str  # as the format calls it: "F16", "I32"


def checkpoint_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in a Hugging Face directory, memory-mapped, file after file; or in a GGUF file."""
    if is_gguf(folder):
        yield from ((name, read()) for name, _, _, read in gguf_tensors(folder))
        return
    for path, expected in checkpoint_files(folder):
        with opened(path, expected) as file:
            for name in file.keys():  # noqa: SIM118  (a handle, not a dict; in the order of the file)
                yield name, file.get_tensor(name)


def checkpoint_headers(folder: Path) -> dict[str, Header]:
    """What the files of a Hugging Face directory, or a GGUF file, say of their tensors, by name."""
    if is_gguf(folder):
        return {name: Header(folder, shape, name, dtype) for name, shape, dtype, _ in gguf_tensors(folder)}
    found: dict[str, Header] = {}
    for path, expected in checkpoint_files(folder):
        with opened(path, expected) as file:
            for name in file.keys():  # noqa: SIM118
                said = file.get_slice(name)
                found.setdefault(name, Header(path, tuple(said.get_shape()), name, said.get_dtype()))
    return found


@contextlib.contextmanager
def opened(path: Path, expected: Sequence[str] | None = None) -> Iterator[Any]:
    """A safetensors file; ModelError if it is broken, or lacks a tensor that it is expected to have."""
    from safetensors import SafetensorError, safe_open

    files.check(path, error=ModelError)  # the library would wait for a FIFO, and call a pointer of Git LFS broken
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = set(file.keys())
            for name in expected or ():
                if name not in names:
                    raise ModelError(
                        f"{path}: lacks tensor {shown(name)}, which the index says is there; download it again"
                    )
            yield file
    except (SafetensorError, OSError) as e:
        raise ModelError(f"{path}: not a whole safetensors file ({e}); download it again") from None


def checkpoint_files(folder: Path) -> list[tuple[Path, list[str] | None]]:
    """The files to read, each with the tensor names that the index promises of it (None: no index)."""
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such model directory; want one with config.json and *.safetensors")
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if files.is_there(single):
        return [(single, None)]
    if not files.is_there(index):
        pickles = sorted(p.name for pattern in PICKLES for p in folder.glob(pattern))
        if pickles:
            raise ModelError(
                f"{folder}: only pickled weights ({pickles[0]}), which are never opened; convert to safetensors"
            )
        shards = sorted(p.name for p in folder.glob("*.safetensors"))
        hint = f"found {shards[0]} without {index.name}" if shards else "or use load_format='dummy'"
        raise ModelError(f"{folder}: no model.safetensors and no {index.name}; {hint}")
    shards_of: dict[str, list[str]] = {}
    listed = files.read_json(index, files.PART, ModelError)
    try:
        for name, shard in listed["weight_map"].items():
            shards_of.setdefault(shard, []).append(name)
    except (KeyError, TypeError, AttributeError) as e:
        raise ModelError(f"{index}: not an index of shards ({type(e).__name__}: {e}); download it again") from None
    found: list[tuple[Path, list[str] | None]] = []
    for shard, names in sorted(shards_of.items(), key=lambda item: str(item[0])):
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{index}: shard {shown(shard)}: want the name of a .safetensors file in the same folder")
        if not files.is_there(folder / shard):
            raise ModelError(f"{folder}: shard {shard} is missing; download it again")
        found.append((folder / shard, list(names)))
    return found
