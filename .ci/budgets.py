"""How large and how dense the tree is, and whether it keeps within its budgets.  Exit status 1 where it does not.

    python .ci/budgets.py

A budget is for the reader: what grows against one is split by idea.  A dense line is no saving, so density has a budget
too.  Tokens a line: NAME, NUMBER, OP and STRING tokens over the lines that have any; docstrings do not count.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ("minivllm", "contrib", "benchmarks", "tests", "docs", ".ci")
FILE, FUNCTION = 700, 60  # lines; a function's are those of the package, not of tests or Triton kernels
CORE, CORE_DENSITY = 85_500, 10.0  # tokens of minivllm/core (84,499 on 2026-11-28; 80,000 is the aim), per line
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.Tuple)
DATA = (*DISPLAYS, ast.Constant, ast.Name, ast.Subscript, ast.UnaryOp)
TABLE = 6  # elements of a table within a function, at least
COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)


@dataclass
class Figures:
    """Of a package.  ``skips``: places that the formatter leaves alone; ``unfree``: those that it should not."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    skips: int = 0
    unfree: list[str] = field(default_factory=list)
    longest: int = 0
    over: list[str] = field(default_factory=list)

    @property
    def density(self) -> float:
        return self.tokens / max(self.code_lines, 1)


def docstrings(tree: ast.Module) -> set[int]:
    """The first lines of all docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = (node.body for node in ast.walk(tree) if isinstance(node, owners) and node.body)
    return {
        body[0].lineno
        for body in bodies
        if isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    }


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(re.search(r"triton|\bkernel\(", ast.unparse(mark)) for mark in node.decorator_list)


def is_table(value: ast.expr | None) -> bool:
    """A display, or a call that is given one."""
    given = value.args if isinstance(value, ast.Call) else [value]
    return any(isinstance(one, DISPLAYS) for one in given)


def is_long_table(value: ast.expr | None) -> bool:
    elements = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    return len(elements) >= TABLE and all(isinstance(one, DATA) for one in elements)


def unformatted(tree: ast.Module) -> set[int]:
    """The lines that the formatter may leave alone: of Triton kernels, of tables of data, of a test's parameters."""
    found: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and is_kernel(node):
            found.append(node)
        if isinstance(node, (ast.Module, ast.ClassDef)):
            found += (one for one in node.body if is_table(getattr(one, "value", None)))
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return)) and is_long_table(node.value):
            found.append(node)
        marks = getattr(node, "decorator_list", [])
        found += (mark for mark in marks if "parametrize" in ast.unparse(mark)[:60])
    return {line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def functions_over(path: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not is_kernel(node):
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION:
                yield f"{path}:{node.lineno} {node.name} has {lines} lines; at most {FUNCTION}"


def measure(path: Path, into: Figures) -> None:
    """Adds one file."""
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    tree, lines = ast.parse(text), len(text.splitlines())
    skipped = docstrings(tree)
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    counted = [t for t in tokens if t.type in COUNTED and not (t.type == tokenize.STRING and t.start[0] in skipped)]
    into.files, into.lines, into.longest = into.files + 1, into.lines + lines, max(into.longest, lines)
    into.tokens += len(counted)
    into.code_lines += len({t.start[0] for t in counted})
    skips = [t.start[0] for t in tokens if t.type == tokenize.COMMENT and "fmt: skip" in t.string]
    into.skips += len(skips)
    if skips:
        free = unformatted(tree)
        into.unfree += (
            f"{name}:{line} fmt: skip is for tables of data and kernels" for line in skips if line not in free
        )
    if lines > FILE:
        into.over.append(f"{name} has {lines} lines; at most {FILE}")
    if name.startswith("minivllm"):
        into.over.extend(functions_over(name, tree))


def packages() -> dict[str, Figures]:
    found: dict[str, Figures] = {}
    for top in TREES:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).parts
            name = "/".join(parts[:2]) if top == "minivllm" and len(parts) > 2 else top
            measure(path, found.setdefault(name, Figures()))
    return found


def main() -> None:
    found = packages()
    print(f"{'package':24} {'files':>5} {'lines':>6} {'longest':>7} {'tokens a line':>13} {'fmt: skip':>9}")
    for name, f in found.items():
        print(f"{name:24} {f.files:5} {f.lines:6} {f.longest:7} {f.density:13.1f} {f.skips:9}")
    over = [line for f in found.values() for line in f.over]
    over += [line for f in found.values() for line in f.unfree]
    core = found["minivllm/core"]
    if core.tokens > CORE:
        over.append(f"minivllm/core has {core.tokens} tokens; at most {CORE}")
    if core.density > CORE_DENSITY:
        over.append(f"minivllm/core has {core.density:.1f} tokens a line; at most {CORE_DENSITY}")
    sys.exit("\n".join(over) if over else 0)


if __name__ == "__main__":
    main()
