"""Digests of the files of a model and of the code that computes it, by which stored pages of its KV cache are
recognised."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

PATTERNS = ("config.json", "*quant*.json", "*.index.json", "*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
CODE = (".py", ".cpp", ".h", ".so")
OWN = ("device", "plugins")  # folders of minivllm whose code computes keys and values
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


@lru_cache(maxsize=4096)
def _digest(path: str, size: int, changed: int) -> str:
    """Return the SHA-256 of a file.  ``size`` and ``changed`` (ns) are keys of the cache."""
    sha = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(PIECE):
            sha.update(piece)
    return sha.hexdigest()


def code_of(targets: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the code of each package that an import target ("package.module:Class") names.  Of
    minivllm, these are the folders in ``OWN``."""
    packages = {target.partition(":")[0].partition(".")[0] for target in targets}
    return {name: _code(name) for name in sorted({"minivllm", *packages})}


@lru_cache(maxsize=64)
def _code(package: str) -> str:
    """Return the SHA-256 of the files of a package or module, which is not imported."""
    spec = importlib.util.find_spec(package)
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    if origin is None:
        return "unknown"
    folder = origin.parent
    paths = [origin]
    if spec is not None and spec.submodule_search_locations:
        roots = [folder / name for name in OWN] if package == "minivllm" else [folder]
        paths = sorted(path for root in roots for path in root.rglob("*") if path.suffix in CODE)
    sha = hashlib.sha256()
    for path in paths:
        sha.update(str(path.relative_to(folder)).encode() + _digest_of(path).encode())
    return sha.hexdigest()
