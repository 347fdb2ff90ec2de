"""A JSON Schema of configuration files over the plug-ins that are installed, for editors: they complete names and
options, and mark what is wrong.  Draft 7, which the editors' TOML and YAML servers read.

A seam is one of: a name, a ``module:Class``, or a table; and a table is one of: one for each plug-in with the options
of that one, one for ``auto``, and one without a name for a file that lies over another.  The specs and the models of
the options are imported, implementations are not.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from minivllm.config.server import ServerConfig
from minivllm.config.values import (
    ALIASES,
    DTYPE_NAMES,
    SEAMS,
    SEVERAL,
    SHAPE,
    EngineConfig,
    RequiresConfig,
    RunConfig,
)
from minivllm.core import declared_params
from minivllm.errors import PluginError
from minivllm.registration.spec import KINDS, OPTION_OF
from minivllm.registry import Catalog, Entry, Registry

DRAFT = "http://json-schema.org/draft-07/schema#"
Schema = dict[str, Any]

JSON_TYPES = {float: "number", int: "integer", bool: "boolean", str: "string", list: "array", dict: "object"}
BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
TARGET: Schema = {
    "type": "string", "pattern": rf"^{_NAME}(\.{_NAME})*:{_NAME}(\.{_NAME})*$",
    "description": "module:Class, for an experiment; it runs only with --allow-target MODULE",
}  # fmt: skip
ABSENT: Schema = {
    "type": "string", "pattern": r"^(?!minivllm/)[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$",
    "description": "a package that may not be installed",
}  # fmt: skip


def config_schema(catalog: Catalog) -> Schema:
    """The schema as JSON values.  A plug-in that is broken or blocked becomes a ``$comment`` of its seam."""
    definitions: Schema = {}
    properties = _fields(EngineConfig, definitions)
    for name in SHAPE.not_in_files:
        del properties[name]
    properties["dtype"]["enum"] += [word for word in DTYPE_NAMES if word not in properties["dtype"]["enum"]]
    kinds = {OPTION_OF.get(kind, kind): kind for kind in KINDS}
    for option in (*SEAMS, *SEVERAL):
        if option not in kinds:  # named like plug-ins, chosen by somebody else
            items = properties[option]["items"]
            properties[option]["items"] = {"anyOf": [{"type": "string"}, items]}
        else:
            properties[option] = _seam(catalog[kinds[option]], definitions, many=option in SEVERAL)
    properties.update({alias: properties[name] for alias, name in ALIASES.items()})
    properties["extends"] = {
        "description": "a file, or files, that this one lies over; relative to this file",
        "oneOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
    }
    properties["sampling"] = _sampling(catalog)
    properties["run"] = _table(RunConfig, definitions)
    properties["server"] = _table(ServerConfig, definitions)
    properties["requires"] = _table(RequiresConfig, definitions)
    return {
        "$schema": DRAFT, "title": "minivllm configuration", "type": "object", "properties": properties,
        "additionalProperties": False, "definitions": definitions,
    }  # fmt: skip


def _seam(registry: Registry, definitions: Schema, many: bool) -> Schema:
    kind, names, tables, broken = registry.kind.name, [], [], []
    for entry in registry.entries:
        if entry.blocked:
            broken.append(f"{entry} is blocked by MINIVLLM_PLUGINS")
            continue
        try:
            spec = registry.spec(entry)
            options = _options(registry, entry, spec, definitions)
        except PluginError as exc:
            broken.append(str(exc).partition("\n")[0])
            continue
        own = _names(registry, entry)
        names += own if not options or not options.get("required") else []
        tables.append(_plugin_table(own, spec.summary, options))
    known = [] if many else ["auto"]
    ways: list[Schema] = [
        {"type": "string", "enum": [*known, *names]},
        TARGET,
        *([] if many else _auto_tables(names)),
        *tables,
        _target_table(),
    ]
    found: Schema = {"oneOf": ways, **({"$comment": "; ".join(broken)} if broken else {})}
    if not many:
        return {"description": f"which plug-in fills the seam {kind!r}", **found}
    return {"description": f"plug-ins of the seam {kind!r}, in order", "type": "array", "items": found}


def _names(registry: Registry, entry: Entry) -> list[str]:
    """What the plug-in may be called: a bare name that several packages offer says which of them only if built in."""
    same = [e for e in registry.entries if e.name == entry.name and not e.blocked]
    return [entry.name, entry.label] if entry.builtin or len(same) == 1 else [entry.label]


def _plugin_table(names: list[str], summary: str, options: Schema | None) -> Schema:
    required = ["name", "options"] if options and options.get("required") else ["name"]
    inner = options if options is not None else {"type": "object", "maxProperties": 0, "description": "it has none"}
    name: Schema = {"const": names[0]} if len(names) == 1 else {"enum": names}
    return {
        "title": names[0], "description": summary, "type": "object",
        "properties": {"name": {**name, "description": summary}, "options": inner},
        "required": required, "additionalProperties": False,
    }  # fmt: skip


def _auto_tables(names: list[str]) -> list[Schema]:
    """``name = "auto"`` with an order, and what a file gives that lies over another with the name in it."""
    prefer = {
        "type": "array",
        "description": "take the first of these that can serve",
        "items": {"anyOf": [{"type": "string", "enum": names}, ABSENT, TARGET]},
    }
    return [
        {
            "title": "auto",
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {"name": {"const": "auto", "description": "the best that can serve"}, "prefer": prefer},
        },
        {
            "title": "over another file",
            "type": "object",
            "maxProperties": 1,
            "additionalProperties": False,
            "properties": {"prefer": prefer, "options": {"type": "object"}},
        },
    ]


def _target_table() -> Schema:
    return {
        "title": "module:Class",
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {"name": TARGET, "options": {"type": "object"}},
    }


def _options(registry: Registry, entry: Entry, spec: Any, definitions: Schema) -> Schema | None:
    """The schema of a plug-in's options; None if it takes none.  PluginError if they cannot be imported."""
    if not spec.options:
        return None
    model = registry.options_model(entry, spec)
    try:
        return _hoist(model.model_json_schema(), f"{registry.kind.name}.{entry.dist}.{entry.name}", definitions)
    except Exception as exc:  # a field of a type that JSON Schema cannot describe
        return {"type": "object", "$comment": f"{spec.options} has no JSON Schema: {type(exc).__name__}"}


