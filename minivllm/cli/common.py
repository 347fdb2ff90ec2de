"""Functions that several commands use: add common flags, read the configuration, show warnings, open an engine.

Importing this module imports no large package, because every command imports it to parse the command line.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ConfigError, shown

if TYPE_CHECKING:
    from minivllm.config import Loaded

JsonObject = dict[str, Any]  # an object that is read from JSON or printed as JSON
SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "tokens to generate at most"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "share of the probability to draw from"),
    ("top_k", int, "tokens to draw from"),
    ("min_p", float, "least probability, as a share of the best token's"),
    ("repetition_penalty", float, "above 1 repeats less"),
    ("seed", int, "makes the draws repeatable"),
)


def add_switch(parser: argparse.ArgumentParser, flag: str, text: str) -> None:
    """Add a flag without a value, with ``text`` as its help."""
    parser.add_argument(flag, action="store_true", help=text)


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet``."""
    add_switch(parser, "--quiet", "show no progress of loading and capturing")


def add_repeatable(parser: argparse.ArgumentParser, flag: str, metavar: str, text: str) -> None:
    """Add a flag that may be given several times, with ``text`` as its help.  Its value is a list of texts."""
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=text)


def add_value(
    parser: argparse.ArgumentParser,
    flag: str,
    kind: Callable[[str], Any],
    metavar: str,
    text: str,
    default: Any = None,
) -> None:
    """Add a flag with a value that ``kind`` reads, with ``text`` as its help."""
    parser.add_argument(flag, type=kind, metavar=metavar, help=text, default=default)


def report(text: str) -> None:
    """Print a line to standard error, after the name of the program."""
    print(f"minivllm: {text}", file=sys.stderr)


def config_flags(
    parser: argparse.ArgumentParser, files: str = "later ones win", example: str = "e.g. scheduler.name=fcfs"
) -> None:
    """Add the flags ``--config``, ``--set`` and ``--allow-target``.

    ``files`` is a part of the help, about the use of several files; ``example`` is the help of ``--set``.
    """
    add_repeatable(parser, "--config", "FILE", f"TOML, YAML or JSON; {files}")
    add_repeatable(parser, "--set", "KEY=VALUE", example)
    add_repeatable(parser, "--allow-target", "MODULE", "allow plug-ins of this module, named as module:Class")


def target_flags(args: argparse.Namespace) -> JsonObject:
    """Return the option ``allow_targets`` if ``--allow-target`` was used, else no options."""
    return {"allow_targets": args.allow_target} if args.allow_target else {}


def read_config(files: Sequence[str], sets: Sequence[str], flags: Mapping[str, Any]) -> Loaded:
    """Return the configuration, read as ``load_config`` reads it, and make the modules of ``--allow-target``
    importable."""
    from minivllm.config import load_config

    loaded = load_config(files, sets, flags=flags)
    find_modules(loaded.engine.allow_targets, loaded.files)
    return loaded


def load(args: argparse.Namespace, files: Sequence[str] = ()) -> Loaded:
    """Return the configuration of a command, and print its notes to standard error.

    ``files`` are configuration files among the command's positional arguments.  Only these may have a [run] table,
    which is for `minivllm run`."""
    flags: JsonObject = {"model": args.model} if args.model is not None else {}
    flags |= target_flags(args)
    if getattr(args, "hf_overrides", None) is not None:
        flags["hf_overrides"] = json_table("--hf-overrides", args.hf_overrides)
    loaded = read_config([*files, *args.config], args.set, flags)
    print_notes(loaded.notes)
    show_warnings()
    return loaded if files else replace(loaded, run=type(loaded.run)())


def print_notes(notes: Iterable[str]) -> None:
    """Print the notes (hints about settings) of a configuration to standard error."""
    for note in notes:
        report(note)


def check_one_model(args: argparse.Namespace) -> None:
    """Move the positional MODEL into ``args.model``.  ConfigError if ``--model`` names one too."""
    if args.positional is None:
        return
    if args.model is not None:
        raise ConfigError(f"MODEL {shown(args.positional)} and --model {shown(args.model)}: expected only one of them")
    args.model = args.positional


