"""Resolve a ``$ref`` within a JSON schema."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

INDEX = re.compile("[0-9]{1,9}")


def pointer(schema: Any, reference: Any) -> str | None:
    """Return the JSON pointer of a reference into the schema itself ("#..." or "<the schema's $id>#..."), unchanged.

    Return None for references to other schemas, for anchors, and for values that are not references.
    """
    if not isinstance(reference, str):
        return None
    base, _, path = reference.partition("#")
    ident = schema.get("$id") if isinstance(schema, dict) else None
    is_pointer = not path or path.startswith("/")
    return path if base in ("", ident) and is_pointer else None


def find(schema: Any, reference: Any) -> Any:
    """Return the part of the schema that a reference names, or None if the reference is to another document or to a
    missing part."""
    path = pointer(schema, reference)
    if path is None:
        return None
    found = schema
    for part in path.split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif isinstance(found, list) and INDEX.fullmatch(part) and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found
