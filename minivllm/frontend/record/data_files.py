"""Data files that a module opens beside itself, found by reading its text; nothing is run.

A path may be put together in any way (``__file__``, ``importlib.resources``, a format, a loop over names), so it is not
followed: a file counts if some text of the module names it, by its last part, in the module's folder, in a folder below
that another text names, or in one above up to the package's own.  ``{}``, ``%s`` and what an f-string leaves open stand
for anything.  Where a folder is listed, all of its files count.  One file too many makes a difference that is none; one
too few would hide one.  What the module writes is no source of it.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path

LISTING = ("iterdir", "listdir", "scandir", "walk", "rglob", "contents")  # of a folder, whatever is in it
SAVING = ("write_text", "write_bytes", "save", "savez", "savez_compressed", "savetxt", "save_file", "to_csv", "tofile")
CODE = (".py", ".pyc", ".pyi", ".so")
MOST = 5000  # entries of a folder that are looked at
FOLDERS = 64
FEWEST = 3  # characters of a name that are said; fewer fit anything


def data_files(file: Path, tree: ast.Module) -> Iterator[tuple[str, Path]]:
    """(path from the module's folder, file), each once."""
    said, written = _names(tree), _written(tree)
    listed = any(isinstance(n, ast.Attribute) and n.attr in LISTING for n in ast.walk(tree))
    wanted = re.compile("|".join(fnmatch.translate(name) for name in said) or r"\b\B")
    own = {f"{file.stem}{name}" for name in said if re.fullmatch(r"\.\w+", name)}  # with_suffix
    for folder in _folders(file, said):
        for entry in _entries(folder):
            at = Path(os.path.relpath(entry, file.parent)).as_posix()
            if at.endswith(CODE) or any(at == w or at.endswith(f"/{w}") for w in written):
                continue
            below = listed and not at.startswith("..")
            if below or entry.name in own or wanted.match(entry.name):
                yield at, Path(entry.path)


def _texts(tree: ast.AST) -> Iterator[str]:
    """Texts of a module but for its docstrings; ``*`` where something is put in."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    parts = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (docs | parts):
            yield node.value


def _names(tree: ast.AST) -> list[str]:
    """Names of files or folders, as patterns: the parts of texts that may be paths."""
    found: dict[str, None] = {}
    for text in _texts(tree):
        if len(text) > 200 or "\n" in text:
            continue
        for part in re.sub(r"%[sd]|\{[^{}]*\}", "*", text).replace("\\", "/").split("/"):
            literal = re.sub(r"[*?\[\]]", "", part)
            if len(literal) >= FEWEST and literal.strip(".") and part not in ("..", "."):
                found[part] = None
    return list(found)


def _folders(file: Path, said: list[str]) -> list[Path]:
    """Where files are looked for: the module's folder, those above it in its package, and those below that it names."""
    here = file.parent
    found = [here]
    while (found[-1] / "__init__.py").exists() and len(found) < FOLDERS:
        found.append(found[-1].parent)
    found = found[: max(1, len(found) - 1)]
    for folder in found:  # it grows meanwhile
        for name in said:
            below = folder / name
            if len(found) < FOLDERS and not re.search(r"[*?\[\]\0]", name) and below.is_dir() and below not in found:
                found.append(below)
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            some = [entry for entry, _ in zip(entries, range(MOST), strict=False)]
    except OSError:
        return []
    return sorted((e for e in some if e.is_file() and not e.name.startswith(".")), key=lambda e: e.name)


def _written(tree: ast.Module) -> set[str]:
    """Paths that are opened for writing: ``open(path, "w")``, ``path.write_text(...)``, ``np.save(path, ...)``."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (path := _saves_to(node)) is not None:
            names = [n.id for n in ast.walk(path) if isinstance(n, ast.Name)]
            whole = [path, *(value for name in names for value in assigned.get(name, ()))]
            for one in whole:
                texts = [t for t in _texts(ast.Expression(one)) if t not in ("w", "a", "wb", "x")]
                found |= {"/".join(texts[at:]).strip("/") for at in range(len(texts))}
    return found - {""}


def _saves_to(call: ast.Call) -> ast.expr | None:
    """The path that a call writes, if it does."""
    f = call.func
    name = f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else ""
    if name in ("write_text", "write_bytes"):
        return f.value if isinstance(f, ast.Attribute) else None
    if name in SAVING:
        return call.args[-1] if name == "save_file" and call.args else call.args[0] if call.args else None
    if name != "open":
        return None
    method = isinstance(f, ast.Attribute) and not (isinstance(f.value, ast.Name) and f.value.id in ("io", "os", "gzip"))
    given = [*call.args[not method :][:1], *(k.value for k in call.keywords if k.arg == "mode")]
    modes = [n.value for n in given if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if not any(set(mode) & set("wax+") for mode in modes):
        return None
    return f.value if method and isinstance(f, ast.Attribute) else call.args[0]
