"""Shared code of tests of grammars and of structured answers."""

from __future__ import annotations


def deep(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema
