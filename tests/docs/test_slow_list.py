"""The list of slow tests, ``tests/slow.txt``: each line names a test that exists, and a function keeps a quick case."""

from __future__ import annotations

import ast
from pathlib import Path

import slow

ROOT = Path(__file__).resolve().parents[2]


def functions(path: Path) -> set[str]:
    """Return the names of a file's functions, and of its classes with "::", whose tests may be inherited.

    A state machine is assigned to a name, as in ``TestBooks = Books.TestCase``."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found.add(f"{node.name}::")
        elif isinstance(node, ast.Assign):
            found |= {f"{target.id}::" for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_each_line_names_a_test_that_is_there():
    there: dict[str, set[str]] = {}
    for name in slow.listed():
        file, _, test = name.partition("::")
        if file not in there:
            there[file] = functions(ROOT / file)
        owner, nested, _ = test.partition("::")
        assert (f"{owner}::" if nested else owner.partition("[")[0]) in there[file], f"{name}: no such test"


def test_the_quickest_case_of_a_function_is_left_out_unless_it_takes_long():
    limit, most = slow.LIMIT, slow.MOST
    took = {"a.py::x[1]": limit + 1, "a.py::x[2]": limit, "a.py::y": most + 1, "a.py::z": most, "a.py::w[1]": limit / 2}
    assert set(slow.chosen(took)) == {"a.py::x[1]", "a.py::y"}
