"""Merge and check the sources of a configuration: files, environment, ``--set``, flags, keywords."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm.config.files import parse_value, read_chain
from minivllm.config.layers import Layers
from minivllm.config.other_names import environment_notes
from minivllm.config.requires import check_requirements
from minivllm.config.server import ServerConfig
from minivllm.config.values import ALIASES, SHAPE, TABLES, EngineConfig, RequiresConfig, RunConfig
from minivllm.device.loading.generation import NONE
from minivllm.device.loading.hf_config import IN_PACKAGE
from minivllm.errors import ConfigError, RequestError, brief, shown
from minivllm.runtime.text.template import is_name, is_template
from minivllm.validation import FieldFault, begins, source_of, sourced

ENV_PREFIX = "MINIVLLM__"
MOST_NAME = 256  # largest length of a variable's name


@dataclass(frozen=True)
class Loaded:
    """A complete configuration.  ``origins`` maps each leaf that is not a default to its source.  ``files`` are the
    files that were read, in ascending precedence.  ``notes`` are messages for the user."""

    engine: EngineConfig
    sampling: Mapping[str, Any] = field(default_factory=dict)
    run: RunConfig = field(default_factory=RunConfig)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    server: ServerConfig = field(default_factory=ServerConfig)


def load_config(
    files: Sequence[str | os.PathLike[str]] = (),
    sets: Sequence[str] = (),
    keywords: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Loaded:
    """Return the configuration from all sources, merged and checked.  ConfigError names the source of a wrong value.

    ``files`` are TOML, YAML or JSON files.  ``sets`` are texts ``key=value``.  ``flags`` are options with a separate
    flag on the command line.  ``keywords`` are arguments of a Python call.  Sources in ascending precedence: files,
    environment (``environ``, by default ``os.environ``), sets, flags, keywords.
    """
    layers = Layers(SHAPE)
    names: list[str] = []
    over = functools.partial(_lay_over, sets, dict(flags or {}), dict(keywords or {}), environ)
    by_hook = functools.partial(_read_by_hook, layers, over)
    for path in files:
        for file in read_chain(path, other=by_hook):
            folder = Path(file.name).resolve().parent
            layers.add(_relative(file.values, folder), file.where)
            names.append(file.name)
    over(layers)
    return _finish(layers, tuple(names))


def option_path(name: str) -> str:
    """Return the path of an option or a sampling parameter in a configuration, such as ``evictor`` or ``sampling.n``.
    A name of vLLM, such as ``quantization``, gives the path of its option.  "" for an unknown name."""
    from minivllm.core.interfaces.params import SamplingParams

    name = ALIASES.get(name, name)
    if name in EngineConfig.model_fields:
        return name
    return f"sampling.{name}" if name in SamplingParams.__dataclass_fields__ else ""


def _read_by_hook(layers: Layers, over: Callable[[Layers], None], path: str) -> Mapping[str, Any] | None:
    """Return the table in a file of another format as a hook reads it, or None if no hook reads the file.

    Only hooks are called that the files read so far and all other sources enable.
    """
    others = copy.deepcopy(layers)
    over(others)
    enabled = others.tree.get("hooks")
    if not enabled:
        return None
    from minivllm.registry import Catalog
    from minivllm.runtime.hooks.manager import read_config

    from .resolve import choose_hooks

    targets = others.tree.get("allow_targets") or []
    config = EngineConfig(hooks=enabled, allow_targets=targets)
    hooks = choose_hooks(config, Catalog.discover())
    found = read_config(hooks, path)
    return None if found is None else found[1]


def _lay_over(
    sets: Sequence[str],
    flags: Mapping[str, Any],
    keywords: Mapping[str, Any],
    environ: Mapping[str, str] | None,
    layers: Layers,
) -> None:
    """Merge the environment, ``--set``, flags and keywords, in this order, over the options of files in ``layers``.

    ``environ`` None means ``os.environ``.  ConfigError for a malformed or doubled setting."""
    environ = os.environ if environ is None else environ
    variables: dict[tuple[str, ...], str] = {}
    for name, text in sorted(environ.items()):  # sorted, so that NAME precedes OPTIONS
        if name.startswith(ENV_PREFIX):
            if len(name) > MOST_NAME:
                raise ConfigError(
                    f"environment variable {brief(name)}: a name of {len(name)} characters; expected at most "
                    f"{MOST_NAME}"
                )
            lower = name.removeprefix(ENV_PREFIX).lower()
            top, *rest = lower.split("__")
            path = (ALIASES.get(top, top), *rest)
            if path in variables:
                raise ConfigError(
                    f"{'.'.join(path)} is given twice, as {variables[path]} and as {name}; unset one of them"
                )
            variables[path] = name
            layers.put(path, parse_value(text), _always(name))
        elif name.startswith("MINIVLLM_") and name[9:].lower() in EngineConfig.model_fields:
            layers.notes.append(f"{name} is not read: write two underscores, {ENV_PREFIX}{name[9:]}")
    layers.notes += environment_notes(environ)
    layers.assign([_assignment(text) for text in sets], "--set", trusted=True)
    layers.add(flags, _always("command line"), trusted=True)
    layers.add(keywords, _always("keyword"), trusted=True)


def _always(source: str) -> Callable[[tuple[Any, ...]], str]:
    """Return a function that returns ``source`` for every path."""
    return lambda _: source


def _assignment(text: str) -> tuple[list[str], Any]:
    """Return the path and the value of a ``--set`` text.  ConfigError unless it is of the form key=value."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {shown(text)}: expected key=value, for example --set scheduler.name=fcfs")
    return key.strip().split("."), parse_value(value)


