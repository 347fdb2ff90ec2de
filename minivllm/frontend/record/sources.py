"""What code and what weights a run used: hashes of the source of plug-ins, of minivllm itself, and of a model.

The source of a plug-in is its module with what that imports of its own package, the modules of base classes wherever
they are, and data files below its folder that it names (found by reading, nothing is run), so that a change in a helper
counts and a change in another plug-in of the same package does not.  Built-ins follow imports
within ``minivllm.plugins`` only: all else of minivllm is one hash of its own.  A hash covers module names and bytes, no
paths and no times: the same code gives the same hash on every machine.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .data_files import data_files
from .machine import LIBRARIES

PLUGINS = "minivllm.plugins"
CODE = (".py", ".cpp", ".h")
# folders of minivllm that run no model, or have a hash of their own: not in its hash
APART = ("plugins", "pocket", "frontend/record", "testing")
WHOLE = 64 * 2**20  # bytes; a larger weight file is sampled
LARGEST = 512 * 2**20  # bytes; a larger file of any kind is
HEADER = 100 * 10**6  # bytes that the header of a file of weights may have (safetensors' own limit)
PLACES = 1024  # of a sampled file that is not known by its tensors
PIECE = 16 * 2**10  # bytes read at the start, the middle and the end of each tensor of such a file
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
             "*.model", "*.tiktoken")  # fmt: skip


@dataclass(frozen=True)
class Source:
    """``files`` maps module (or file) names to the start of their SHA-256; ``hash`` covers them all, "" if there is no
    source to hash, for the reason in ``missing``; beside a hash ``missing`` says what it does not cover.  ``newest`` is
    when a file was changed last, in seconds of Unix time; ``texts`` are lines of classes that a program gave."""

    hash: str
    files: Mapping[str, str] = field(default_factory=dict)
    newest: float = 0.0
    missing: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)


def plugin_source(target: str) -> Source:
    """The source behind ``module:Class``."""
    module = target.partition(":")[0]
    scope = _Scope(module)
    found: dict[str, tuple[str, float]] = {}
    todo = [module]
    while todo:
        current = todo.pop()
        if current in found or (located := _locate(current)) is None:
            continue
        data, when = located
        found[current] = (sha(data), when)
        found |= {f"{current}:{name}": known for name, known in beside(_file(current), data)}
        todo += [m for m in _imports(current, data) if m not in found and scope.has(m)]
        todo += [m for m in bases(current, data) if m not in found and scope.may_extend(m)]
    if module not in found:
        return Source("", missing=f"{module} has no source file")
    return _source(found)


def package_source() -> Source:
    """The source of minivllm itself, that of its native part too, without the plug-ins."""
    root = Path(__file__).parents[2]
    found = [p for p in root.rglob("*") if p.suffix in CODE]
    apart = [root / folder for folder in APART]
    files = sorted(p for p in found if not any(p.is_relative_to(folder) for folder in apart))
    return _source({_posix(p, root): (sha(p.read_bytes()), p.stat().st_mtime) for p in files})


def model_identity(folder: Path, weights: bool = True, pickled: bool = False) -> Source:
    """Return the identity of a model: its weights, ``config.json`` and ``generation_config.json``.

    Files of more than 64 MiB are sampled, so that it takes a second and not a minute: their header, and start, middle
    and end of each tensor.  ``pickled`` says that the weights are files of ``torch.save``."""
    names = [folder / "config.json", folder / "generation_config.json"]
    suffixes = (".bin", ".pt", ".pth") if pickled else (".safetensors",)
    names += sorted(p for suffix in suffixes for p in folder.glob("*" + suffix)) if weights else []
    names = [folder] if folder.is_file() else names  # GGUF
    return _source({p.name: (_sha_file(p), p.stat().st_mtime) for p in names if p.is_file()})


def tokenizer_identity(folder: Path) -> Source:
    """The files that make token ids of text."""
    files = {p for pattern in TOKENIZER for p in folder.glob(pattern) if p.is_file()}
    return _source({p.name: (_sha_file(p), p.stat().st_mtime) for p in sorted(files)})


def digest(value: object) -> str:
    """SHA-256 of a JSON value, independent of the order of its keys."""
    return sha(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode())


def known_without(module: str) -> bool:
    """Whether a record knows the code of a module by the version of what it belongs to."""
    if module == PLUGINS or module.startswith(PLUGINS + "."):
        return False
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("minivllm", "pydantic", *LIBRARIES)


class _Scope:
    """Which imports belong to a plug-in: those of its own package, of the built-in plug-ins, and, for a module outside
    site-packages (an experiment), those of files that lie beside it."""

    def __init__(self, module: str) -> None:
        self.top = module.partition(".")[0]
        file = _file(self.top)
        beside = file.parent if file is not None and file.name != "__init__.py" else file.parents[1] if file else None
        installed = beside is None or any(p in ("site-packages", "dist-packages") for p in beside.parts)
        self.beside = None if installed or self.top == "minivllm" else beside

    def has(self, module: str) -> bool:
        if module == PLUGINS or module.startswith(PLUGINS + "."):
            return True
        top = module.partition(".")[0]
        if top == "minivllm" or top in sys.stdlib_module_names:
            return False
        if top == self.top:
            return True
        file = _file(top) if self.beside is not None else None
        return file is not None and self.beside in (file.parent, file.parents[1])

    def may_extend(self, module: str) -> bool:
        """Whether a base class in another package is hashed: minivllm and the libraries that a record names by their
        versions are known without."""
        top = module.partition(".")[0]
        return top != "minivllm" and not known_without(module)


def bases(module: str, data: bytes) -> Iterator[str]:
    """The modules that base classes of a module's classes are defined in, where packages hand names on too."""
    tree = _parsed(data)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                yield from _defined_in(module, ast.unparse(base).partition("[")[0], tree)


