"""What a module's text says about the values of its names: how each begins, and which change while functions run."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

SAID, CLOCK, COMPUTED = "said", "clock", "computed"
EMPTY = ("dict", "list", "set", "frozenset", "deque", "defaultdict", "OrderedDict", "Counter", "ChainMap", "count",
         "Lock", "RLock", "local", "Event", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet")  # fmt: skip
CLOCKS = ("time", "monotonic", "perf_counter", "process_time")  # as they are: ``int(time())`` is rather a seed
CHANGING = (
    "append", "appendleft", "add", "update", "pop", "popleft", "popitem", "setdefault", "clear", "extend", "extendleft",
    "insert", "remove", "discard", "sort", "reverse", "put", "fill", "fill_", "copy_", "zero_", "add_", "mul_", "sub_",
    "move_to_end", "subtract", "rotate", "__setitem__",
)  # fmt: skip
FIXED = (bool, int, float, complex, str, bytes, tuple, frozenset)  # what nobody can change without a name of it
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Assigned:
    """Names are those of the module, and ``Class.name`` those of a class body.  ``literals``: the values of those that
    begin with one; ``changed``: names and attributes that functions bind again, or whose contents they change."""

    begins: Mapping[str, str] = field(default_factory=dict)
    literals: Mapping[str, Any] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()


def of_module(module: str) -> Assigned:
    """Nothing of a module that has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return _of_file(file, os.stat(file).st_mtime_ns) if file else Assigned()
    except OSError:
        return Assigned()


@functools.lru_cache(maxsize=256)
def _of_file(file: str, when: int) -> Assigned:
    try:
        with open(file, "rb") as opened:
            tree = ast.parse(opened.read())
    except (OSError, SyntaxError, ValueError):  # a compiled extension
        return Assigned()
    begins: dict[str, str] = {}
    literals: dict[str, Any] = {}
    for name, value in _assignments(tree.body, ""):
        begins[name] = COMPUTED if name in begins else _begins(value, literals, name)
    for name in touched(tree, inside=False) & set(begins):  # a table that a loop of the module fills
        if not isinstance(literals.get(name), FIXED):
            begins[name] = COMPUTED
    return Assigned(begins, {n: v for n, v in literals.items() if begins[n] == SAID}, frozenset(touched(tree)))


def _assignments(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.expr | None]]:
    """(name, what it is set to), where that is plain to see."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _assignments(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for one in ast.walk(target):
                    if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                        plain = one is target and not isinstance(node, ast.AugAssign)
                        yield f"{prefix}{one.id}", node.value if plain else None
        elif isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try)):
            for name, _ in _assignments([n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)], prefix):
                yield name, None  # it depends
            for handler in getattr(node, "handlers", ()):
                for name, _ in _assignments(handler.body, prefix):
                    yield name, None


def _begins(value: ast.expr | None, literals: dict[str, Any], name: str) -> str:
    if value is None:
        return COMPUTED
    try:
        literals[name] = ast.literal_eval(value)
        return SAID
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        given = [*value.args, *(k.value for k in value.keywords)]
        if called in CLOCKS and not given:
            return CLOCK
        if called in EMPTY and all(isinstance(one, (ast.Name, ast.Constant)) for one in given):
            return SAID
    return COMPUTED


def touched(tree: ast.AST, inside: bool = True) -> set[str]:
    """Names and attributes that functions change; with ``inside=False`` those that the module itself does, or hands to
    something that may."""
    found: set[str] = set()
    for node in _nodes(tree, inside):
        if isinstance(node, ast.Global):
            found.update(node.names)
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
            found.update(_chain(node))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and (not inside or node.func.attr in CHANGING):
                found.update(_chain(node.func.value))
            if not inside or getattr(node.func, "id", "") == "next":
                for one in node.args:
                    found.update(_chain(one))
    return found


def _nodes(tree: ast.AST, inside: bool) -> Iterator[ast.AST]:
    """Those in functions, or those that run when the module is imported."""
    if inside:
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                yield from ast.walk(node)
        return
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, FUNCTIONS)]


def _chain(node: ast.AST) -> Iterator[str]:
    """The names along ``a.b[c].d``."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call, ast.Starred)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id
