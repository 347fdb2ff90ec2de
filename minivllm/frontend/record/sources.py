"""Hashes of the source of plug-ins, of minivllm itself, and of models.

The source of a plug-in is its module, the modules that it imports from its own package, the modules of base classes in
any package, and the data files that it names.  They are found by reading; nothing is run.  So a change in a helper
counts, and a change in another plug-in of the same package does not.  For built-in plug-ins only imports within
``minivllm.plugins`` are followed, because the rest of minivllm has a hash of its own.  A hash covers module names and
bytes, but no paths and no times.  The same code has the same hash on every machine.
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
# folders of minivllm that its hash leaves out, because they run no model or have separate hashes
APART = ("plugins", "pocket", "frontend/record", "testing")
WHOLE = 64 * 2**20  # largest size in bytes of a weight file that is hashed as a whole; larger files are sampled
LARGEST = 512 * 2**20  # largest size in bytes of any other file that is hashed as a whole; larger files are sampled
HEADER = 100 * 10**6  # largest size in bytes of the header of a weight file (the limit of safetensors)
PLACES = 1024  # number of pieces of a sampled file with unknown tensors
PIECE = 16 * 2**10  # size of a piece in bytes; a sampled weight file has three per tensor: start, middle and end
TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
             "*.model", "*.tiktoken")  # fmt: skip


@dataclass(frozen=True)
class Source:
    """The hash of a source.

    ``files`` maps names of modules or files to the start of their SHA-256.  ``hash`` covers all of them, "" if there is
    no source.  ``missing`` is the reason for an empty hash, or names the parts that the hash does not cover.
    ``newest`` is the Unix time of the last change of a file.  ``texts`` has the lines of classes that a program passed.
    """

    hash: str
    files: Mapping[str, str] = field(default_factory=dict)
    newest: float = 0.0
    missing: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)


def plugin_source(target: str) -> Source:
    """Return the source of ``module:Class``: its module, and the modules that it imports from the same plug-in, from
    files only."""
    module = target.partition(":")[0]
    scope = _Scope(module)
    found: dict[str, tuple[str, float]] = {}
    todo = [module]
    while todo:
        current = todo.pop()
        if current in found or (source := located(current)) is None:
            continue
        data, changed = source
        found[current] = (sha(data), changed)
        found |= {f"{current}:{name}": entry for name, entry in beside(_file(current), data)}
        todo += filter(scope.has, _imports(current, data))
        todo += filter(scope.may_extend, bases(current, data))
    if module not in found:
        return Source("", missing=f"{module} has no source file")
    return source_of_hashes(found)


def package_source() -> Source:
    """Return the hash of minivllm's Python and C++ files.

    The folders of ``APART`` are left out: plug-ins have hashes of their own, and no step of the engine uses the rest.
    """
    root = Path(__file__).parents[2]
    apart = [root / folder for folder in APART]
    found = {}
    for path in sorted(root.rglob("*")):
        if path.suffix in CODE and not any(path.is_relative_to(folder) for folder in apart):
            found[path.relative_to(root).as_posix()] = (sha(path.read_bytes()), path.stat().st_mtime)
    return source_of_hashes(found)


def model_identity(folder: Path, weights: bool = True, pickled: bool = False) -> Source:
    """Return the identity of a model: its weights, ``config.json`` and ``generation_config.json``.

    ``folder`` may be a GGUF file.  ``weights`` False leaves the weights out.  ``pickled`` means that the weights are
    files of ``torch.save``.  Weight files of more than 64 MiB are sampled, which takes a second and not a minute: the
    header, and start, middle and end of each tensor.
    """
    if os.path.isfile(folder):
        return _identity([folder])
    paths = [folder / "config.json", folder / "generation_config.json"]
    suffixes = (".bin", ".pt", ".pth") if pickled else (".safetensors",)
    if weights:
        paths += sorted(path for suffix in suffixes for path in folder.glob("*" + suffix))
    return _identity(paths)


def tokenizer_identity(folder: Path) -> Source:
    """Return the identity of a tokenizer: the files that turn text into token ids."""
    return _identity(sorted({path for pattern in TOKENIZER for path in folder.glob(pattern)}))


def _identity(paths: Iterable[Path]) -> Source:
    """Return the hashes of the paths that are files, each and all together."""
    return source_of_hashes(
        {path.name: (_sha_file(path), path.stat().st_mtime) for path in paths if os.path.isfile(path)}
    )


def digest(value: object) -> str:
    """Return the SHA-256 of a JSON value, which does not depend on the order of keys."""
    return sha(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str).encode())


def known_without(module: str) -> bool:
    """Return whether a version identifies the code of a module, so that its source need not be hashed."""
    if module == PLUGINS or module.startswith(PLUGINS + "."):
        return False
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("minivllm", "pydantic", *LIBRARIES)


class _Scope:
    """The modules that belong to a plug-in.

    These are the modules of its own package and of the built-in plug-ins.  For a module outside of site-packages (an
    experiment) they include the files in its folder."""

    def __init__(self, module: str) -> None:
        self.top = module.partition(".")[0]
        # folder of a module outside of site-packages, whose files belong to the plug-in; None for an installed package
        self.beside: Path | None = None
        file = _file(self.top)
        if file is None or self.top == "minivllm":
            return
        folder = file.parents[1] if file.name == "__init__.py" else file.parent
        if not {"site-packages", "dist-packages"} & set(folder.parts):
            self.beside = folder

    def has(self, module: str) -> bool:
        """Return whether an imported module belongs to the plug-in: it has the same top-level package, or lies beside
        the plug-in's file, and is not of Python's or minivllm's own library (except built-in plug-ins)."""
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
        """Return whether the module of a base class is hashed.  Code with a recorded version is not."""
        return module.partition(".")[0] != "minivllm" and not known_without(module)


