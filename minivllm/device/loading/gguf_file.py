"""GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), with metadata and tensors mapped into memory.

A file may be hostile.  Each count in its header is compared with the remaining bytes before memory is allocated, so the
size of the file and the limits below bound the time and memory that a header takes.  The package ``gguf`` is used only
for the block sizes of tensor types, because it takes 40 s for the header of a vocabulary of 128,000 tokens.

Every function raises ModelError with the file's name.
"""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from minivllm import files
from minivllm.errors import ModelError, ResourceError, shown

SUFFIX = ".gguf"
VERSIONS = (2, 3)
MAGIC = b"GGUF"
# limits of a header, several times the values of the largest published files
MOST_KEYS = 1 << 16
MOST_TENSORS = 1 << 18
# largest number of strings in all arrays of a file; a vocabulary of 262,144 tokens has about 800,000 with its merges
MOST_STRINGS = 1 << 22
MOST_TEXT = 1 << 28  # largest number of bytes of all strings of a file together
MOST_DIMS = 4
LISTED = 1 << 12  # arrays of at most this many numbers become lists; longer ones stay in the mapped file
ALIGNMENT = 32  # alignment of tensors in bytes if the file has no general.alignment
# texts of tokens that end an answer, as in llama.cpp, because many files name only one end token
END_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>",
})  # fmt: skip
STRING = 8
ARRAY = 9
BOOL = 7
CONTROL = 3  # tokenizer.ggml.token_type of control tokens, which never come from text
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
NUMPY = {"F32": "<f4", "F16": "<f2"}  # tensor type without blocks -> dtype of numpy


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file.  ``shape`` has the rows first, as in torch.  ``data`` is a numpy array: F32 and F16 have
    ``shape``, other types are u8 [rows, bytes of a row]."""

    kind: str  # type of the elements or blocks: "F32", "F16", "BF16", "Q4_K" ...
    shape: tuple[int, ...]
    data: Any


class GgufFile(NamedTuple):
    path: Path
    values: Mapping[str, Any]  # key such as "llama.block_count" -> number, text, list, or numpy array of many numbers
    tensors: Mapping[str, GgufTensor]

    def refuse(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}")

    @property
    def architecture(self) -> str:
        found = self.values.get("general.architecture")
        if not isinstance(found, str):
            raise self.refuse("names no general.architecture; expected a whole GGUF file of a model")
        return found

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return the metadata under "<architecture>.<key>", or ``default`` if the file lacks it."""
        return self.values.get(f"{self.architecture}.{key}", default)

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end an answer.

        Ids that the file names are first, then tokens with a text in ``END_TEXTS``, then "</s>" if it is a control
        token.
        """
        tokens, kinds = (self.values.get(f"tokenizer.ggml.{name}", []) for name in ("tokens", "token_type"))
        tokens = tokens if isinstance(tokens, list) else []  # other values are refused when the vocabulary is read
        kinds = kinds if isinstance(kinds, list) or hasattr(kinds, "tolist") else []
        named = [self.values.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
        found = [i for i in named if type(i) is int]
        found += {token: i for i, token in enumerate(tokens) if token in END_TEXTS}.values()
        tag = tokens.index("</s>") if "</s>" in tokens else len(kinds)
        found += [tag] if tag < len(kinds) and kinds[tag] == CONTROL else []
        return tuple(dict.fromkeys(found))


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a GGUF file, by its suffix."""
    name = os.fspath(path)
    return name.lower().endswith(SUFFIX) and os.path.isfile(name)


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read the header of a file and map its tensors.  A file that has not changed is read once."""
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
    with files.opened(path, None, ModelError) as file:
        head = file.read(8)
        if head[:4] != MAGIC:
            raise ModelError(f"{path}: not a GGUF file: it begins with {shown(head[:4])}, expected {shown(MAGIC)}")
        version = int.from_bytes(head[4:8], "little")
        if version not in VERSIONS:
            other = ", or its bytes are in another order" if version > 1 << 16 else ""
            raise ModelError(f"{path}: GGUF of version {version}{other}: expected {' or '.join(map(str, VERSIONS))}")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    sizes = {int(kind): (kind.name, *block) for kind, block in gguf.GGML_QUANT_SIZES.items()}
    try:
        header = _Header(data)
        return GgufFile(Path(path), *header.read(sizes))
    except (Broken, struct.error) as e:
        why = e if isinstance(e, Broken) else "it ends within a number"
        raise ModelError(f"{path}: not a whole GGUF file ({why}); download it again") from None


class Broken(ValueError):
    """The error of a header that contradicts itself or the size of its file."""


class _Header:
    """A reader of the header of a GGUF file: ``data`` are the bytes of the file, ``at`` is the offset of the next
    value."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 8
        self.strings = 0  # number of the strings read so far
        self.text = 0  # bytes of the strings read so far

    def read(self, sizes: Mapping[int, tuple[str, int, int]]) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Return the metadata by key, and the tensors by name.

        ``sizes`` maps the id of a tensor type to (name, elements of a block, bytes of a block).
        """
        tensors = self._unpack("<Q")
        keys = self._unpack("<Q")
        self._fits("tensors", tensors, 24, MOST_TENSORS)  # an entry has at least 24 bytes
        self._fits("keys", keys, 13, MOST_KEYS)
        values: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string("a key")
            if key in values:
                raise Broken(f"key {shown(key)} is there twice")
            values[key] = self._value(self._unpack("<I"), key)
        table = [self._entry() for _ in range(tensors)]
        alignment = values.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16 or alignment & (alignment - 1):
            raise Broken(f"general.alignment={shown(alignment)}: expected a power of two up to {1 << 16}")
        return values, self._tensors(table, -(-self.at // alignment) * alignment, sizes)

    def _unpack(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def _fits(self, what: str, count: int, least: int, most: int | None) -> None:
        """Raise ``Broken`` if the rest of the file cannot hold ``count`` items of at least ``least`` bytes, or
        ``count`` exceeds ``most``."""
        if most is not None and count > most:
            raise Broken(f"the header has {count} {what}: expected at most {most}")
        if count * least > len(self.data) - self.at:
            raise Broken(f"the header announces {count} {what}, but only {len(self.data) - self.at} bytes follow")

    def _string(self, what: str) -> str:
        size = self._unpack("<Q")
        begin = self.at
        self.text += size
        if self.text > MOST_TEXT:
            raise Broken(f"it has more than {MOST_TEXT >> 20} MiB of text")
        self._fits(f"bytes of {what}", size, 1, MOST_TEXT)
        self.at += size
        try:
            return self.data[begin : self.at].decode()
        except UnicodeDecodeError:
            raise Broken(f"{what} is not UTF-8") from None

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string(key)
        if kind != ARRAY:
            if kind not in FORMATS:
                raise Broken(f"{shown(key)} is of type {kind}, which the format does not have")
            value = self._unpack(FORMATS[kind])
            return bool(value) if kind == BOOL else value
        kind = self._unpack("<I")
        count = self._unpack("<Q")
        if kind == STRING:
            return self._strings(count, key)
        if kind not in SCALARS:
            raise Broken(f"{shown(key)} is an array of type {kind}; expected numbers or strings")
        import numpy as np

        dtype = np.dtype(SCALARS[kind])
        self._fits(f"numbers of {shown(key)}", count, dtype.itemsize, None)
        found = np.frombuffer(self.data, dtype, count, self.at)
        self.at += count * dtype.itemsize
        found = found.view(np.bool_) if kind == BOOL else found
        return found.tolist() if count <= LISTED else found

    def _strings(self, count: int, key: str) -> list[str]:
        """Read an array of ``count`` strings.  This loop takes most of the time of reading a header."""
        self.strings += count
        self._fits(f"strings of {shown(key)}", self.strings, 0, MOST_STRINGS)
        self._fits(f"strings of {shown(key)}", count, 8, MOST_STRINGS)
        data = self.data
        at = self.at
        length = struct.Struct("<Q")
        found = []
        first = at
        try:
            for _ in range(count):
                (size,) = length.unpack_from(data, at)
                end = at + 8 + size
                if end > len(data) or end - first > MOST_TEXT:
                    raise Broken(f"a string of {shown(key)} has a length of {size} bytes")
                found.append(data[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError:
            raise Broken(f"string {len(found)} of {shown(key)} is not UTF-8") from None
        self.at = at
        self.text = self.text + at - first
        return found

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the header's entry of a tensor: (name, shape, id of its type, offset in bytes from the end of the
        header)."""
        name = self._string("the name of a tensor")
        dims = self._unpack("<I")
        if dims > MOST_DIMS:
            raise Broken(f"tensor {shown(name)} has {dims} dimensions; expected at most {MOST_DIMS}")
        shape = tuple(reversed([self._unpack("<Q") for _ in range(dims)]))
        return name, shape, self._unpack("<I"), self._unpack("<Q")

    def _tensors(
        self, table: list[tuple[str, tuple[int, ...], int, int]], start: int, sizes: Mapping[int, tuple[str, int, int]]
    ) -> dict[str, GgufTensor]:
        found: dict[str, GgufTensor] = {}
        end = 0  # offset behind the previous tensor; tensors must not overlap, so the file bounds their total size
        for name, shape, number, offset in sorted(table, key=lambda entry: entry[3]):
            if name in found:
                raise Broken(f"tensor {shown(name)} is there twice")
            if number not in sizes:
                raise Broken(f"tensor {shown(name)} is of type {number}, which this version of gguf does not support")
            if 0 in shape:
                raise Broken(f"tensor {shown(name)} has shape {list(shape)}; expected no dimension of 0")
            kind, count, width = sizes[number]
            if shape and shape[-1] % count:
                raise Broken(f"tensor {shown(name)} of {kind} has rows of {shape[-1]}; expected multiples of {count}")
            bytes_ = math.prod(shape) // count * width
            if offset < end or start + offset + bytes_ > len(self.data):
                where = "overlaps another" if offset < end else "goes beyond the end of the file"
                raise Broken(f"tensor {shown(name)}, {bytes_} bytes at {offset}, {where}")
            found[name] = GgufTensor(kind, shape, self._mapped(kind, shape, start + offset, bytes_))
            end = offset + bytes_
        return {name: found[name] for name, *_ in table}

    def _mapped(self, kind: str, shape: tuple[int, ...], at: int, size: int) -> Any:
        import numpy as np

        if kind in NUMPY:
            dtype = np.dtype(NUMPY[kind])
            return np.frombuffer(self.data, dtype, size // dtype.itemsize, at).reshape(shape)
        rows = math.prod(shape[:-1])
        return np.frombuffer(self.data, np.uint8, size, at).reshape(*shape[:-1], size // rows if rows else 0)
