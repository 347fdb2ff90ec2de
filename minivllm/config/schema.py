"""A JSON Schema of configuration files for the installed plug-ins.  Editors use it to complete names and options and to
mark errors.  It is Draft 7, which the TOML and YAML servers of editors support.

The value of a seam is a name, a ``module:Class``, or a table.  There is a schema of the table for each plug-in with its
options, one for ``auto``, and one without a name for a file that extends another file.  The specs and the option models
are imported; implementations are not.
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
    """Return the JSON Schema of configuration files as JSON values.

    A broken or blocked plug-in is only mentioned, in a ``$comment`` of the option for its kind of plug-in."""
    definitions: Schema = {}
    properties = _fields(EngineConfig, definitions)
    for name in SHAPE.not_in_files:
        del properties[name]
    dtypes = properties["dtype"]["enum"]
    dtypes += [word for word in DTYPE_NAMES if word not in dtypes]
    kinds = {OPTION_OF.get(kind, kind): kind for kind in KINDS}
    for option in (*SEAMS, *SEVERAL):
        if option not in kinds:  # an option with plug-in names that is not a seam of the registry
            items = properties[option]["items"]
            properties[option]["items"] = {"anyOf": [{"type": "string"}, items]}
        else:
            registry = catalog[kinds[option]]
            properties[option] = _seam(registry, definitions, many=option in SEVERAL)
    for alias, name in ALIASES.items():
        properties[alias] = properties[name]
    file = {"type": "string", "minLength": 1}
    properties["extends"] = {
        "description": "a file, or files, whose options apply where this file sets none; relative to this file",
        "oneOf": [file, {"type": "array", "items": file}],
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
    """Return the schema of the option that chooses a plug-in of one kind, or a list of them if ``many``."""
    kind = registry.kind.name
    names: list[str] = []
    tables: list[Schema] = []
    broken: list[str] = []
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
        entry_names = _names(registry, entry)
        if not options or not options.get("required"):
            names += entry_names
        tables.append(_plugin_table(entry_names, spec.summary, options))
    tables.append(_target_table())
    if not many:
        tables = [*_auto_tables(names), *tables]
    words = names if many else ["auto", *names]
    schema: Schema = {"oneOf": [{"type": "string", "enum": words}, TARGET, *tables]}
    if broken:
        schema["$comment"] = "; ".join(broken)
    if not many:
        return {"description": f"the plug-in of the seam {kind!r}", **schema}
    text = f"plug-ins of the seam {kind!r}, in order"
    if kind in SHAPE.alone:
        return {"description": text, "oneOf": [*schema["oneOf"], {"type": "array", "items": schema}]}
    return {"description": text, "type": "array", "items": schema}


def _names(registry: Registry, entry: Entry) -> list[str]:
    """Return the names of a plug-in.  The short name of an external plug-in counts only if no other package offers
    it."""
    same = [e for e in registry.entries if e.name == entry.name and not e.blocked]
    if entry.builtin or len(same) == 1:
        return [entry.name, entry.label]
    return [entry.label]


def _plugin_table(names: list[str], summary: str, options: Schema | None) -> Schema:
    """Return the schema of the table of a plug-in: its ``name``, one of ``names``, and its ``options``."""
    required = ["name"]
    if options and options.get("required"):
        required.append("options")
    inner = options
    if inner is None:
        inner = {"type": "object", "maxProperties": 0, "description": "it has none"}
    name: Schema = {"enum": names}
    if len(names) == 1:
        name = {"const": names[0]}
    return {
        "title": names[0], "description": summary, "type": "object",
        "properties": {"name": {**name, "description": summary}, "options": inner},
        "required": required, "additionalProperties": False,
    }  # fmt: skip


def _auto_tables(names: list[str]) -> list[Schema]:
    """Return the schemas of a table with ``name = "auto"``, and of a table without a name in a file that extends
    another one."""
    items = {"anyOf": [{"type": "string", "enum": names}, ABSENT, TARGET]}
    prefer = {"type": "array", "description": "choose the first suitable plug-in of these", "items": items}
    name = {"const": "auto", "description": "the best suitable plug-in"}
    closed: Schema = {"type": "object", "additionalProperties": False}
    auto = {"title": "auto", "required": ["name"], "properties": {"name": name, "prefer": prefer}}
    properties = {"prefer": prefer, "options": {"type": "object"}}
    unnamed = {"title": "over another file", "maxProperties": 1, "properties": properties}
    return [closed | auto, closed | unnamed]


def _target_table() -> Schema:
    """Return the schema of a table whose name is a ``module:Class``."""
    return {
        "title": "module:Class",
        "type": "object",
        "required": ["name"],
        "additionalProperties": False,
        "properties": {"name": TARGET, "options": {"type": "object"}},
    }


def _options(registry: Registry, entry: Entry, spec: Any, definitions: Schema) -> Schema | None:
    """Return the schema of a plug-in's options, or None if it takes none.  PluginError if they cannot be imported."""
    if not spec.options:
        return None
    model = registry.options_model(entry, spec)
    try:
        return _hoist(model.model_json_schema(), f"{registry.kind.name}.{entry.dist}.{entry.name}", definitions)
    except Exception as exc:  # a type of a plug-in's field that JSON Schema cannot describe
        return {"type": "object", "$comment": f"{spec.options} has no JSON Schema: {type(exc).__name__}"}


