"""The layers of a configuration laid over one another and checked: files, environment, ``--set``, keywords."""

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
MOST_NAME = 256  # characters of a variable's name


@dataclass(frozen=True)
class Loaded:
    """A whole configuration.  ``origins`` says for each leaf that is no default where it came from, ``files`` which
    files were read, in the order in which they were laid, ``notes`` what a user should know."""

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
    """Lay the sources over one another and check the whole.  ConfigError names the source of what is wrong.

    ``files`` are TOML, YAML or JSON, ``sets`` are texts ``key=value``, ``flags`` are options that have a flag of their
    own on the command line, ``keywords`` are those of a Python call.  Each wins over the ones named before it, and the
    environment (``environ``, default ``os.environ``) comes after the files.
    """
    layers, names = Layers(SHAPE), []
    over = functools.partial(_lay_over, sets, dict(flags or {}), dict(keywords or {}), environ)
    for given in files:
        for file in read_chain(given, other=functools.partial(_ask_hooks, layers, over)):
            layers.add(_relative(file.values, Path(file.name).resolve().parent), file.where)
            names.append(file.name)
    over(layers)
    return _finish(layers, tuple(names))


def _ask_hooks(layers: Layers, over: Callable[[Layers], None], path: str) -> Mapping[str, Any] | None:
    """The table in a file of another format, if a hook reads it that all that is there without the file enables."""
    from .other_formats import read_by_hook

    there = copy.deepcopy(layers)
    over(there)
    return read_by_hook(path, there.tree.get("hooks"), there.tree.get("allow_targets"))


def _lay_over(
    sets: Sequence[str],
    flags: Mapping[str, Any],
    keywords: Mapping[str, Any],
    environ: Mapping[str, str] | None,
    layers: Layers,
) -> None:
    """Lay the environment, ``--set``, flags and keywords over the files."""
    environ = os.environ if environ is None else environ
    given: dict[tuple[str, ...], str] = {}
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX) and len(name) > MOST_NAME:
            raise ConfigError(f"{brief(name)}: a name of {len(name)} characters; want at most {MOST_NAME}")
        if name.startswith(ENV_PREFIX):  # sorted: a NAME comes before its OPTIONS
            top, *rest = name.removeprefix(ENV_PREFIX).lower().split("__")
            path = (ALIASES.get(top, top), *rest)
            if path in given:
                raise ConfigError(f"{'.'.join(path)} is given twice, as {given[path]} and as {name}")
            given[path] = name
            layers.put(path, parse_value(text), _always(name))
        elif name.startswith("MINIVLLM_") and name[9:].lower() in EngineConfig.model_fields:
            layers.notes.append(f"{name} is not read: want two underscores, {ENV_PREFIX}{name[9:]}")
    layers.notes += environment_notes(environ)
    layers.assign([_assignment(text) for text in sets], "--set", trusted=True)
    layers.add(flags, _always("command line"), trusted=True)
    layers.add(keywords, _always("keyword"), trusted=True)


def _always(source: str) -> Callable[[tuple[Any, ...]], str]:
    return lambda _: source


def _assignment(text: str) -> tuple[list[str], Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {shown(text)}: want key=value, for example --set scheduler.name=fcfs")
    return key.strip().split("."), parse_value(value)


def _finish(layers: Layers, files: tuple[str, ...]) -> Loaded:
    """Check the merged tree against the models."""
    values, origins = dict(layers.tree), layers.origins
    tables = {name: values.pop(name, {}) for name in TABLES}
    requires = _checked(RequiresConfig, tables["requires"], origins, "requires")
    check_requirements(requires.plugins, origins)
    engine = _checked(EngineConfig, values, origins)
    run = _checked(RunConfig, tables["run"], origins, "run")
    sampling = _sampling(tables["sampling"], origins)
    server = _checked(ServerConfig, tables["server"], origins, "server")
    return Loaded(engine, sampling, run, dict(origins), tuple(layers.notes), tuple(requires.plugins), files, server)


def _checked(model: Any, values: Mapping[str, Any], origins: Mapping[str, str], at: str = "") -> Any:
    try:
        return model(**values)
    except ConfigError as exc:
        found = [
            FieldFault(".".join(filter(None, (at, f.path))), f"{at}.{f.text}" if at else f.text) for f in exc.faults
        ]
        raise ConfigError("; ".join(sourced(found, origins))) from exc


def _sampling(values: dict[str, Any], origins: Mapping[str, str]) -> dict[str, Any]:
    from minivllm.core.interfaces.params import SamplingParams

    values, bias = dict(values), values.get("logit_bias")
    try:
        if bias is not None:  # the keys of a TOML table are strings
            values["logit_bias"] = {int(token): by for token, by in bias.items()}
        SamplingParams.make(**values)
    except RequestError as exc:
        raise ConfigError(f"{begins(source_of(origins, f'sampling.{exc.param}'))}sampling: {exc}") from exc
    except (ValueError, AttributeError):
        at = begins(source_of(origins, "sampling.logit_bias"))
        raise ConfigError(f"{at}sampling: logit_bias={shown(bias)}: want a table with token ids as keys") from None
    return values


def _relative(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the paths in a file, which are relative to it, relative to the current folder.  A model is a path if it
    looks like one or is there as a directory."""
    for key in ("model", "tokenizer"):
        text = values.get(key)
        if (
            isinstance(text, str)
            and text not in ("", *IN_PACKAGE)
            and (text.startswith(("./", "../")) or os.path.isdir(folder / text))
        ):
            values[key] = os.path.normpath(folder / text)
    generation = values.get("generation_config")
    if isinstance(generation, str) and generation not in ("", "auto", *NONE) and generation[:1] != "~":
        values["generation_config"] = os.path.normpath(folder / generation)
    place = values.get("download_dir")
    if isinstance(place, str) and place and not place.startswith("~"):
        values["download_dir"] = os.path.normpath(folder / place)
    template = values.get("chat_template")
    if isinstance(template, str) and template and not (is_template(template) or is_name(template, folder)):
        values["chat_template"] = os.path.normpath(folder / template)
    run = values.get("run")
    if isinstance(run, dict):
        for key in ("prompts_file", "output", "record"):
            if isinstance(run.get(key), str):
                run[key] = os.path.normpath(folder / run[key])
    server = values.get("server")
    if isinstance(server, dict):
        for key in ("api_key_file", "steering_dir", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
            if isinstance(server.get(key), str) and server[key]:
                server[key] = os.path.normpath(folder / server[key])
    return values
