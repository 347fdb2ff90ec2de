"""Analysis of a module's text: how each name gets its value, and which names change while functions run."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import Entries

LITERAL, CLOCK, COMPUTED = "said", "clock", "computed"
EMPTY = ("dict", "list", "set", "frozenset", "deque", "defaultdict", "OrderedDict", "Counter", "ChainMap", "count",
         "Lock", "RLock", "local", "Event", "WeakKeyDictionary", "WeakValueDictionary", "WeakSet")  # fmt: skip
# functions of time that are a clock if the call is the whole value; ``int(time())`` is treated as a seed
CLOCKS = ("time", "monotonic", "perf_counter", "process_time")
CHANGING = (
    "append", "appendleft", "add", "update", "pop", "popleft", "popitem", "setdefault", "clear", "extend", "extendleft",
    "insert", "remove", "discard", "sort", "reverse", "put", "fill", "fill_", "copy_", "zero_", "add_", "mul_", "sub_",
    "move_to_end", "subtract", "rotate", "__setitem__",
)  # fmt: skip
# immutable types, whose values only change by an assignment
FIXED = (bool, int, float, complex, str, bytes, tuple, frozenset)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Assigned:
    """The names of a module, and ``Class.name`` for the names of a class body.

    ``begins`` describes how a name gets its value: ``LITERAL`` (a literal or an empty container), ``CLOCK`` or
    ``COMPUTED``.  ``literals`` has the values of literals.  ``changed`` has the names and attributes that functions
    assign, or whose content they change.
    """

    begins: Mapping[str, str] = field(default_factory=dict)
    literals: Mapping[str, Any] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()


def of_module(module: str) -> Assigned:
    """Return the analysis of a loaded module, which is empty for a module without a file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return _of_file(file, os.stat(file).st_mtime_ns) if file else Assigned()
    except OSError:
        return Assigned()


@functools.lru_cache(maxsize=256)
def _of_file(file: str, changed_ns: int) -> Assigned:
    """Return the analysis of a file.  ``changed_ns`` is its modification time, which makes the cache notice changes."""
    try:
        with open(file, "rb") as opened:
            tree = ast.parse(opened.read())
    except (OSError, SyntaxError, ValueError):  # a compiled extension
        return Assigned()
    begins: dict[str, str] = {}
    literals: Entries = {}
    for name, value in _assignments(tree.body, ""):
        begins[name] = COMPUTED if name in begins else _begins(value, literals, name)
    # these names have a changed value, such as a table that a loop of the module fills
    for name in touched(tree, inside=False) & set(begins):
        if not isinstance(literals.get(name), FIXED):
            begins[name] = COMPUTED
    reported = {name: value for name, value in literals.items() if begins[name] == LITERAL}
    return Assigned(begins, reported, frozenset(touched(tree)))


def _assignments(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield (name, assigned expression) of a body.  The expression is None if it is not the whole value of the name."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _assignments(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        whole = part is target and not isinstance(node, ast.AugAssign)
                        yield f"{prefix}{part.id}", node.value if whole else None
        elif isinstance(node, (ast.For, ast.While, ast.If, ast.With, ast.Try)):
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            for handler in getattr(node, "handlers", ()):
                inner += handler.body
            for name, _ in _assignments(inner, prefix):
                yield name, None  # the value depends on the condition or the loop


def _begins(value: ast.expr | None, literals: Entries, name: str) -> str:
    """Return how a name gets its first value (LITERAL, CLOCK or COMPUTED), and add a literal to ``literals``."""
    if value is None:
        return COMPUTED
    try:
        literals[name] = ast.literal_eval(value)
        return LITERAL
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        arguments = [*value.args, *(keyword.value for keyword in value.keywords)]
        if called in CLOCKS and not arguments:
            return CLOCK
        if called in EMPTY and all(isinstance(argument, (ast.Name, ast.Constant)) for argument in arguments):
            return LITERAL
    return COMPUTED


def touched(tree: ast.AST, inside: bool = True) -> set[str]:
    """Return the names and attributes that functions change.

    With ``inside`` False return the names that statements of the module change, or pass to a call that may change them.
    """
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
                for argument in node.args:
                    found.update(_chain(argument))
    return found


def _nodes(tree: ast.AST, inside: bool) -> Iterator[ast.AST]:
    """Yield the nodes of all functions, decorators and default values included, or with ``inside`` False the nodes
    outside of functions."""
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
    """Yield the names of a chain: ``d``, ``b`` and ``a`` of ``a.b[c].d``."""
    while isinstance(node, (ast.Subscript, ast.Attribute, ast.Call, ast.Starred)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id
