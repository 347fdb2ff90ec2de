"""Digests of the files of a model and of the code that computes it, by which stored pages of its KV cache are
recognised."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from minivllm.registration import given

PATTERNS = ("config.json", "*quant*.json", "*.index.json", "*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth")
OF_PROCESSOR = ("*processor*.json",)
CODE = (".py", ".cpp", ".h", ".cu", ".so")
OWN = ("device", "plugins")  # folders of minivllm whose code affects keys and values
READERS = 8  # files that are read at a time
PIECE = 8 << 20
UNREADABLE = os.urandom(16).hex()  # random replacement for the hash of code without source


def model_files(folder: str) -> Mapping[str, str]:
    """Return the SHA-256 of each file of weights and configuration of a model, by name.  ``folder`` may be a GGUF
    file."""
    return _digests(folder, PATTERNS)


def processor_files(folder: str) -> Mapping[str, str]:
    """Return the SHA-256 of each file with the configuration of a model's image processor, by name."""
    return _digests(folder, OF_PROCESSOR)


def _digests(folder: str, patterns: Iterable[str]) -> Mapping[str, str]:
    """Return the SHA-256 of each file of a folder whose name matches one of ``patterns``, by name.  ``folder`` may be a
    file, which counts as matching."""
    place = Path(folder)
    paths = {place} if os.path.isfile(place) else {path for pattern in patterns for path in place.glob(pattern)}
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
    """Return the SHA-256 of the code of each package that an import target ("package.module:Class") names, with the
    distributions that installed it.  Of minivllm, these are the folders in ``OWN``.

    A class that the program passed has the hash of its source.  Without a source that is a number of this process, so
    that no later process has the same code."""
    found = {"minivllm": _code("minivllm")}
    for target in sorted(set(targets)):
        passed = given.find(target)
        if passed is not None:
            found[passed.name] = passed.source.hash or UNREADABLE
            continue
        package = target.partition(":")[0].partition(".")[0]
        if package not in found:
            found[package] = " ".join([_code(package), *_distributions(package)])
    return found


@lru_cache(maxsize=64)
def _distributions(package: str) -> tuple[str, ...]:
    """Return the names and versions of the distributions that installed a package."""
    names = sorted(set(metadata.packages_distributions().get(package, ())))
    return tuple(f"{name}=={metadata.version(name)}" for name in names)


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """Return the version of each installed distribution, "" for one that is not installed."""
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


@lru_cache(maxsize=64)
def _code(package: str) -> str:
    """Return the SHA-256 of the files of a package or module, which is not imported."""
    sha = hashlib.sha256()
    for root in _roots(package):
        found = sorted(path for path in root.rglob("*") if path.suffix in CODE) if os.path.isdir(root) else [root]
        for path in found:
            sha.update(str(path.relative_to(root.parent)).encode() + _digest_of(path).encode())
    return sha.hexdigest()


def _roots(package: str) -> list[Path]:
    """Return the folders of a package, or the file of a module."""
    if package == "__main__":
        file = getattr(sys.modules[package], "__file__", None)
        return [] if file is None else [Path(file)]
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if package == "minivllm":
        return [folder / name for folder in folders for name in OWN]
    if folders or spec.origin is None or not spec.has_location:
        return folders
    return [Path(spec.origin)]
