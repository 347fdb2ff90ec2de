"""The ``minivllm`` command.  Parsing it imports nothing heavy: ``--help`` and ``--version`` answer at once.

Errors are one line on standard error and an exit code: 2 configuration or command line, 3 model, 4 plug-in, 5 machine,
7 engine, 130 interrupted.  ``--debug`` shows the traceback instead.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from minivllm import __version__
from minivllm.cli import (
    ablate,
    bench,
    compare,
    compare_hf,
    config,
    doctor,
    plugins,
    quantize,
    replay,
    report,
    serve,
    simulate,
    stats,
    streams,
)
from minivllm.cli import record as recording
from minivllm.cli.common import SAMPLING
from minivllm.errors import ConfigError, MinivllmError, ResourceError, brief, shown, suggest, where_requests_go
from minivllm.validation import is_text

UNWRITABLE = {errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT, errno.EFBIG}  # of standard output
MOST = 4000  # characters of a message: the candidates for a seam, each with its reasons, are some
MOST_QUOTED = 600  # of one about the command line


# What these import and build stays: looking through it for garbage, again and again, is a tenth of their start.
# ``common.open_llm`` sets it aside and begins to collect.
OPENS = ("minivllm.cli.commands:generate", "minivllm.cli.chat:chat", "minivllm.cli.commands:run")


class CommandParser(argparse.ArgumentParser):
    """Refuse wrong arguments in one line.

    ``read`` changes the arguments of a command before they are parsed.  ``fill`` adds the arguments of a command whose
    defaults and choices come from a module that other commands do not need; it is called when they are needed."""

    read: Callable[[Sequence[str]], list[str]] | None = None
    fill: Callable[[CommandParser], None] | None = None

    def filled(self) -> CommandParser:
        """Return the parser with all its arguments."""
        if self.fill is not None:
            fill, self.fill = self.fill, None
            fill(self)
        return self

    def format_help(self) -> str:
        return super(CommandParser, self.filled()).format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.filled()
        if self.read is not None:
            try:
                args = self.read(sys.argv[1:] if args is None else args)
            except ConfigError as exc:
                self.error(str(exc))
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:  # here, where the command's own flags are known
            flag = unknown[0].partition("=")[0]
            near = suggest(flag, self._option_string_actions)
            more = f"; {where_requests_go()}" if flag in ("--dataset", "--trace") else near and f".{near}"
            self.error(f"unrecognized arguments: {' '.join(unknown)}{more}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        print(f"minivllm: error: {brief(message, MOST_QUOTED)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def wiring_flags() -> argparse.ArgumentParser:
    """Flags of the commands that wire an engine."""
    wiring = argparse.ArgumentParser(add_help=False)
    wiring.add_argument(
        "--model", help="a directory, a GGUF file, a Hugging Face id, pocket or pocket-draft (default pocket)"
    )
    wiring.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="TOML, YAML or JSON; later ones win"
    )
    wiring.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. scheduler.name=fcfs")
    wiring.add_argument(
        "--allow-target", action="append", default=[], metavar="MODULE", help="may be named module:Class"
    )
    text = """keys over those of the model's config.json: '{"rope_scaling": {"factor": 4.0}}'"""
    wiring.add_argument("--hf-overrides", metavar="JSON", default=None, help=text)
    return wiring


