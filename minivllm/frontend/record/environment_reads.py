"""Environment variables that the source of a plug-in reads, found in its syntax tree.

``os.environ["X"]``, ``os.environ.get("X")``, ``os.getenv("X")`` and ``"X" in os.environ`` name a variable.  The name
may also be a constant of the module.  Any other use of ``environ`` reads a variable whose name is not known.
"""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Iterator, Mapping

from . import Entries
from .machine import SECRET

ENVIRON, GETENV = "environ", "getenv"
READS = ("get", "pop", "setdefault")
SHOWN = 60  # largest number of shown characters of a value
COMPUTED = "?"  # placeholder for a name that the code computes


def values(texts: Mapping[str, str]) -> dict[str, Entries]:
    """Return the facts about each variable in the form of ``values.of_part``: ``{"own.environ[X]": {...}}``.

    ``texts`` is the source of each module by name.  A variable whose name is computed has the digest "".
    """
    found = {}
    for module, text in texts.items():
        for name in sorted(set(names(text))):
            key = f"{module.partition(':')[0]}.environ[{name}]"
            entry = {"begins": "computed", "own": True, "scalar": True}
            if name == COMPUTED:
                found[key] = {"digest": "", "shown": "a variable whose name the code computes", **entry}
                continue
            value = os.environ.get(name)
            digest = hashlib.sha256(repr(value).encode()).hexdigest()[:16]
            found[key] = {"digest": digest, "shown": shown(name, value, digest), **entry}
    return found


def shown(name: str, value: str | None, digest: str) -> str:
    """Return a value for readers, or only its digest if the name looks like the name of a secret."""
    if value is None:
        return "not set"
    if SECRET.search(name):
        return f"a secret ({digest[:8]})"
    return repr(value if len(value) <= SHOWN else value[: SHOWN - 3] + "...")


def names(text: str) -> Iterator[str]:
    """Yield the names of the variables that a text reads, ``COMPUTED`` for a name that the text computes."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    constants: Entries = {}
    for statement in tree.body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement.value.value, str):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    constants[target.id] = statement.value.value

    def named(node: ast.expr) -> str:
        value = node.value if isinstance(node, ast.Constant) else constants.get(getattr(node, "id", ""))
        return value if isinstance(value, str) else COMPUTED

    named_uses: set[int] = set()  # ids of the nodes that read environ with a literal name
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _is(node.value, ENVIRON):
            named_uses.add(id(node.value))
            yield named(node.slice)
        elif isinstance(node, ast.Call) and node.args:
            function = node.func
            if isinstance(function, ast.Attribute) and function.attr in READS and _is(function.value, ENVIRON):
                named_uses.add(id(function.value))
                yield named(node.args[0])
            elif _is(function, GETENV):
                yield named(node.args[0])
        elif isinstance(node, ast.Compare) and _is(node.comparators[0], ENVIRON):
            named_uses.add(id(node.comparators[0]))
            yield named(node.left)
    if any(_is(node, ENVIRON) and id(node) not in named_uses for node in ast.walk(tree)):
        yield COMPUTED


def _is(node: ast.AST, name: str) -> bool:
    """Return whether a node is a variable called ``name``, or an attribute ``name`` of a variable such as ``os``."""
    if isinstance(node, ast.Attribute):
        return node.attr == name and isinstance(node.value, ast.Name)
    return isinstance(node, ast.Name) and node.id == name
