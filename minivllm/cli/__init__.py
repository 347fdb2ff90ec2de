"""The ``minivllm`` command.

Parsing the command line imports no large package, so that ``--help`` and ``--version`` return at once.  An error is
one line on standard error and an exit code: 2 for configuration or command line, 3 model, 4 plug-in, 5 machine, 7
engine, 130 interrupted.  ``--debug`` prints the traceback instead.
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
    batch,
    bench,
    cache,
    compare,
    compare_hf,
    completion,
    config,
    doctor,
    models,
    plugins,
    quantize,
    replay,
    report,
    serve,
    simulate,
    stats,
    streams,
    zygote,
)
from minivllm.cli import record as recording
from minivllm.cli.common import SAMPLING, add_quiet, add_switch, config_flags
from minivllm.errors import ConfigError, MinivllmError, ResourceError, brief, shown, suggest, where_requests_go
from minivllm.validation import is_text

# error numbers of a write to an output that is full or broken
UNWRITABLE = {errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT, errno.EFBIG}
# length in characters, enough for all candidates of a seam (kind of plug-in) with the reasons against them
LONGEST_MESSAGE = 4000
LONGEST_USAGE_MESSAGE = 600  # characters of a message about the command line

# Commands that keep all objects that they import and build. Garbage collection would scan these objects repeatedly,
# which takes a tenth of the start, so it is off until ``common.open_llm`` has excluded them.
COLLECT_LATE = ("minivllm.cli.commands:generate", "minivllm.cli.chat:chat", "minivllm.cli.commands:run")


class CommandParser(argparse.ArgumentParser):
    """A parser of the command line that reports wrong arguments in one line.

    ``read`` rewrites the arguments of a command before they are parsed.  ``fill`` adds the arguments of a command
    whose defaults and choices come from a module that other commands do not import.  It runs when the command is used.
    """

    read: Callable[[Sequence[str]], list[str]] | None = None
    fill: Callable[[CommandParser], None] | None = None

    def filled(self) -> CommandParser:
        """Add the arguments of ``fill`` if that has not happened yet, and return the parser."""
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
        parsed, unknown = super().parse_known_args(args, namespace)
        # A subcommand's parser reports unknown arguments itself, because only it can suggest flags of the command.
        if unknown and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0])}")
        return parsed, unknown

    def _hint(self, unknown: str) -> str:
        """Return advice for an unknown argument, such as the argument to use instead, or ""."""
        flag = unknown.partition("=")[0]
        if flag in ("--dataset", "--trace"):
            return f"; {where_requests_go()}"
        flags = self._option_string_actions
        if "--set" in flags and flag.replace("_", "-") not in flags:
            from minivllm.config import option_path  # imported here, because it imports pydantic

            if path := option_path(flag.removeprefix("--").replace("-", "_")):
                return f"; here it is --set {path}=VALUE"
        similar = suggest(flag, flags)
        return f".{similar}" if similar else ""

    def error(self, message: str) -> NoReturn:
        print(f"minivllm: error: {brief(message, LONGEST_USAGE_MESSAGE)} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def wiring_flags() -> argparse.ArgumentParser:
    """Return a parser with the flags of commands that build an engine, for use as an argparse parent."""
    wiring = argparse.ArgumentParser(add_help=False)
    text = "a directory, a GGUF file, a Hugging Face id, pocket or pocket-draft (default pocket)"
    wiring.add_argument("--model", help=text)
    config_flags(wiring)
    text = """keys that replace keys of the model's config.json: '{"rope_scaling": {"factor": 4.0}}'"""
    wiring.add_argument("--hf-overrides", metavar="JSON", help=text)
    return wiring