def json_table(flag: str, text: str) -> JsonObject:
    """Return the JSON object in a flag's text.  ConfigError if the text is not a JSON object."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{flag} {text[:80]}: expected a JSON object: {exc}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} {text[:80]}: expected a JSON object, got a {type(found).__name__}")
    return found


def find_modules(allowed: Sequence[str], config_files: Sequence[str]) -> None:
    """Extend ``sys.path`` so that the ``allowed`` modules can be imported, also by worker processes.

    A module that is not importable yet is searched beside the configuration files, then in the current folder.  A
    console script's import path has neither of these folders.
    """
    folders = [Path(file).resolve().parent for file in config_files]
    for module in allowed:
        top = module.partition(":")[0].partition(".")[0]
        if not top.isidentifier() or top in sys.modules or importlib.util.find_spec(top) is not None:
            continue
        for folder in dict.fromkeys((*folders, Path.cwd())):
            if os.path.isfile(folder / f"{top}.py") or os.path.isfile(folder / top / "__init__.py"):
                sys.path.append(str(folder))
                break


def split_at_commas(text: str, flag: str) -> list[str]:
    """Return the parts of a flag's text between its commas, except commas within brackets or within a quoted value.

    A quote opens a value only where the value begins or within brackets.  ConfigError if a quote or a bracket is not
    closed."""
    parts = [""]
    depth = 0  # of brackets
    quote = ""  # the quote character that is open, "" for none
    escaped = False
    for char in text:
        if quote:
            ends = char == quote and not escaped
            escaped = char == "\\" and quote == '"' and not escaped
            if ends:
                quote = ""
        elif char in "\"'" and (depth or not parts[-1]):
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append("")
            continue
        parts[-1] += char
    if quote or depth:
        raise ConfigError(f"{flag}: a quote or bracket has no partner; expected pairs, and commas between values")
    return parts


def named_parts(texts: Sequence[str], flag: str) -> list[str]:
    """Return the plug-ins that a repeatable, comma-separated flag names, without duplicates.

    Each is a name, or an inline table of TOML such as ``{name="mine",options={a=1,b=2}}``.
    """
    names = [name.strip() for text in texts for name in split_at_commas(text, f"{flag} {shown(text)}")]
    return list(dict.fromkeys(filter(None, names)))


class ToStderr(logging.Handler):
    """A log handler that prints records to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        report(self.format(record))


def show_warnings() -> None:
    """Print warnings of the engine's log to standard error from now on."""
    log = logging.getLogger("minivllm")
    if not any(isinstance(handler, ToStderr) for handler in log.handlers):
        log.addHandler(ToStderr(logging.WARNING))


def record_path(args: argparse.Namespace, loaded: Loaded) -> str | None:
    """Return the file in which this run is recorded, None for no record.

    ConfigError if it cannot be written, or if it is the record that `minivllm run` repeats.
    """
    from minivllm.frontend.record.bill import check_writable

    is_run = hasattr(args, "file")  # the [run] table of a configuration is only for `minivllm run`
    path = getattr(args, "record", None) or None
    if path is None and is_run:
        path = loaded.run.record
    if path is None:
        return None
    check_writable(path)
    if is_run and os.path.abspath(args.file) == os.path.abspath(path):
        raise ConfigError(f"--record {path}: is the record of the run to repeat; choose another file")
    return path


def open_llm(loaded: Loaded, args: argparse.Namespace) -> Any:
    """Return a new LLM for a command.

    Its run is recorded if ``--record`` or the ``[run]`` table names a file."""
    # imported from ``minivllm``, not ``minivllm.frontend.llm``, because that sets up the environment before torch is
    # imported
    from minivllm import LLM
    from minivllm.frontend.progress_display import shown

    if logging.lastResort is not None:  # print the errors of hooks, which the engine itself only logs
        logging.getLogger("minivllm.hooks").addHandler(logging.lastResort)
    with shown(getattr(args, "quiet", False)):
        llm = LLM(config=loaded, record=record_path(args, loaded))
    if not gc.isenabled():  # see ``minivllm.cli.COLLECT_LATE``
        gc.freeze()
        gc.enable()
    return llm
