"""An extension of griffe: the comment of a field or constant is its text in the reference.

The interfaces describe fields by comments, behind them or in the lines above:

    block: int  # tokens per block
"""

from __future__ import annotations

import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

from griffe import Docstring, Extension, Object

FOR_TOOLS = ("# noqa", "# type:", "# fmt:", "# ---")


@cache
def comments(path: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Return the comments of a file by line: those behind code, and those that have a line of their own."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    behind: dict[int, str] = {}
    own: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(FOR_TOOLS):
            row, column = token.start
            (behind if lines[row - 1][:column].strip() else own)[row] = token.string.lstrip("# ")
    return behind, own


def comment_of(path: Path, first: int, last: int) -> str:
    """Return the comment that belongs to the statement in lines ``first`` to ``last``, or ""."""
    behind, own = comments(path)
    if last in behind:
        return behind[last]
    above: list[str] = []
    while (first := first - 1) in own:
        above.insert(0, own[first])
    return " ".join(above)


class Comments(Extension):
    """Give an attribute without a docstring its comment as one, and end "as follows::" with one colon."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("::\n\n", ":\n\n")
        elif obj.is_attribute and obj.lineno and isinstance(obj.filepath, Path):
            text = comment_of(obj.filepath, obj.lineno, obj.endlineno or obj.lineno)
            if text:
                obj.docstring = Docstring(text, lineno=obj.lineno, parent=obj)
