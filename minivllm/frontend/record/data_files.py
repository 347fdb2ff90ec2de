"""Data files that a module reads, found in the module's text.  Nothing is imported or run.

A path may be built in any way (``__file__``, ``importlib.resources``, a format, a loop over names), so this module does
not follow it.  A file counts if a text of the module contains its name, and if it is in the module's folder, in a
folder below that another text names, or in a folder above up to the top of the package.  ``{}``, ``%s`` and the
replacement fields of f-strings match anything.  If the module lists a folder, all files in it count.  Files that the
module writes do not count.  A superfluous file can only show a difference that does not matter.  A missing file would
hide a difference.
"""

from __future__ import annotations

import ast
import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import Path

LISTING = ("iterdir", "listdir", "scandir", "walk", "rglob", "contents")  # functions that list a folder
SAVING = ("write_text", "write_bytes", "save", "savez", "savez_compressed", "savetxt", "save_file", "to_csv", "tofile")
CODE = (".py", ".pyc", ".pyi", ".so")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MODES = ("w", "a", "wb", "x")
MOST = 5000  # largest number of entries of a folder that are read
FOLDERS = 64
FEWEST = 3  # least number of characters of a pattern besides wildcards; a shorter pattern would match too many files


def data_files(file: Path, tree: ast.Module) -> Iterator[tuple[str, Path]]:
    """Yield (path relative to the module's folder, file) for each data file of the module ``file``."""
    patterns = _patterns(tree)
    written = _written(tree)
    listed = any(isinstance(node, ast.Attribute) and node.attr in LISTING for node in ast.walk(tree))
    wanted = re.compile("|".join(fnmatch.translate(pattern) for pattern in patterns) or r"\b\B")
    with_suffix = {f"{file.stem}{pattern}" for pattern in patterns if re.fullmatch(r"\.\w+", pattern)}
    for folder in _folders(file, patterns):
        for entry in _entries(folder):
            path = Path(os.path.relpath(entry, file.parent)).as_posix()
            if path.endswith(CODE) or any(path == name or path.endswith(f"/{name}") for name in written):
                continue
            in_listed_folder = listed and not path.startswith("..")
            if in_listed_folder or entry.name in with_suffix or wanted.match(entry.name):
                yield path, Path(entry.path)


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module without docstrings.  ``*`` stands for the replacement fields of an f-string."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
        elif isinstance(node, DOCUMENTED) and node.body and isinstance(node.body[0], ast.Expr):
            skipped.add(id(node.body[0].value))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def _patterns(tree: ast.AST) -> list[str]:
    """Return the parts of all strings that may be paths, as patterns for names of files and folders."""
    found: dict[str, None] = {}
    for text in _texts(tree):
        if len(text) > 200 or "\n" in text:
            continue
        path = re.sub(r"%[sd]|\{[^{}]*\}", "*", text).replace("\\", "/")
        for part in path.split("/"):
            literal = re.sub(r"[*?\[\]]", "", part)
            if len(literal) >= FEWEST and literal.strip(".") and part not in ("..", "."):
                found[part] = None
    return list(found)


def _folders(file: Path, patterns: list[str]) -> list[Path]:
    """Return the folders to search: the folder of the module, the package folders above it, and the named folders
    below them."""
    found = [file.parent]
    while os.path.exists(found[-1] / "__init__.py") and len(found) < FOLDERS:
        found.append(found[-1].parent)
    found = found[: max(1, len(found) - 1)]
    names = [pattern for pattern in patterns if not re.search(r"[*?\[\]\0]", pattern)]
    for folder in found:  # the list grows during the loop
        for name in names:
            below = folder / name
            if len(found) < FOLDERS and os.path.isdir(below) and below not in found:
                found.append(below)
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the files of a folder by name, without hidden files, from its first ``MOST`` entries."""
    try:
        with os.scandir(folder) as entries:
            first = [entry for entry, _ in zip(entries, range(MOST), strict=False)]
    except OSError:
        return []
    shown = [entry for entry in first if os.path.isfile(entry) and not entry.name.startswith(".")]
    return sorted(shown, key=lambda entry: entry.name)


def _written(tree: ast.Module) -> set[str]:
    """Return the paths that ``open(path, "w")``, ``path.write_text(...)``, ``np.save(path, ...)`` and others write."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    found = set()
    for node in ast.walk(tree):
        path = _written_by(node) if isinstance(node, ast.Call) else None
        if path is None:
            continue
        expressions = [path]
        for inner in ast.walk(path):
            if isinstance(inner, ast.Name):
                expressions += assigned.get(inner.id, ())
        for expression in expressions:
            texts = [text for text in _texts(ast.Expression(expression)) if text not in MODES]
            found |= {"/".join(texts[start:]).strip("/") for start in range(len(texts))}
    return found - {""}


def _written_by(call: ast.Call) -> ast.expr | None:
    """Return the expression of the path that a call writes, None if it writes no file."""
    function = call.func
    if isinstance(function, ast.Attribute):
        name, owner = function.attr, function.value
    else:
        name, owner = getattr(function, "id", ""), None
    if name in ("write_text", "write_bytes"):
        return owner
    if name in SAVING:
        if not call.args:
            return None
        return call.args[-1] if name == "save_file" else call.args[0]
    if name != "open":
        return None
    if isinstance(owner, ast.Name) and owner.id in ("io", "os", "gzip"):
        owner = None
    first_mode = 1 if owner is None else 0  # position of the argument ``mode``: a method has no path argument
    modes = call.args[first_mode : first_mode + 1]
    modes += [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    for mode in modes:
        if isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) & set("wax+"):
            return call.args[0] if owner is None else owner
    return None