def make_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    wiring = wiring_flags()
    sampling = argparse.ArgumentParser(add_help=False)
    for name, kind, text in SAMPLING:
        sampling.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, default=None, help=text)
    sampling.add_argument("--json-schema", metavar="FILE", default=None, help="answer with JSON that fits the schema")
    sampling.add_argument("--regex", default=None, help="answer with a text that fits the regular expression")
    sampling.add_argument("--stop", action="append", default=None, metavar="TEXT", help="stop before this text")

    parser = CommandParser(prog="minivllm", description="An LLM inference engine made of plug-ins.", parents=[common])
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)

    def command(name: str, run: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        own: Any = [common, *parents]
        sub = commands.add_parser(name, help=text, description=text, parents=own)
        sub.set_defaults(run=f"minivllm.{run}")
        return sub

    record = recording.record_flag()
    text = "Complete a prompt; the text streams to standard output."
    sub = command("generate", "cli.commands:generate", text, wiring, sampling, record)
    sub.add_argument("prompt", nargs="?", help="default: standard input")
    sub.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message, through the chat template"
    )
    text = "Talk to a chat model; an empty line or Ctrl-D ends, /help shows commands."
    sub = command("chat", "cli.chat:chat", text, wiring, sampling, record)
    sub.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    sub.add_argument("--system", help="a system message")
    text = "Run the prompts of an experiment file, or a recorded run again; results are JSON lines."
    sub = command("run", "cli.commands:run", text, wiring, record)
    sub.add_argument("file", help="TOML, YAML or JSON with a [run] table, or a run.json that --record wrote")
    sub.add_argument("--force", action="store_true", help="run again though sources or versions are not as recorded")
    recording.add_commands(command)
    plugins.add_commands(command, wiring, common)
    config.add_commands(command, wiring, common)
    bench.add_commands(command, record, common, wiring)
    ablate.add_commands(command, wiring)
    compare.add_commands(command, wiring)
    report.add_commands(command)
    replay.add_commands(command)
    simulate.add_commands(command, wiring)
    compare_hf.add_commands(command)
    quantize.add_commands(command)
    serve.add_commands(command, wiring)
    doctor.add_commands(command)
    stats.add_commands(command)
    command("version", "cli.commands:version", "Print the version, as --version does.")
    text = "Put a number on the quality of the model in the package."
    sub = command("eval", "cli.commands:evaluate", text, wiring, record)
    sub.add_argument("what", choices=["pocket"])
    sub.add_argument("-n", type=int, default=500, help="cases of each task (default 500)")
    sub.add_argument("--task", action="append", default=None, help="needle, copy, sums, json, story (default all)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    lost = streams.mend()
    try:
        code = _run(argv)
    except SystemExit as exc:  # argparse ends so, with --help and --version as well
        if exc.code or lost is None:
            raise
        code = 0
    if lost is None or not lost.any or code:
        return code
    print("minivllm: error: standard output is closed; want it open, or > /dev/null", file=sys.stderr)
    return ResourceError.exit_code


def _run(argv: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if (wrong := next((text for text in given if not is_text(text)), None)) is not None:
        print(f"minivllm: error: the argument {shown(wrong)} is not UTF-8; want Unicode text", file=sys.stderr)
        return ConfigError.exit_code
    args = make_parser().parse_args(plugins.with_verb(given))
    debug = getattr(args, "debug", False)
    if argv is None and args.run in OPENS:  # a process of our own
        gc.disable()
    try:
        module, _, function = args.run.partition(":")
        code = getattr(importlib.import_module(module), function)(args)
        sys.stdout.flush()
        return code
    except MinivllmError as exc:
        if debug:
            traceback.print_exc()
        print(f"minivllm: error: {brief(one_line(str(exc)), MOST)}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # nobody reads our output any more
        streams.discard_output()
        return 0
    except OSError as exc:
        if debug or exc.filename is not None or exc.errno not in UNWRITABLE:
            return _failed(exc, debug)
        streams.discard_output()
        print(f"minivllm: error: standard output cannot be written: {exc.strerror}", file=sys.stderr)
        return ResourceError.exit_code
    except Exception as exc:
        return _failed(exc, debug)


def _failed(exc: Exception, debug: bool) -> int:
    """Say that a command failed by a fault of the program; the exit code.  ``debug``: raise it instead."""
    if debug:
        raise exc
    if broken := broken_metadata(exc):
        print(f"minivllm: error: {broken}", file=sys.stderr)
        return ResourceError.exit_code
    print(
        f"minivllm: error: {type(exc).__name__}: {brief(one_line(str(exc)), MOST)} (a bug; --debug shows where)",
        file=sys.stderr,
    )
    return 1


def broken_metadata(exc: Exception) -> str:
    """Which package to remove, if an exception comes out of ``importlib.metadata``: minivllm's own discovery survives
    one that cannot be read, but pydantic and torch look for plug-ins of theirs too."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(exc.__traceback__))
    if not any(name.startswith("importlib.metadata") for name in names):
        return ""
    from minivllm.registration.discovery import unreadable

    found = "; ".join(map(str, unreadable()))
    return f"{found}. Other libraries read that too, and fail: reinstall the package or remove it" if found else ""


def one_line(text: str) -> str:
    """A message of several lines as one."""
    joined = ""
    for line in filter(None, (" ".join(part.split()) for part in text.splitlines())):
        joined += ("" if not joined else " " if joined[-1] in ".:?!" else "; ") + line
    return joined
