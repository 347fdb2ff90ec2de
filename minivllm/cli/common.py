"""What several commands do: read the configuration, show what is told of it, open an engine.

Importing it imports nothing heavy: it is part of parsing the command line.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.cli import record as recording
from minivllm.errors import ConfigError, shown

if TYPE_CHECKING:
    from minivllm.config import Loaded

SAMPLING: tuple[tuple[str, Any, str], ...] = (
    ("max_tokens", int, "tokens to generate at most"),
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "share of the probability to draw from"),
    ("top_k", int, "tokens to draw from"),
    ("min_p", float, "least probability, as a share of the best token's"),
    ("repetition_penalty", float, "above 1 repeats less"),
    ("seed", int, "makes the draws repeatable"),
)


def read_config(files: Sequence[str], sets: Sequence[str], flags: Mapping[str, Any]) -> Loaded:
    """As ``load_config``, for every command: modules that may be named as targets are found from here on."""
    from minivllm.config import load_config

    loaded = load_config(files, sets, flags=flags)
    find_modules(loaded.engine.allow_targets, loaded.files)
    return loaded


def load(args: argparse.Namespace, files: Sequence[str] = ()) -> Loaded:
    """The configuration of a command; what it has to say goes to standard error."""
    flags: dict[str, Any] = {"model": args.model} if args.model is not None else {}
    if args.allow_target:
        flags["allow_targets"] = args.allow_target
    if getattr(args, "hf_overrides", None) is not None:
        flags["hf_overrides"] = json_table("--hf-overrides", args.hf_overrides)
    loaded = read_config([*files, *args.config], args.set, flags)
    for note in loaded.notes:
        print(f"minivllm: {note}", file=sys.stderr)
    show_warnings()
    # the [run] table of a --config file is about `minivllm run`
    return loaded if files else replace(loaded, run=type(loaded.run)())


def json_table(flag: str, text: str) -> dict[str, Any]:
    """Return the JSON object in a flag's text.  ConfigError if the text is not one."""
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{flag} {text[:80]}: want a JSON object: {exc}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} {text[:80]}: want a JSON object, got a {type(found).__name__}")
    return found


def find_modules(allowed: Sequence[str], config_files: Sequence[str]) -> None:
    """Modules that may be named as targets are found beside a file of the configuration and in the current folder, if
    they are nowhere else: a console script's import path has neither.  Workers get the path from here."""
    for module in allowed:
        top = module.partition(":")[0].partition(".")[0]
        if not top.isidentifier() or top in sys.modules or importlib.util.find_spec(top) is not None:
            continue
        for folder in dict.fromkeys((*(Path(file).resolve().parent for file in config_files), Path.cwd())):
            if (folder / f"{top}.py").is_file() or (folder / top / "__init__.py").is_file():
                sys.path.append(str(folder))
                break


def at_commas(text: str, flag: str) -> list[str]:
    """A flag's text cut at its commas, but for those within brackets, or within quotes that begin a value.  ConfigError
    if one of them has no end."""
    parts, open_at, quote, escaped = [""], 0, "", False
    for c in text:
        if quote:
            escaped, quote = c == "\\" and quote == '"' and not escaped, quote if c != quote or escaped else ""
        elif c in "\"'" and (open_at or not parts[-1]):
            quote = c
        else:
            open_at += (c in "[{") - (c in "]}")
        if c == "," and not quote and open_at <= 0:
            parts.append("")
        else:
            parts[-1] += c
    if quote or open_at:
        raise ConfigError(
            f"{flag}: a quote or bracket has no end, or no beginning; want both, and commas between values"
        )
    return parts


def named_parts(texts: Sequence[str], flag: str) -> list[str]:
    """The plug-ins that a flag names, with commas between them or several times: each once, a name or a table of TOML
    (``{name="mine",options={a=1,b=2}}``)."""
    names = [name.strip() for text in texts for name in at_commas(text, f"{flag} {shown(text)}")]
    return list(dict.fromkeys(filter(None, names)))


def show_warnings() -> None:
    """What the engine's log warns of goes to standard error too."""
    log = logging.getLogger("minivllm")
    if not any(isinstance(handler, ToStderr) for handler in log.handlers):
        log.addHandler(ToStderr(logging.WARNING))


class ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        print(f"minivllm: {self.format(record)}", file=sys.stderr)


def open_llm(loaded: Loaded, args: argparse.Namespace) -> Any:
    """The engine of a command, recorded where ``--record`` or the ``[run]`` table says so."""
    from minivllm import LLM  # not minivllm.frontend.llm: this sets up the environment before torch is imported

    if logging.lastResort is not None:  # what hooks fail at is shown; the library leaves that to a program
        logging.getLogger("minivllm.hooks").addHandler(logging.lastResort)
    llm = LLM(config=loaded, record=recording.record_path(args, loaded))
    if not gc.isenabled():  # see ``minivllm.cli.OPENS``
        gc.freeze()
        gc.enable()
    return llm
