"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), read by the package ``gguf``: what they say
of a model, and its tensors, mapped into memory.

Every function raises ModelError with the file's name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minivllm import files
from minivllm.errors import ModelError, ResourceError, shown, told

SUFFIX = ".gguf"
VERSIONS = (2, 3)
MAGIC = b"GGUF"


class GgufTensor(NamedTuple):
    """``shape`` is rows first, as torch has it; ``data`` numpy: of F32 and F16 as ``shape`` says, else u8 [rows, bytes
    of a row]."""

    kind: str  # "F32", "F16", "BF16", "Q4_K" ...
    shape: tuple[int, ...]
    data: Any


class GgufFile(NamedTuple):
    path: Path
    values: Mapping[str, Any]  # "llama.block_count" -> a number, a text, or a list of them
    tensors: Mapping[str, GgufTensor]

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")

    @property
    def architecture(self) -> str:
        found = self.values.get("general.architecture")
        if not isinstance(found, str):
            raise self.refuse("names no general.architecture; want a whole GGUF file of a model")
        return found

    def of_model(self, key: str, default: Any = None) -> Any:
        """A value by its name without the architecture's."""
        return self.values.get(f"{self.architecture}.{key}", default)


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a model is named that is one file of this format."""
    name = os.fspath(path)
    return name.lower().endswith(SUFFIX) and os.path.isfile(name)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """The file; once, as long as it does not change: a vocabulary takes a second."""
    files.check(path, error=ModelError)
    found = os.stat(path)
    return _read(os.fspath(path), found.st_size, found.st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read(path: str, size: int, changed: int) -> GgufFile:
    try:
        import gguf
    except ImportError:
        raise ResourceError(
            f"{path}: is a GGUF file, which the package gguf reads; install it with pip install 'minivllm[gguf]'"
        ) from None
    with open(path, "rb") as file:
        head = file.read(8)
    if head[:4] != MAGIC:
        raise ModelError(f"{path}: not a GGUF file: it begins with {shown(head[:4])}, want {shown(MAGIC)}")
    version = int.from_bytes(head[4:8], "little")
    if version not in VERSIONS:
        other = ", or its bytes are in another order" if version > 1 << 16 else ""
        raise ModelError(f"{path}: GGUF of version {version}{other}: want {' or '.join(map(str, VERSIONS))}")
    try:
        reader = gguf.GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = {t.name: _tensor(t) for t in reader.tensors}
    except Exception as e:  # what a file that ends early makes of numpy is of many kinds
        raise ModelError(f"{path}: not a whole GGUF file ({told(e)}); download it again") from e
    return GgufFile(Path(path), values, tensors)


def _tensor(found: Any) -> GgufTensor:
    return GgufTensor(found.tensor_type.name, tuple(int(n) for n in reversed(found.shape)), found.data)