def sampling_flags() -> argparse.ArgumentParser:
    """Return a parser with the sampling flags, for use as an argparse parent."""
    sampling = argparse.ArgumentParser(add_help=False)
    for name, kind, text in SAMPLING:
        sampling.add_argument(f"--{name.replace('_', '-')}", dest=name, type=kind, help=text)
    text = "generate JSON that fits the schema in this file"
    sampling.add_argument("--json-schema", metavar="FILE", help=text)
    sampling.add_argument("--regex", help="generate a text that matches this regular expression")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text")
    return sampling


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")
    parser = CommandParser(prog="minivllm", description="An LLM inference engine made of plug-ins.", parents=[common])
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=CommandParser)

    def command(name: str, run: str, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        own: Any = [common, *parents]
        sub = commands.add_parser(name, help=text, description=text, parents=own)
        sub.set_defaults(run=f"minivllm.{run}")
        return sub

    wiring = wiring_flags()
    record = recording.record_flag()
    _add_engine_commands(command, wiring, record)
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
    batch.add_commands(command, wiring)
    doctor.add_commands(command)
    stats.add_commands(command)
    cache.add_commands(command)
    models.add_commands(command)
    zygote.add_commands(command)
    completion.add_commands(command, parser)
    command("version", "cli.commands:version", "Print the version, as --version does.")
    text = "Measure the quality of the packaged model."
    sub = command("eval", "cli.commands:evaluate", text, wiring, record)
    sub.add_argument("what", choices=["pocket"])
    sub.add_argument("-n", type=int, default=500, help="cases of each task (default 500)")
    sub.add_argument("--task", action="append", help="needle, copy, sums, json, story (default all)")
    return parser


def _add_engine_commands(command: Any, wiring: argparse.ArgumentParser, record: argparse.ArgumentParser) -> None:
    """Add the commands ``generate``, ``chat`` and ``run``.

    ``command(name, ...)`` makes the parser of a command; ``wiring`` and ``record`` have flags for these commands.
    """
    sampling = sampling_flags()
    text = "Complete a prompt; the text streams to standard output."
    sub = command("generate", "cli.commands:generate", text, wiring, sampling, record)
    sub.add_argument("prompt", nargs="?", help="default: standard input")
    add_quiet(sub)
    add_switch(sub, "--chat", "send the prompt as a user's message, through the chat template")
    text = "Talk to a chat model; an empty line or Ctrl-D ends, /help shows commands."
    sub = command("chat", "cli.chat:chat", text, wiring, sampling, record)
    sub.add_argument("positional", nargs="?", metavar="MODEL", help="as --model")
    sub.add_argument("--system", help="a system message")
    add_quiet(sub)
    add_switch(sub, "--plain", "write answers as plain text (default on a terminal with rich: as markdown)")
    sub.add_argument("--url", help="talk to a server with OpenAI's API, such as http://127.0.0.1:8000")
    text = "key of the server (default: MINIVLLM_API_KEY or OPENAI_API_KEY)"
    sub.add_argument("--api-key", metavar="KEY", help=text)
    text = "Run the prompts of an experiment file, or a recorded run again; results are JSON lines."
    sub = command("run", "cli.commands:run", text, wiring, record)
    sub.add_argument("file", help="TOML, YAML or JSON with a [run] table, or a run.json that --record wrote")
    add_quiet(sub)
    add_switch(sub, "--force", "repeat a recorded run although sources or versions have changed since")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.  ``argv`` None means the arguments of the process."""
    lost = streams.open_closed_streams()
    streams.escape_unencodable()
    try:
        code = _run(argv)
    except SystemExit as exc:  # argparse raises SystemExit, also after --help and --version
        if exc.code or lost is None:
            raise
        code = 0
    except KeyboardInterrupt:  # also while the parser is built
        print(file=sys.stderr)
        return 130
    if lost is None or not lost.written or code:
        return code
    return _fail("standard output is closed; open it, or use > /dev/null", ResourceError.exit_code)


def _fail(message: str, code: int) -> int:
    """Print an error message to standard error and return the exit code."""
    print(f"minivllm: error: {message}", file=sys.stderr)
    return code


def _run(argv: Sequence[str] | None) -> int:
    """Parse the arguments and run the command.  Return its exit code; an exception becomes a message and an exit
    code."""
    words = list(sys.argv[1:] if argv is None else argv)
    for word in words:
        if not is_text(word):
            message = f"the argument {shown(word)} is not UTF-8; expected Unicode text"
            return _fail(message, ConfigError.exit_code)
    args = make_parser().parse_args(plugins.with_verb(words))
    debug = getattr(args, "debug", False)
    # garbage collection stays on in a program that called ``main`` from Python
    if argv is None and args.run in COLLECT_LATE:
        gc.disable()
    try:
        module, _, function = args.run.partition(":")
        code = getattr(importlib.import_module(module), function)(args)
        sys.stdout.flush()
        return code
    except MinivllmError as exc:
        if debug:
            traceback.print_exc()
        return _fail(brief(one_line(str(exc)), LONGEST_MESSAGE), exc.exit_code)
    except BrokenPipeError:  # the reader of the output has closed the pipe
        streams.discard_output()
        return 0
    except OSError as exc:
        if debug or exc.filename is not None or exc.errno not in UNWRITABLE:
            return _report_bug(exc, debug)
        streams.discard_output()
        return _fail(f"standard output cannot be written: {exc.strerror}", ResourceError.exit_code)
    except Exception as exc:
        return _report_bug(exc, debug)


def _report_bug(exc: Exception, debug: bool) -> int:
    """Report an unexpected exception on standard error and return the exit code; with ``debug`` raise it instead."""
    if debug:
        raise exc
    if broken := broken_metadata(exc):
        return _fail(broken, ResourceError.exit_code)
    text = brief(one_line(str(exc)), LONGEST_MESSAGE)
    return _fail(f"{type(exc).__name__}: {text} (a bug; --debug shows where)", 1)


def broken_metadata(exc: Exception) -> str:
    """Return a sentence about installed packages with unreadable metadata if these caused the exception, else "".

    minivllm's own search for plug-ins tolerates such a package, but pydantic and torch search for plug-ins too.
    """
    frames = traceback.walk_tb(exc.__traceback__)
    modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
    if not any(module.startswith("importlib.metadata") for module in modules):
        return ""
    from minivllm.registration.discovery import unreadable

    packages = "; ".join(map(str, unreadable()))
    if not packages:
        return ""
    return f"{packages}. Other libraries read that too, and fail: reinstall the package or remove it"


def one_line(text: str) -> str:
    """Return a message as one line.  Its lines are joined with semicolons, or with spaces after a line that ends with
    punctuation."""
    joined = ""
    for part in text.splitlines():
        line = " ".join(part.split())
        if not line:
            continue
        if joined:
            joined += " " if joined[-1] in ".:?!" else "; "
        joined += line
    return joined