def bases(module: str, data: bytes) -> Iterator[str]:
    """Yield the modules that define the base classes of a module's classes, and modules that re-export them."""
    tree = _parsed(data)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.ClassDef):
            for base in node.bases:
                yield from _defined_in(module, ast.unparse(base).partition("[")[0], tree)


def _defined_in(module: str, name: str, tree: ast.Module | None, seen: set[str] | None = None) -> Iterator[str]:
    """Yield the modules through which ``module`` imports a class: modules that re-export it, and the defining module.

    ``name`` is the dotted name of the class in ``module``.  ``seen`` has the ``module:name`` that were followed.
    """
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
            if other.replace(".", "").isidentifier():  # a further name of the same module
                yield from _defined_in(module, other, tree, seen)


def _class_at(module: str, name: str, seen: set[str]) -> Iterator[str]:
    """Yield a module that a class was imported from, and the modules from which that module imports the class."""
    if not module or (source := located(module)) is None:
        return
    yield module
    tree = _parsed(source[0])
    if tree is not None and not any(isinstance(n, ast.ClassDef) and n.name == name for n in tree.body):
        yield from _defined_in(module, name, tree, seen)


def beside(file: Path | None, data: bytes) -> Iterator[tuple[str, tuple[str, float]]]:
    """Yield (path from the module's folder, (SHA-256, modification time)) of the data files of a module."""
    tree = _parsed(data)
    if file is None or tree is None:
        return
    for name, path in data_files(file, tree):
        with contextlib.suppress(OSError):
            yield name, (_sha_file(path), path.stat().st_mtime)


def _parsed(data: bytes) -> ast.Module | None:
    """Return the syntax tree of a source, None if it cannot be parsed."""
    try:
        return ast.parse(data)
    except (SyntaxError, ValueError):  # a compiled extension
        return None


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module in a ``from ... import``."""
    if not node.level:
        return node.module or ""
    file = _file(module)
    parts = module.split(".")
    if file is None or file.name != "__init__.py":
        parts.pop()
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, *filter(None, [node.module])])


def _imports(module: str, data: bytes) -> Iterator[str]:
    """Yield the modules that a source may import, also inside functions, and the packages above them."""
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
    """Return the bytes of a module's source and its modification time (Unix), None if it is unknown."""
    file = _file(module)
    if file is None:
        return None
    try:
        return file.read_bytes(), file.stat().st_mtime
    except OSError:
        pass
    loader = getattr(sys.modules.get(module), "__loader__", None)
    try:  # the module may be inside a zip file
        return loader.get_data(str(file)), 0.0  # type: ignore[union-attr]
    except (AttributeError, OSError):
        return None


def _file(module: str) -> Path | None:
    """Return the file of a loaded module, or the file that an import would load, without importing it.  None if there
    is none."""
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


def source_of_hashes(found: Mapping[str, tuple[str, float]]) -> Source:
    """Return the source that consists of ``found``, (SHA-256, modification time) by name."""
    files = {name: sha for name, (sha, _) in sorted(found.items())}
    newest = max((changed for _, changed in found.values()), default=0.0)
    return Source(digest(files), {name: sha[:16] for name, sha in files.items()}, newest)


def sha(data: bytes) -> str:
    """Return the SHA-256 of some bytes as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def _sha_file(path: Path) -> str:
    """Return the SHA-256 of a file, or of its size and samples of a large file."""
    is_weights = path.suffix == ".safetensors"
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= (WHOLE if is_weights else LARGEST):
            found = hashlib.sha256()
            left = size  # read only up to the size at the start, because the file may grow
            while left and (piece := file.read(min(WHOLE, left))):
                found.update(piece)
                left -= len(piece)
            return found.hexdigest()
        start = file.read(8)
        head = b""
        length = int.from_bytes(start, "little")
        if is_weights and length <= HEADER:
            head = file.read(length)
        places: Iterable[int] = range(0, size, max(size // PLACES, PIECE))
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            places = [int(place) for place in _pieces(json.loads(head), 8 + len(head))]
        found = hashlib.sha256(start + head + size.to_bytes(8, "little"))
        for place in places:
            file.seek(min(max(place, 0), size))
            found.update(file.read(PIECE))
    return found.hexdigest()


def _pieces(header: Mapping[str, dict], data: int) -> Iterable[int]:
    """Yield three positions of each tensor in the order of the file.  The tensors begin at position ``data``."""
    spans = sorted(tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__")
    for begin, end in spans:
        positions = {begin, (begin + end) // 2, max(begin, end - PIECE)}
        yield from sorted(data + position for position in positions)