def _fields(model: Any, definitions: Schema) -> Schema:
    return _hoist(model.model_json_schema(), model.__name__, definitions)["properties"]


def _table(model: Any, definitions: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": _fields(model, definitions)}


def _hoist(schema: Any, prefix: str, definitions: Schema) -> Schema:
    """Without titles that only repeat names, and with the inner definitions at the top of the whole, where references
    are looked up."""
    for name, inner in schema.pop("$defs", {}).items():
        definitions[f"{prefix}.{name}"] = _renamed(inner, prefix)
    return _renamed(schema, prefix)


def _renamed(node: Any, prefix: str) -> Any:
    if isinstance(node, list):
        return [_renamed(inner, prefix) for inner in node]
    if not isinstance(node, Mapping):
        return node
    if "$ref" in node:
        return {"$ref": f"#/definitions/{prefix}.{node['$ref'].rpartition('/')[2]}"}  # draft 7 knows nothing beside it
    return {
        key: {name: _renamed(inner, prefix) for name, inner in value.items()}
        if key == "properties"
        else value
        if key in ("default", "enum", "const", "examples")
        else _renamed(value, prefix)
        for key, value in node.items()
        if key != "title" or not isinstance(value, str)
    }


def _sampling(catalog: Catalog) -> Schema:
    """The sampling parameters that a file can hold: all but functions, and those that plug-ins declare."""
    from pydantic import TypeAdapter

    from minivllm.core.interfaces.params import SamplingParams

    hints, properties = typing.get_type_hints(SamplingParams), {}
    for field in dataclasses.fields(SamplingParams):
        if not field.name.endswith("_fn") and field.name != "logits_processors":
            properties[field.name] = TypeAdapter(hints[field.name]).json_schema()
            if isinstance(field.default, (bool, int, float, str)):
                properties[field.name]["default"] = field.default
    properties |= {name: _declared(one) for name, one in declared_params.offered(catalog).items()}
    return {
        "description": "how tokens are drawn, and when to stop",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _declared(one: declared_params.Declaration) -> Schema:
    param = one.param
    kind: Schema = {"type": JSON_TYPES[param.kind], **{BOUNDS[name]: getattr(param, name) for name in BOUNDS}}
    kind = {key: value for key, value in kind.items() if value is not None}
    if param.choices:
        kind["enum"] = list(param.choices)
    found = {"anyOf": [kind, {"type": "null"}]} if param.default is None else {**kind, "default": param.default}
    return {**found, "description": f"{param.summary} ({', '.join(one.by)})".lstrip()}
