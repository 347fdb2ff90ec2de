"""Measure the size, the density and the docstrings of the tree, and compare them with its budgets.

    python .ci/budgets.py            exit status 1 where a budget is exceeded
    python .ci/budgets.py --write    lower the figures of .ci/unfinished.txt to what is measured

Density is tokens per logical line: NAME, NUMBER, OP and STRING tokens over NEWLINE tokens, docstrings excluded, so that
line breaks do not count.  Triton kernels and tables of data are left out.  The first word of a function's docstring is
an imperative verb (``.ci/verbs.txt``), which keeps out fragments such as "Of k rows each".

``unfinished.txt`` has the folders that do not meet the two limits yet, with the density and the number of docstrings
that each may have.  A figure may only fall, and a folder that meets a limit loses its figure.
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
UNFINISHED, VERBS = ROOT / ".ci" / "unfinished.txt", ROOT / ".ci" / "verbs.txt"
FILE, FUNCTION = 700, 60  # lines; a function's are those of the package, not of tests or Triton kernels
DENSITY = 10.7  # tokens per logical line of a folder of the package
# tokens: of the host and the worker together, and of the package (80,000 and 660,000 are the aims)
CORE, PACKAGE = 189_050, 1_207_300
DISPLAYS = (ast.Dict, ast.List, ast.Set, ast.Tuple)
DATA = (*DISPLAYS, ast.Constant, ast.Name, ast.Subscript, ast.UnaryOp)
TABLE = 6  # elements of a table of data, at least
COUNTED = (tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Figures:
    """The figures of a folder.  ``skips`` counts places that the formatter leaves alone, ``unfree`` lists those that it
    should not; ``dense_tokens`` and ``statements`` leave out kernels and tables; ``verbless`` lists docstrings."""

    files: int = 0
    lines: int = 0
    tokens: int = 0
    dense_tokens: int = 0
    statements: int = 0
    skips: int = 0
    unfree: list[str] = field(default_factory=list)
    longest: int = 0
    over: list[str] = field(default_factory=list)
    verbless: list[str] = field(default_factory=list)

    @property
    def density(self) -> float:
        """Return the tokens per logical line."""
        return self.dense_tokens / max(self.statements, 1)


def docstrings(tree: ast.Module) -> set[int]:
    """Return the first lines of all docstrings."""
    owners = (ast.Module, ast.ClassDef, *FUNCTIONS)
    return {node.body[0].lineno for node in ast.walk(tree) if isinstance(node, owners) and ast.get_docstring(node)}


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is a kernel of Triton or Gluon."""
    return any(re.search(r"triton|gluon|\bkernel\(", ast.unparse(mark)) for mark in node.decorator_list)


def is_table(value: ast.expr | None) -> bool:
    """Return whether a value is a display, or a call with one as an argument."""
    given = value.args if isinstance(value, ast.Call) else [value]
    return any(isinstance(one, DISPLAYS) for one in given)


def is_long_table(value: ast.expr | None) -> bool:
    """Return whether a value is a display of at least ``TABLE`` elements, all of them data."""
    elements = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    return len(elements) >= TABLE and all(isinstance(one, DATA) for one in elements)


def spans(nodes: Iterator[ast.AST] | list[ast.AST]) -> set[int]:
    """Return the lines of some nodes."""
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def exempt(tree: ast.Module) -> set[int]:
    """Return the lines that density leaves out: those of Triton kernels and of tables of data."""
    assigned = (ast.Assign, ast.AnnAssign, ast.Return)
    kernels = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS) and is_kernel(node)]
    tables = [node for node in ast.walk(tree) if isinstance(node, assigned) and is_long_table(node.value)]
    return spans([*kernels, *tables])


def unformatted(tree: ast.Module) -> set[int]:
    """Return the lines that the formatter may leave alone: Triton kernels, tables of data, parameters of a test."""
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
    return spans(found)