def _defined_in(module: str, name: str, tree: ast.Module | None, seen: set[str] | None = None) -> Iterator[str]:
    """Of a dotted name as ``module`` knows it; each name of a module is looked at once."""
    seen = set() if seen is None else seen
    if f"{module}:{name}" in seen:
        return
    seen.add(f"{module}:{name}")
    first, _, rest = name.partition(".")
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                if first == (alias.asname or alias.name.partition(".")[0]):
                    path = name if alias.asname is None else f"{alias.name}.{rest}"
                    yield from _class_at(path.rpartition(".")[0], path.rpartition(".")[2], seen)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                at = _absolute(module, node)
                if alias.name == "*":
                    yield from _class_at(at, name, seen)
                elif first == (alias.asname or alias.name):
                    if rest:  # the name is a module
                        yield from _class_at(f"{at}.{alias.name}", rest, seen)
                    else:
                        yield from _class_at(at, alias.name, seen)
        elif isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == first for t in node.targets):
            other = f"{ast.unparse(node.value).partition('[')[0]}{'.' * bool(rest)}{rest}"
            if other.replace(".", "").isidentifier():  # another name of it
                yield from _defined_in(module, other, tree, seen)


def _class_at(module: str, name: str, seen: set[str]) -> Iterator[str]:
    if not module or (located := _locate(module)) is None:
        return
    yield module
    tree = _parsed(located[0])
    if tree is not None and not any(isinstance(n, ast.ClassDef) and n.name == name for n in tree.body):
        yield from _defined_in(module, name, tree, seen)


def beside(file: Path | None, data: bytes) -> Iterator[tuple[str, tuple[str, float]]]:
    """Data files of a module: (path from its folder, (hash, time))."""
    tree = _parsed(data)
    if file is None or tree is None:
        return
    for name, path in data_files(file, tree):
        with contextlib.suppress(OSError):
            yield name, (_sha_file(path), path.stat().st_mtime)


def _parsed(data: bytes) -> ast.Module | None:
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError):  # a compiled extension
        return None


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that ``from ... import`` names."""
    if not node.level:
        return node.module or ""
    file = _file(module)
    package = module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *filter(None, [node.module])])


def _imports(module: str, data: bytes) -> Iterator[str]:
    """Modules that a source file may import, those inside functions too, and the packages above them."""
    if (tree := _parsed(data)) is None:
        return
    names = [module]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    for name in filter(None, names):
        parts = name.split(".")
        yield from (".".join(parts[:i]) for i in range(1, len(parts) + 1))


def located(module: str) -> tuple[bytes, float] | None:
    """Return the source of a module and when it was changed (Unix time), None if it is unknown."""
    return _locate(module)


def _locate(module: str) -> tuple[bytes, float] | None:
    """Bytes of a module and when they were written."""
    file = _file(module)
    if file is None:
        return None
    try:
        return file.read_bytes(), file.stat().st_mtime
    except OSError:
        pass
    loader = getattr(sys.modules.get(module), "__loader__", None)
    try:  # a module inside a zip file
        return loader.get_data(str(file)), 0.0  # type: ignore[union-attr]
    except (AttributeError, OSError):
        return None


def _file(module: str) -> Path | None:
    """Where a module is, without importing it: what runs, else what would."""
    here = getattr(sys.modules.get(module), "__file__", None)
    if here:
        return Path(here)
    spec, where = None, None
    parts = module.split(".")
    for i in range(1, len(parts) + 1):
        name = ".".join(parts[:i])
        try:
            spec = importlib.util.find_spec(name) if i == 1 else importlib.machinery.PathFinder.find_spec(name, where)
        except (ImportError, ValueError, AttributeError):
            return None
        if spec is None or (i < len(parts) and spec.submodule_search_locations is None):
            return None
        where = spec.submodule_search_locations
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _source(found: Mapping[str, tuple[str, float]]) -> Source:
    files = {name: sha for name, (sha, _) in sorted(found.items())}
    newest = max((when for _, when in found.values()), default=0.0)
    return Source(digest(files), {name: sha[:16] for name, sha in files.items()}, newest)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sha_file(path: Path) -> str:
    """Of its bytes, or of its size and pieces of it: no file takes longer than one of ``LARGEST``."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= (WHOLE if path.suffix == ".safetensors" else LARGEST):
            found, left = hashlib.sha256(), size
            while left and (piece := file.read(min(WHOLE, left))):  # one that grows meanwhile has no end
                found.update(piece)
                left -= len(piece)
            return found.hexdigest()
        start = file.read(8)
        head = b""
        places: Iterable[int] = range(0, size, max(size // PLACES, PIECE))
        if path.suffix == ".safetensors" and (length := int.from_bytes(start, "little")) <= HEADER:
            head = file.read(length)
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            places = [int(at) for at in _pieces(json.loads(head), 8 + len(head))]
        found = hashlib.sha256(start + head + size.to_bytes(8, "little"))
        for begin in places:
            file.seek(min(max(begin, 0), size))
            found.update(file.read(PIECE))
    return found.hexdigest()


def _pieces(header: Mapping[str, dict], data: int) -> Iterable[int]:
    """Where to read: three places of each tensor, in the order of the file."""
    spans = sorted(tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__")
    for begin, end in spans:
        yield from sorted({data + at for at in (begin, (begin + end) // 2, max(begin, end - PIECE))})


def _posix(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()
