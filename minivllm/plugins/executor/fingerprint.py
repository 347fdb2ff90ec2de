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
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import minivllm
from minivllm.core.interfaces.executor import Part, Wiring

LIBRARIES = ("torch", "transformers", "triton")
CODE = (".py", ".cpp", ".h")
SMALL = ("config.json", "generation_config.json", "*.index.json")
WEIGHTS, PICKLED = ("*.safetensors", "*.gguf"), ("*.bin", "*.pt", "*.pth")
PIECE = 64 << 10  # bytes of each of the three pieces that are read of a file of weights
RECEIVED = 4  # largest number of differences in a message
NONE = "none"


def fingerprint(wiring: Wiring) -> dict[str, str]:
    """Return the versions and files that all ranks must share, by a name such as "torch" or "model file
    config.json".
    """
    found = {"Python": f"{sys.version_info[0]}.{sys.version_info[1]}", "minivllm": minivllm.__version__}
    found |= {name: _version(name) for name in LIBRARIES}
    found["source of minivllm"] = _sources(Path(minivllm.__file__).parent)
    for name in sorted({part.target.partition(".")[0].partition(":")[0] for part in _parts(wiring)} - {"minivllm"}):
        found[f"plug-in package {name}"] = _package(name)
    weights = {"dummy": (), "pt": PICKLED}.get(wiring.load_format, WEIGHTS)
    models = [("model", wiring.model_dir), *((f"model of {who}", folder) for who, folder in _own_models(wiring))]
    for of, folder in models:
        found |= {f"{of} file {name}": digest for name, digest in _model(Path(folder), weights)}
    return found


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Describe how ``other`` differs from the fingerprint of rank 0, "" if they are equal."""
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    words = [f"{name} is {other.get(name, NONE)}, and rank 0 has {first.get(name, NONE)}" for name in names[:RECEIVED]]
    return "; ".join(words) + (f"; and {len(names) - RECEIVED} more" if len(names) > RECEIVED else "")


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
    files = sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(CODE))
    return _digest(piece for path in files for piece in (os.path.relpath(path, folder).encode(), _read(path)))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as e:  # the file was deleted, or may not be read
        return f"{type(e).__name__}".encode()


def _package(name: str) -> str:
    """Return a digest of a package or module, which is not imported."""
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
    if folder.is_file():  # GGUF
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
