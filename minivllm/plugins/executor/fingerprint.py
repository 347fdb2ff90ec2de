"""A rank's fingerprint of versions, sources and model files, which finds ranks that would compute different results.

A rank sends ``fingerprint`` as its first message, and the process that started the ranks compares them
(``differences``).  It takes about 50 ms, because no library is imported for it.  Of a file of weights only the size,
the beginning, the middle and the end are read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import minivllm
from minivllm.core.interfaces.executor import Part, Wiring

LIBRARIES = ("torch", "transformers", "triton")
CODE = (".py", ".cpp", ".h")
SMALL = ("config.json", "generation_config.json", "*.index.json")
WEIGHTS, PICKLED = ("*.safetensors", "*.gguf"), ("*.bin", "*.pt", "*.pth")
PIECE = 64 << 10  # bytes of each piece; three pieces of a file of weights are read
RECEIVED = 4  # an error message names at most this many differences
NONE = "none"


def fingerprint(wiring: Wiring) -> dict[str, str]:
    """Return the versions and files that all ranks must share, by a name such as "torch" or "model file
    config.json".
    """
    found = {"Python": f"{sys.version_info[0]}.{sys.version_info[1]}", "minivllm": minivllm.__version__}
    found |= {name: _version(name) for name in LIBRARIES}
    found["source of minivllm"] = _sources(Path(minivllm.__file__).parent)
    packages = {re.split(r"[.:]", part.target)[0] for part in _parts(wiring)}
    for name in sorted(packages - {"minivllm"}):
        found[f"plug-in package {name}"] = _package(name)
    weights = {"dummy": (), "pt": PICKLED}.get(wiring.load_format, WEIGHTS)
    models = [("model", wiring.model_dir)]
    models += [(f"model of {who}", folder) for who, folder in _own_models(wiring)]
    for of, folder in models:
        for name, digest in _model(Path(folder), weights):
            found[f"{of} file {name}"] = digest
    return found


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Describe how ``other`` differs from the fingerprint of rank 0, "" if they are equal."""
    words = []
    for name in {**first, **other}:
        here = other.get(name, NONE)
        there = first.get(name, NONE)
        if here != there:
            words.append(f"{name} is {here}, and rank 0 has {there}")
    more = len(words) - RECEIVED
    if more > 0:
        words[RECEIVED:] = [f"and {more} more"]
    return "; ".join(words)


def _parts(wiring: Wiring) -> Iterator[Part]:
    yield from wiring.parts.values()
    yield from wiring.processors
    for model in filter(None, (wiring.speculation.draft_model, *wiring.own_models.values())):
        yield from model.parts.values()


def _own_models(wiring: Wiring) -> Iterator[tuple[str, str]]:
    if wiring.speculation.draft_model is not None:
        yield "the drafter", wiring.speculation.draft_model.model_dir
    for name, model in wiring.own_models.items():
        yield name, model.model_dir


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NONE


def _digest(pieces: Iterable[bytes]) -> str:
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(len(piece).to_bytes(8, "little") + piece)
    return sha.hexdigest()[:12]


def _sources(folder: Path) -> str:
    """Return a digest of the names and bytes of the files of code in a folder and its subfolders."""
    files = []
    for at, _, names in os.walk(folder):
        files += [os.path.join(at, name) for name in names if name.endswith(CODE)]
    pieces = []
    for path in sorted(files):
        name = os.path.relpath(path, folder)
        pieces += [name.encode(), _read(path)]
    return _digest(pieces)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:  # the file was deleted, or may not be read
        return f"{type(e).__name__}".encode()


def _package(name: str) -> str:
    """Return a digest of the source files of a package or module, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return NONE
    if spec.submodule_search_locations:
        return _digest(_sources(Path(folder)).encode() for folder in spec.submodule_search_locations)
    return _digest([_read(spec.origin)]) if spec.origin and os.path.isfile(spec.origin) else "unknown"


def _model(folder: Path, weights: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if os.path.isfile(folder):  # GGUF
        yield folder.name, _sampled(folder)
        return
    for path in sorted(path for pattern in SMALL for path in folder.glob(pattern)):
        yield path.name, _digest([_read(str(path))])
    for path in sorted(path for pattern in weights for path in folder.glob(pattern)):
        yield path.name, _sampled(path)


def _sampled(path: Path) -> str:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            pieces = []
            for at in (0, size // 2, max(0, size - PIECE)):
                file.seek(at)
                pieces.append(file.read(PIECE))
    except OSError as e:
        return f"unreadable ({e.strerror})"
    return f"{_digest(pieces)} of {size} bytes"
