"""What the tests of grammars and of structured answers share."""

from __future__ import annotations


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema
