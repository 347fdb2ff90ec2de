"""What XGrammar holds of a JSON schema.  It passes over keywords that it does not know; here they are found, so that
they are refused.  ``tests/schemas`` is what the lists were tried on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NOTES = frozenset((
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly",
    "$defs", "definitions",
))  # fmt: skip
HELD = frozenset((
    "type", "enum", "const", "anyOf", "allOf", "$ref", "properties", "required", "additionalProperties",
    "patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "pattern", "format",
))  # fmt: skip
FORMATS = frozenset(("uuid", "email"))
ALONE = ("anyOf", "allOf", "$ref", "enum", "const")  # what stands beside one of these is passed over
NAMED = ("properties", "patternProperties", "$defs", "definitions")


def unheld(schema: Any) -> Iterator[str]:
    """What an answer need not keep to, in words."""
    if not isinstance(schema, dict):
        return
    own = set(schema) - NOTES
    yield from sorted(own - HELD)
    for key in ALONE:
        beside = sorted(own - {key} - ({"type"} if key in ("enum", "const") else set()))
        if key in schema and beside:
            yield f"{', '.join(beside)} beside {key}"
            break
    if len(schema.get("allOf", ())) > 1:
        yield "allOf of several"
    if "format" in schema and schema["format"] not in FORMATS:
        yield f"the format {schema['format']}"
    if own & {"pattern", "format"} and own & {"minLength", "maxLength"}:
        yield "minLength and maxLength beside pattern or format"
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            inner = list(value.values())
        elif key in ("anyOf", "allOf", "prefixItems") and isinstance(value, list):
            inner = value
        else:
            inner = [value] if key in ("items", "additionalProperties") else []
        for part in inner:
            yield from unheld(part)
