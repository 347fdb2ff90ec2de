"""Find and read the files of weights in a model directory, and report faulty files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from minivllm import files
from minivllm.device.loading.gguf_file import is_gguf
from minivllm.errors import ModelError, brief, shown

from .gguf import gguf_tensors
from .pickled_files import INDEX as PICKLED_INDEX
from .pickled_files import SUFFIXES, PickledFile, pickled_files, pickled_names


@dataclass(frozen=True)
class Header:
    """The file, name, shape and dtype of a tensor in a checkpoint, which are read without the tensor."""

    path: Path
    shape: tuple[int, ...]
    name: str
    dtype: str  # as safetensors files name it, such as "F16" or "I32"


def checkpoint_tensors(folder: Path, pickled: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor in a Hugging Face directory or a GGUF file, memory-mapped, file after file.

    ``pickled`` is described at ``checkpoint_files``.
    """
    if is_gguf(folder):
        yield from ((name, read()) for name, _, _, read in gguf_tensors(folder))
        return
    for path, expected in checkpoint_files(folder, pickled):
        with opened(path, expected) as file:
            for name in file.keys():  # noqa: SIM118  (a handle, not a dict; in the order of the file)
                yield name, file.get_tensor(name)


def checkpoint_headers(folder: Path, pickled: bool = False) -> dict[str, Header]:
    """Return the headers of the tensors in a Hugging Face directory or a GGUF file, by name.

    ``pickled`` is described at ``checkpoint_files``.
    """
    if is_gguf(folder):
        return {name: Header(folder, shape, name, dtype) for name, shape, dtype, _ in gguf_tensors(folder)}
    found: dict[str, Header] = {}
    for path, expected in checkpoint_files(folder, pickled):
        with opened(path, expected) as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                found.setdefault(name, Header(path, tuple(tensor.get_shape()), name, tensor.get_dtype()))
    return found


def file_stamps(folder: Path, pickled: bool = False) -> dict[Path, tuple[int, int, int]]:
    """Return (size, modification time in ns, inode) of each file of weights.

    ``check_unchanged`` compares the result to find a file that was written or replaced.  A missing file has no entry.
    ``pickled`` lists the files of ``torch.save`` instead of safetensors.
    """
    paths = [folder] if is_gguf(folder) else [path for path, _ in checkpoint_files(folder, pickled)]
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            found[path] = stat.st_size, stat.st_mtime_ns, stat.st_ino
    return found


def check_unchanged(before: Mapping[Path, tuple[int, int, int]]) -> None:
    """Raise ModelError if a file has changed since ``file_stamps`` returned ``before``."""
    for path, stamp in before.items():
        try:
            stat = path.stat()
            now = stat.st_size, stat.st_mtime_ns, stat.st_ino
        except OSError:
            now = (-1, -1, -1)
        if now != stamp:
            raise ModelError(f"{path}: was changed while it was loaded; start again when it is complete")


@contextlib.contextmanager
def opened(path: Path, expected: Sequence[str] | None = None) -> Iterator[Any]:
    """Open a file of weights.  ModelError if it is broken, or lacks one of the tensors ``expected``."""
    from safetensors import SafetensorError, safe_open

    if path.suffix in SUFFIXES:
        yield _with(PickledFile(path), path, expected)
        return
    # checked first, because the library would wait for a FIFO, and report a pointer file of Git LFS as broken
    files.check(path, error=ModelError)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield _with(file, path, expected)
    except (SafetensorError, OSError) as e:
        why = brief(str(e), 300)  # the library quotes names and values of the file, of any length
        raise ModelError(f"{path}: not a whole safetensors file ({why}); download it again") from None


def _with(file: Any, path: Path, expected: Sequence[str] | None) -> Any:
    """Return ``file``, an open file of weights.  ModelError if it lacks one of the ``expected`` tensors."""
    names = set(file.keys())
    for name in expected or ():
        if name not in names:
            raise ModelError(f"{path}: lacks tensor {shown(name)}, which the index lists; download it again")
    return file


def checkpoint_files(folder: Path, pickled: bool = False) -> list[tuple[Path, list[str] | None]]:
    """Return the files of weights in a folder, each with the tensor names that the index lists for it, or None without
    an index.

    ``pickled`` selects the files of ``torch.save``, otherwise safetensors are read.  ModelError for missing files.
    """
    if not os.path.isdir(folder):
        raise ModelError(f"{folder}: no such model directory; expected one with config.json and *.safetensors")
    if pickled:
        return _pickled(folder)
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if files.is_there(single):
        return [(single, None)]
    if files.is_there(index):
        return _indexed(folder, index, (".safetensors",))
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    hint = f"found {shards[0]} without {index.name}; download it too" if shards else "or use load_format='dummy'"
    if not shards and (names := pickled_names(folder)):
        hint = f"only weights of torch.save ({names[0]}), which load_format='pt' reads without running what they name"
    raise ModelError(f"{folder}: no model.safetensors and no {index.name}; {hint}")


def _pickled(folder: Path) -> list[tuple[Path, list[str] | None]]:
    index = folder / PICKLED_INDEX
    if files.is_there(index):
        return _indexed(folder, index, SUFFIXES)
    found = pickled_files(folder)
    if found is None:
        there = any(folder.glob("*.safetensors"))
        hint = (
            "its weights are safetensors, which load_format='auto' reads" if there else "expected *.bin, *.pt or *.pth"
        )
        raise ModelError(f"{folder}: load_format='pt', but there is no file of torch.save; {hint}")
    return [(path, None) for path in found]


def _indexed(folder: Path, index: Path, suffixes: tuple[str, ...]) -> list[tuple[Path, list[str] | None]]:
    shards_of: dict[str, list[str]] = {}
    listed = files.read_json(index, files.PART, ModelError)
    where = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(where, dict):
        raise ModelError(
            f"{index}: not an index of shards: expected an object with the object weight_map, of the file of each "
            "tensor; download it again"
        )
    for name, shard in where.items():
        if not isinstance(shard, str):
            raise ModelError(f"{index}: the shard of {shown(name)} is {shown(shard)}: expected the name of a file")
        shards_of.setdefault(shard, []).append(name)
    found: list[tuple[Path, list[str] | None]] = []
    for shard, names in sorted(shards_of.items()):
        if Path(shard).name != shard or not shard.endswith(suffixes):
            raise ModelError(
                f"{index}: shard {shown(shard)}: expected the name of a {' or '.join(suffixes)} file in the same folder"
            )
        if not files.is_there(folder / shard):
            raise ModelError(f"{folder}: shard {brief(shard)} is missing; download it again")
        found.append((folder / shard, list(names)))
    return found
