"""Files, functions and classes that pages name exist in the tree.

A mark is code in the text of a page:

    `core/engine/cache.py`               a file, below ``minivllm/`` or the repository's root
    `core/engine/cache.py:KVCache.grow`  a name in it: a function, a class, a constant, a method, a field
    `core/engine/`                       a folder
    `KVCache.grow`                       a member of a class of that name, somewhere in the package
"""

from __future__ import annotations

import ast
import functools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minivllm"
DOCS = ROOT / "docs"
# pages in which each mark is checked; in the others only marks with a file
STRICT = [DOCS / "glossary.md", DOCS / "finding-your-way.md", *sorted((DOCS / "architecture").glob("*.md"))]
PAGES = [page for page in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md") if page not in STRICT]
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"((?:[\w-]+/)*[\w-]+\.py)(?::([A-Za-z_][\w.]*))?")
FOLDER = re.compile(r"(?:[\w-]+/)+")
MEMBER = re.compile(r"([A-Z]\w*)\.(\w+)(?:\(\))?")


def found(path: str) -> Path | None:
    return next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)


def targets(node: ast.stmt) -> set[str]:
    """The names that a statement of a module or of a class makes."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.If, ast.Try)):
        return set().union(*(targets(one) for one in node.body))
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return set()


def members(node: ast.ClassDef) -> set[str]:
    """Methods and fields of a class, those too that its methods set."""
    of_self = {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"
    }
    return of_self.union(*(targets(one) for one in node.body))


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names that a module defines, members of classes as ``Class.member``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    made = set().union(*(targets(node) for node in tree.body))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return frozenset(made | {f"{node.name}.{name}" for node in classes for name in members(node)})


@functools.cache
def all_members() -> frozenset[str]:
    files = (path for path in PACKAGE.rglob("*.py") if "templates" not in path.parts)
    return frozenset(name for path in files for name in names_in(path) if "." in name)


def marks(text: str) -> list[str]:
    return CODE.findall(FENCE.sub("", text))


def wrong(mark: str, strict: bool) -> str:
    """Return the missing parts of a mark; "" if nothing is missing or the text is not a mark."""
    if at := FILE.fullmatch(mark):
        path, name = found(at[1]), at[2]
        if path is None:
            return f"there is no file {at[1]}" if strict or name else ""
        return f"{at[1]} has no {name}" if name and name not in names_in(path) else ""
    if strict and FOLDER.fullmatch(mark):
        return "" if found(mark) else f"there is no folder {mark}"
    if strict and (at := MEMBER.fullmatch(mark)):
        return "" if f"{at[1]}.{at[2]}" in all_members() else f"no class {at[1]} has {at[2]}"
    return ""


@pytest.mark.parametrize("page", STRICT, ids=lambda page: page.stem)
def test_all_that_a_page_about_the_inside_names_is_there(page):
    reported = [why for mark in marks(page.read_text(encoding="utf-8")) if (why := wrong(mark, strict=True))]
    assert not reported, f"{page.name}: " + "; ".join(reported)


def test_names_in_files_that_other_pages_give_are_there():
    reported = [
        f"{page.name}: {why}"
        for page in PAGES
        for mark in marks(page.read_text(encoding="utf-8"))
        if (why := wrong(mark, strict=False))
    ]
    assert not reported, "\n".join(reported)


@pytest.mark.parametrize(
    "mark, says",
    [
        ("core/engine/cache.py", ""),
        ("core/engine/cash.py", "no file"),
        ("core/engine/cache.py:KVCache.grow", ""),
        ("core/engine/cache.py:KVCache.shrink", "has no KVCache.shrink"),
        ("core/engine/slots.py:Slots.serial", ""),
        ("core/engine/", ""),
        ("core/motor/", "no folder"),
        ("KVCache.grow", ""),
        ("KVCache.shrink()", "no class KVCache has shrink"),
        ("max_num_seqs", ""),
    ],
)
def test_a_mark_that_names_nothing_is_seen(mark, says):
    why = wrong(mark, strict=True)
    assert says in why and bool(says) == bool(why)


def test_the_picture_and_the_text_below_it_number_the_same_steps_and_its_packages_are_there():
    page = (DOCS / "architecture" / "overview.md").read_text(encoding="utf-8")
    picture = ET.parse(DOCS / "architecture" / "structure.svg").getroot()
    svg = "{http://www.w3.org/2000/svg}"
    words = [(e.text or "", e.get("font-weight")) for e in picture.iter() if e.tag in (f"{svg}text", f"{svg}tspan")]
    shown = {int(text) for text, _ in words if text.isdigit()}
    explained = {int(n) for n in re.findall(r"^(\d+)\. \*\*", page, re.M)}
    assert shown == explained == set(range(1, len(explained) + 1)) and len(explained) > 5
    packages = [text for text, weight in words if weight == "bold" and re.fullmatch(r"[a-z/]+", text)]
    assert len(packages) >= 10 and not [name for name in packages if found(name) is None]
