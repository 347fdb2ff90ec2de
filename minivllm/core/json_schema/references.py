"""Where a ``$ref`` within a JSON schema leads."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

INDEX = re.compile("[0-9]{1,9}")


def pointer(schema: Any, reference: Any) -> str | None:
    """The JSON pointer, as it is written, of a reference into the schema itself: "#..." or "<its $id>#...".  None for
    anything else: references elsewhere, anchors, and what is no reference."""
    if not isinstance(reference, str):
        return None
    base, _, path = reference.partition("#")
    own = schema.get("$id") if isinstance(schema, dict) else None
    return path if base in ("", own) and (not path or path.startswith("/")) else None


def find(schema: Any, reference: Any) -> Any:
    """What a reference into the schema leads to; None if it leads elsewhere, or nowhere."""
    path = pointer(schema, reference)
    if path is None:
        return None
    found = schema
    for part in path.split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and part in found:
            found = found[part]
        elif (
            isinstance(found, list)
            and part.isascii()
            and part.isdigit()
            and len(part) < 10
            and int(part) < len(found)
        ):
            found = found[int(part)]
        else:
            return None
    return found