def _fields(model: Any, definitions: Schema) -> Schema:
    """Return the schemas of a model's fields."""
    return _hoist(model.model_json_schema(), model.__name__, definitions)["properties"]


def _table(model: Any, definitions: Schema) -> Schema:
    """Return the schema of a table with the fields of a model."""
    return {"type": "object", "additionalProperties": False, "properties": _fields(model, definitions)}


def _hoist(schema: Any, prefix: str, definitions: Schema) -> Schema:
    """Return a schema without titles, and move its inner definitions to ``definitions`` under the prefix.

    References are resolved from the top of the whole schema.
    """
    for name, inner in schema.pop("$defs", {}).items():
        definitions[f"{prefix}.{name}"] = _renamed(inner, prefix)
    return _renamed(schema, prefix)


def _renamed(node: Any, prefix: str) -> Any:
    """Return a schema node without titles, in which references lead to the definitions with the prefix ``prefix``."""
    if isinstance(node, list):
        return [_renamed(inner, prefix) for inner in node]
    if not isinstance(node, Mapping):
        return node
    if "$ref" in node:
        # Draft 7 ignores other keys next to a reference.
        return {"$ref": f"#/definitions/{prefix}.{node['$ref'].rpartition('/')[2]}"}
    renamed: Schema = {}
    for key, value in node.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "properties":
            value = {name: _renamed(inner, prefix) for name, inner in value.items()}
        elif key not in ("default", "enum", "const", "examples"):
            value = _renamed(value, prefix)
        renamed[key] = value
    return renamed


def _sampling(catalog: Catalog) -> Schema:
    """Return the schema of the sampling parameters that a file can hold: all except functions, and those of
    plug-ins."""
    from pydantic import TypeAdapter

    from minivllm.core.interfaces.params import SamplingParams

    hints, properties = typing.get_type_hints(SamplingParams), {}
    for field in dataclasses.fields(SamplingParams):
        if not field.name.endswith("_fn") and field.name != "logits_processors":
            properties[field.name] = TypeAdapter(hints[field.name]).json_schema()
            if isinstance(field.default, (bool, int, float, str)):
                properties[field.name]["default"] = field.default
    for name, declaration in declared_params.offered(catalog).items():
        properties[name] = _declared(declaration)
    return {
        "description": "how tokens are drawn, and when to stop",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _declared(declaration: declared_params.Declaration) -> Schema:
    """Return the schema of a request parameter that plug-ins declare, with its bounds, choices, default and
    description."""
    param = declaration.param
    schema: Schema = {"type": JSON_TYPES[param.kind]}
    for name, keyword in BOUNDS.items():
        bound = getattr(param, name)
        if bound is not None:
            schema[keyword] = bound
    if param.choices:
        schema["enum"] = list(param.choices)
    if param.default is None:
        schema = {"anyOf": [schema, {"type": "null"}]}
    else:
        schema["default"] = param.default
    schema["description"] = f"{param.summary} ({', '.join(declaration.by)})".lstrip()
    return schema