def _finish(layers: Layers, files: tuple[str, ...]) -> Loaded:
    """Check the merged options with the models of the configuration (such as ``EngineConfig``), and return the
    result."""
    values = dict(layers.tree)
    origins = layers.origins
    tables = {name: values.pop(name, {}) for name in TABLES}
    requires = _checked(RequiresConfig, tables["requires"], origins, "requires")
    check_requirements(requires.plugins, origins)
    engine = _checked(EngineConfig, values, origins)
    run = _checked(RunConfig, tables["run"], origins, "run")
    sampling = _sampling(tables["sampling"], origins)
    server = _checked(ServerConfig, tables["server"], origins, "server")
    notes = tuple(layers.notes)
    packages = tuple(requires.plugins)
    return Loaded(engine, sampling, run, dict(origins), notes, packages, files, server)


def _checked(model: Any, values: Mapping[str, Any], origins: Mapping[str, str], at: str = "") -> Any:
    """Return an object of the class ``model`` (such as EngineConfig) with these options.

    ConfigError names the source of each wrong value.  ``at`` is the name of the table with the options, "" for the top
    level."""
    try:
        return model(**values)
    except ConfigError as exc:
        faults = exc.faults
        if at:
            faults = tuple(_inside(at, fault) for fault in faults)
        raise ConfigError("; ".join(sourced(faults, origins))) from exc


def _inside(table: str, fault: FieldFault) -> FieldFault:
    """Return a fault with the name of the table in its path and text."""
    path = f"{table}.{fault.path}" if fault.path else table
    return FieldFault(path, f"{table}.{fault.text}")


def _sampling(values: dict[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    """Return the sampling parameters of the table ``[sampling]`` after checking them, with numbers as the keys of
    ``logit_bias``.  ConfigError names the source of a wrong value."""
    from minivllm.core.interfaces.params import SamplingParams

    values = dict(values)
    bias = values.get("logit_bias")
    try:
        if bias is not None:  # the keys of a TOML table are texts, and token ids are numbers
            values["logit_bias"] = {int(token): by for token, by in bias.items()}
        SamplingParams.make(**values)
    except RequestError as exc:
        at = begins(source_of(origins, f"sampling.{exc.param}"))
        raise ConfigError(f"{at}sampling: {exc}") from exc
    except (ValueError, AttributeError):
        at = begins(source_of(origins, "sampling.logit_bias"))
        raise ConfigError(f"{at}sampling: logit_bias={shown(bias)}: expected a table with token ids as keys") from None
    return values


def _relative_module(module: str, folder: Path) -> str:
    """Return an adapter option NAME=PATH with a path relative to the current folder, for a path that is relative to
    ``folder``."""
    name, _, path = module.partition("=")
    return f"{name}={os.path.normpath(folder / path)}" if path else module


def _relative(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options of a file with paths relative to the current folder instead of the file's ``folder``.

    The name of a model is a path if it begins with ./ or ../, or is a directory in ``folder``.
    """

    def convert(table: Any, key: str, is_path: Callable[[str], bool]) -> None:
        """Convert the text at a key if it is a path."""
        text = table.get(key) if isinstance(table, dict) else None
        if isinstance(text, str) and is_path(text):
            table[key] = os.path.normpath(folder / text)

    def is_model_path(text: str) -> bool:
        """Return whether the name of a model is a path."""
        if text in ("", *IN_PACKAGE):
            return False
        return text.startswith(("./", "../")) or os.path.isdir(folder / text)

    def is_template_path(text: str) -> bool:
        """Return whether a chat template is a path, and not a template or the name of one."""
        return bool(text) and not (is_template(text) or is_name(text, folder))

    def is_generation_path(text: str) -> bool:
        """Return whether the value of ``generation_config`` is a path."""
        return text not in ("", "auto", *NONE) and text[:1] != "~"

    convert(values, "model", is_model_path)
    convert(values, "tokenizer", is_model_path)
    convert(values, "generation_config", is_generation_path)
    convert(values, "download_dir", lambda text: text[:1] not in ("", "~"))
    convert(values, "chat_template", is_template_path)
    for key in ("prompts_file", "output", "record"):
        convert(values.get("run"), key, lambda text: True)
    server = values.get("server")
    modules = server.get("lora_modules") if isinstance(server, dict) else None
    if isinstance(server, dict) and isinstance(modules, list) and all(isinstance(module, str) for module in modules):
        server["lora_modules"] = [_relative_module(module, folder) for module in modules]
    own = ("api_key_file", "lora_dir", "weights_dir", "steering_dir", "responses_dir", "uds")
    for key in (*own, "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        convert(server, key, bool)
    return values