def functions_over(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield a sentence for each function that is too long."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and not is_kernel(node):
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION:
                yield f"{path}:{node.lineno} {node.name} has {lines} lines; at most {FUNCTION}"


def verbless(path: str, tree: ast.Module, verbs: set[str]) -> Iterator[str]:
    """Yield the place of each function whose docstring does not begin with a verb."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and (text := ast.get_docstring(node)):
            word = re.match(r"[A-Za-z]+", text)
            if word is None or word[0] not in verbs:
                yield f"{path}:{node.lineno} {node.name}: {text.splitlines()[0][:60]}"


def measure(path: Path, into: Figures, verbs: set[str]) -> None:
    """Add the figures of a file."""
    text, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    tree, lines = ast.parse(text), len(text.splitlines())
    skipped, left_out = docstrings(tree), exempt(tree)
    with path.open("rb") as file:
        tokens = list(tokenize.tokenize(file.readline))
    counted = [t for t in tokens if t.type in COUNTED and not (t.type == tokenize.STRING and t.start[0] in skipped)]
    into.files, into.lines, into.longest = into.files + 1, into.lines + lines, max(into.longest, lines)
    into.tokens += len(counted)
    into.dense_tokens += sum(t.start[0] not in left_out for t in counted)
    ends = [t.start[0] for t in tokens if t.type == tokenize.NEWLINE]
    into.statements += sum(line not in left_out for line in ends) - sum(line not in left_out for line in skipped)
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
        into.verbless.extend(verbless(name, tree, verbs))


def folder_of(path: Path) -> str:
    """Return the folder that a file counts for: up to two levels of the package, one of the other trees."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: min(3, len(parts) - 1)]) if parts[0] == "minivllm" else parts[0]


def packages() -> dict[str, Figures]:
    """Return the figures of each folder."""
    found: dict[str, Figures] = {}
    verbs = set(VERBS.read_text(encoding="utf-8").split())
    for top in TREES:
        for path in sorted((ROOT / top).rglob("*.py")):
            measure(path, found.setdefault(folder_of(path), Figures()), verbs)
    return found


def unfinished() -> dict[str, tuple[float, int]]:
    """Return the density and the number of docstrings without a verb that each unfinished folder may have."""
    lines = UNFINISHED.read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: (float(density), int(docs)) for name, density, docs in rows}


def still_unfinished(found: dict[str, Figures]) -> dict[str, tuple[float, int]]:
    """Return the figures of the folders of the package that do not meet the limits."""
    left = {}
    for name, f in found.items():
        density = round(f.density + 0.05, 1) if f.density > DENSITY else 0.0
        if name.startswith("minivllm") and (density or f.verbless):
            left[name] = density, len(f.verbless)
    return left


def write(found: dict[str, Figures]) -> None:
    """Write the figures of unfinished folders, each the lower one of what is measured and what was allowed."""
    before = unfinished() if UNFINISHED.exists() else {}
    text = "# folder, tokens per logical line, docstrings without a verb: at most (0: the folder meets the limit)\n"
    for name, (density, docs) in still_unfinished(found).items():
        old_density, old_docs = before.get(name, (density, docs))
        text += f"{name} {min(density, old_density)} {min(docs, old_docs)}\n"
    UNFINISHED.write_text(text, encoding="utf-8")


def exceeded(found: dict[str, Figures]) -> list[str]:
    """Return a sentence for each budget that is exceeded."""
    over = [line for f in found.values() for line in (*f.over, *f.unfree)]
    allowed = unfinished()
    for name, (density, docs) in still_unfinished(found).items():
        most_density, most_docs = allowed.get(name, (0.0, 0))
        if density > max(most_density, DENSITY):
            over.append(f"{name}: {found[name].density:.2f} tokens per logical line; at most {most_density or DENSITY}")
        if docs > most_docs:
            over.append(f"{name}: {docs} docstrings do not begin with a verb; at most {most_docs}. All of them:")
            over += (f"  {line}" for line in found[name].verbless)
    core = sum(f.tokens for name, f in found.items() if name.startswith(("minivllm/core", "minivllm/device/worker")))
    package = sum(f.tokens for name, f in found.items() if name.startswith("minivllm"))
    print(f"minivllm/core and minivllm/device/worker: {core:,} tokens; minivllm: {package:,} tokens")
    if core > CORE:
        over.append(f"minivllm/core and minivllm/device/worker have {core} tokens; at most {CORE}")
    if package > PACKAGE:
        over.append(f"minivllm has {package} tokens; at most {PACKAGE}")
    return over


def main() -> None:
    """Print the figures of each folder and exit with the budgets that are exceeded."""
    found = packages()
    if "--write" in sys.argv[1:]:
        write(found)
    print(f"{'folder':34} {'files':>5} {'lines':>6} {'longest':>7} {'density':>13} {'no verb':>7} {'fmt: skip':>9}")
    for name, f in found.items():
        verbs = len(f.verbless)
        print(f"{name:34} {f.files:5} {f.lines:6} {f.longest:7} {f.density:13.1f} {verbs:7} {f.skips:9}")
    over = exceeded(found)
    sys.exit("\n".join(over) if over else 0)


if __name__ == "__main__":
    main()
