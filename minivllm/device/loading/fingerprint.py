"""Digests of the files of a model, by which stored pages of its KV cache are recognised."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

PATTERNS = ("config.json", "*quant*.json", "*.index.json", "*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
READERS = 8  # files that are read at a time
PIECE = 8 << 20


def model_files(folder: str) -> Mapping[str, str]:
    """Return the SHA-256 of each file of weights and configuration of a model, by name.  ``folder`` may be a GGUF
    file."""
    place = Path(folder)
    paths = {place} if place.is_file() else {path for pattern in PATTERNS for path in place.glob(pattern)}
    ordered = sorted(paths)
    with ThreadPoolExecutor(READERS) as pool:
        digests = pool.map(_digest_of, ordered)
        return {path.name: digest for path, digest in zip(ordered, digests, strict=True)}


def _digest_of(path: Path) -> str:
    state = path.stat()
    return _digest(str(path), state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1024)
def _digest(path: str, size: int, changed: int) -> str:
    """Return the SHA-256 of a file.  ``size`` and ``changed`` (ns) are keys of the cache."""
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            sha.update(piece)
    return sha.hexdigest()
