"""Draw texts of the project by seed, for a reader who restates each one and then compares it with the code.

    python .ci/readers.py 7                    print 60 texts of minivllm/ and docs/, each with its signature only
    python .ci/readers.py 7 --code             print the code of each place too
    python .ci/readers.py 7 --under minivllm/core --count 20

A text is the docstring of a function, class or module, a block of comment lines, the message of a raised error, or a
paragraph or row of a page.  A draw passes with 53 of 60 restatements that the code confirms.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OWNERS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FEWEST_WORDS = 4  # a shorter text says nothing that a reader could misunderstand
CODE_LINES = 45  # printed of a place
MARKS = ("noqa", "type:", "fmt:", "ruff", "pragma", "!", "---")  # comments for tools, and headings


@dataclass(frozen=True)
class Place:
    """A text: its file, line and kind, the line of code above it, and the last line of the code that it describes."""

    path: str
    line: int
    kind: str
    text: str
    head: str = ""
    end: int = 0


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the first line of a definition, with all parameters."""
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"def {node.name}({ast.unparse(node.args)}){returns}"


def docstrings(path: str, tree: ast.Module) -> Iterator[Place]:
    """Yield the docstrings of a module."""
    if text := ast.get_docstring(tree):
        yield Place(path, 1, "module", text, end=CODE_LINES)
    for node in ast.walk(tree):
        if isinstance(node, OWNERS) and (text := ast.get_docstring(node)):
            yield Place(path, node.lineno, "docstring", text, signature(node), node.end_lineno or node.lineno)


def messages(path: str, tree: ast.Module) -> Iterator[Place]:
    """Yield the messages of raised errors, with expressions in braces."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = [one for one in node.exc.args if isinstance(one, (ast.JoinedStr, ast.Constant))]
            for one in texts:
                end = node.end_lineno or node.lineno
                yield Place(path, node.lineno, "message", ast.unparse(one), ast.unparse(node.exc.func), end)


def comments(path: str, source: str) -> Iterator[Place]:
    """Yield each block of comment lines, and each comment at the end of a line with its code."""
    lines = source.splitlines()
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text, line = token.string.lstrip("# "), token.start[0]
        if text.startswith(MARKS):
            continue
        before = lines[line - 1][: token.start[1]].strip()
        if before:
            yield Place(path, line, "comment", text, before, line)
            continue
        if block and line == start + len(block):
            block.append(text)
            continue
        if block:
            yield Place(path, start, "comment", " ".join(block), end=start + len(block) + 8)
        block, start = [text], line
    if block:
        yield Place(path, start, "comment", " ".join(block), end=start + len(block) + 8)


def paragraphs(path: str, source: str) -> Iterator[Place]:
    """Yield the paragraphs, list items and table rows of a page outside blocks of code."""
    fenced = False
    heading, text, start = "", "", 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if re.fullmatch(r"[|:\s-]*[|-][|:\s-]*", line):
            text = ""  # the line above is the head of a table
            continue
        if line.lstrip().startswith("<!--"):
            continue
        ends = fenced or not line.strip() or line.startswith("#") or bool(re.match(r"\s*([-*|]|\d+\.) ", line))
        if ends and text:
            yield Place(path, start, "page", text, heading)
            text = ""
        if line.startswith("#") and not fenced:
            heading = line
        elif line.strip() and not fenced:
            start, text = (start, f"{text} {line.strip()}") if text else (number, line.strip())


def places() -> list[Place]:
    """Return all places of the package and the pages, but no templates of plug-ins."""
    found: list[Place] = []
    for file in sorted((ROOT / "minivllm").rglob("*.py")):
        path, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        if "scaffold/templates" in path:
            continue
        tree = ast.parse(source)
        found += [*docstrings(path, tree), *messages(path, tree), *comments(path, source)]
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        found += paragraphs(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))
    return [place for place in found if len(place.text.split()) >= FEWEST_WORDS]


def main() -> None:
    """Print the texts of a draw."""
    parser = argparse.ArgumentParser(description="draw texts of the project by seed")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--under", default="", help="draw from paths that begin with this")
    parser.add_argument("--code", action="store_true", help="print the code of each place")
    given = parser.parse_args()
    candidates = [place for place in places() if place.path.startswith(given.under)]
    drawn = random.Random(given.seed).sample(candidates, min(given.count, len(candidates)))
    for number, place in enumerate(drawn, 1):
        print(f"\n{number}. {place.path}:{place.line} ({place.kind}) {place.head}\n    {place.text}")
        if given.code and place.end:
            lines = (ROOT / place.path).read_text(encoding="utf-8").splitlines()
            print("\n".join(lines[place.line - 1 : min(place.end, place.line + CODE_LINES)]))


if __name__ == "__main__":
    main()
