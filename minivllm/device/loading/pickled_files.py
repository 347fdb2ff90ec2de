"""Weights that ``torch.save`` wrote (``load_format = "pt"``), read with ``weights_only``, which runs no code of a file.

A file has the interface of an open safetensors file, so that readers handle both kinds alike.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm import files
from minivllm.errors import ModelError, brief, shown

SUFFIXES = (".bin", ".pt", ".pth")
INDEX = "pytorch_model.bin.index.json"
SINGLE = "pytorch_model.bin"
# files with these suffixes that training programs write next to the weights, and that are no weights
OTHERS = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state.*|random_states.*|trainer_state)\.(bin|pt|pth)"
)
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(bin|pt|pth)")
MOST_ELEMENTS = 1 << 40
# dtype -> its name in a safetensors header
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class _Said:
    """The shape and the dtype of a tensor, in the form of an open safetensors file's ``get_slice``."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return DTYPES[self.tensor.dtype]


class PickledFile:
    """The tensors of one pickled file, memory-mapped if its format allows it.  ModelError if the file contains other
    objects."""

    def __init__(self, path: Path) -> None:
        self.tensors = _checked(path, _loaded(path))

    def keys(self) -> Iterable[str]:
        return self.tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def get_slice(self, name: str) -> _Said:
        return _Said(self.tensors[name])


def _loaded(path: Path) -> Any:
    """Return the object that ``torch.save`` wrote to a file.  ModelError for a broken file, and for one that would run
    code."""
    files.check(path, error=ModelError)
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError) as exc:  # the format of torch before 1.6 cannot be mapped
            if "mmap" not in str(exc):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as exc:
        raise ModelError(f"{path}: {_refusal(str(exc))}") from None
    except Exception as exc:  # torch raises errors of many types for a broken file
        message = brief(" ".join(str(exc).split()) or type(exc).__name__, 200)
        raise ModelError(f"{path}: not a whole file of torch.save ({message}); download it again") from None


def _refusal(message: str) -> str:
    """Return the reason for which torch refused a file, made short from its ``message``."""
    if "Unsupported operand" in message:  # an operation that no file of torch.save contains
        return (
            "is damaged, or not written by torch.save with its usual pickle_protocol; use such a file, or a "
            "checkpoint in safetensors"
        )
    found = re.search(r"(?:GLOBAL|Unsupported class) ([\w.]+)", message)
    name = found[1].rstrip(".") if found else ""
    if name:
        return (
            f"asks to run {shown(name)}, and load_format='pt' runs nothing that a file names; expected tensors alone, "
            "or a checkpoint in safetensors"
        )
    return (
        "cannot be read without running what it names, which load_format='pt' never does "
        f"({brief(' '.join(message.split()), 160)}); expected tensors alone, or a checkpoint in safetensors"
    )


def _checked(path: Path, found: Any) -> dict[str, Tensor]:
    """Return the tensors by name.  ModelError for a content that is no mapping of names to plain tensors."""
    if not isinstance(found, Mapping):
        raise ModelError(f"{path}: holds a {type(found).__name__}; expected a mapping of names to tensors")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            what = f"{shown(name)} is a {type(tensor).__name__}"
            raise ModelError(f"{path}: {what}; expected a mapping of names to tensors (a state_dict by itself)")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES or tensor.is_meta:
            kind = f"{str(tensor.layout).removeprefix('torch.')} {str(tensor.dtype).removeprefix('torch.')}"
            raise ModelError(f"{path}: tensor {shown(name)} is {kind}; expected a dense tensor of numbers")
        if tensor.numel() > MOST_ELEMENTS:
            raise ModelError(
                f"{path}: tensor {shown(name)} has shape {list(tensor.shape)}, which exceeds the size of any model"
            )
    return {name: tensor.detach() for name, tensor in found.items()}


def pickled_names(folder: Path) -> list[str]:
    """Return the names of the files in a folder that may be weights of ``torch.save`` (*.bin, *.pt, *.pth)."""
    found = sorted(path.name for suffix in SUFFIXES for path in folder.glob(f"*{suffix}"))
    return [name for name in found if not OTHERS.fullmatch(name)]


def pickled_files(folder: Path) -> list[Path] | None:
    """Return the files of ``torch.save`` to read in a folder without an index: one file with all tensors, or all shards
    of one checkpoint.

    ModelError names a missing shard, or files among which the choice is ambiguous.  None means that the folder has
    none.
    """
    names = pickled_names(folder)
    if SINGLE in names:
        return [folder / SINGLE]
    if not names:
        return None
    shards = [match for name in names if (match := SHARD.fullmatch(name))]
    if not shards and len(names) == 1:
        return [folder / names[0]]
    sets = sorted({(match[1], match[3], match[4]) for match in shards})
    if len(sets) != 1 or len(shards) != len(names):
        raise ModelError(
            f"{folder}: cannot choose which of {', '.join(names[:4])} are the weights; expected {SINGLE}, {INDEX}, or "
            "the shards of one checkpoint alone"
        )
    stem, count, suffix = sets[0]
    wanted = [f"{stem}-{i:05d}-of-{count}.{suffix}" for i in range(1, int(count) + 1)]
    missing = next(_missing(wanted, names), None)
    if missing is not None:
        raise ModelError(f"{folder}: shard {missing} is missing; download it again")
    return [folder / name for name in wanted]


def _missing(wanted: Iterable[str], there: Iterable[str]) -> Iterator[str]:
    known = set(there)
    return (name for name in wanted if name not in known)
