"""``minivllm chat``: a conversation in the terminal, with an engine in this process or with a server (``--url``).

Each line of standard input, also of a pipe, is a message.  On a terminal Ctrl-C stops the answer only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from minivllm import files
from minivllm.cli.answer_views import printable, view_of
from minivllm.cli.chat_input import make_reader
from minivllm.cli.chat_sources import KINDS, ChatSource, LocalSource, Server
from minivllm.cli.commands import with_flags
from minivllm.cli.common import check_one_model, load, open_llm
from minivllm.errors import ConfigError, MinivllmError, RequestError, ResourceError, brief, shown, suggest

HELP = """\
/help          show these commands
/reset         forget the conversation
/system TEXT   set the system message, and forget the conversation
/set           show the sampling parameters; /set NAME VALUE changes one, /set NAME default removes it
/save FILE     write the conversation as JSON
/load FILE     read a conversation that /save wrote
/why           show why the last answer took so long: waiting, prefix hits, tokens
/thought       show the reasoning of the last answer
/stats         show figures of the engine or the server
/exit          end, as an empty line or Ctrl-D does
//TEXT         send a message that begins with a slash
Three quotes (\"\"\") begin and end a message of several lines."""
COMMANDS = ("/help", "/reset", "/clear", "/system ", "/set ", "/save ", "/load ", "/why", "/thought", "/stats", "/exit")
ALIASES = {"/?": "/help", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}
ROLES = ("user", "assistant")
FULL = ". /reset forgets the conversation"
STOPPED = "The answer was stopped; it is part of the conversation as far as it came."


def say(text: str) -> None:
    """Print a line to standard error, where it does not mix with the answers on standard output.

    Texts of models and servers do not control the terminal (``printable``).
    """
    print(printable(text), file=sys.stderr, flush=True)


@dataclass
class TerminalChat:
    """The messages of a conversation so far.  ``ended`` is True once the user has typed /exit."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    ended: bool = False

    def with_question(self, text: str) -> list[dict[str, str]]:
        """Return the messages of a request: the system message, the earlier turns and the question."""
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, *self.turns, {"role": "user", "content": text}]

    def keep(self, question: str, answer: str) -> None:
        """Add a finished turn, a question with its answer, to the conversation."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def command(self, line: str, source: ChatSource) -> bool:
        """Run a line if it is a command such as /save; return False for a line that is a message."""
        word, _, rest = line.partition(" ")
        word, rest = ALIASES.get(word, word), rest.strip()
        run = {"/set": self._set, "/save": self._save, "/load": self._load}.get(word)
        if run is not None:
            try:
                run(rest, source)
            except MinivllmError as exc:
                say(f"minivllm: error: {exc}")
        elif word == "/help":
            say(HELP)
        elif word == "/reset":
            self.turns.clear()
            say("The conversation is empty.")
        elif word == "/system":
            self.system = rest
            self.turns.clear()
            say("The system message is set." if self.system else "There is no system message.")
        elif word == "/why":
            say("There is no answer yet." if source.last is None else source.last.why())
        elif word == "/thought":
            thought = "" if source.last is None else source.last.thought
            say(thought.strip() or "There is no reasoning apart from the last answer.")
        elif word == "/stats":
            say(_table(source.stats()))
        elif word == "/exit":
            self.ended = True
        elif re.fullmatch(r"/[A-Za-z?]+", line):  # a line that looks like a path or a sentence is a message
            say(f"There is no command {shown(line)}.\n{HELP}")
        else:
            return False
        return True

    def _set(self, rest: str, source: ChatSource) -> None:
        """Show the sampling parameters, or change one of them as ``rest`` says.  RequestError for an unknown name or a
        wrong value."""
        name, _, text = rest.partition(" ")
        text = text.strip()
        if not name:
            say(_table({name: source.sampling.get(name, "default") for name in KINDS}))
            return
        if name not in KINDS:
            hint = suggest(name, KINDS)
            raise RequestError(f"/set {shown(name)}: expected one of {', '.join(KINDS)}.{hint}", name)
        changed = {**source.sampling}
        if text in ("", "default"):
            changed.pop(name, None)
        else:
            changed[name] = _number(name, text)
        source.check(changed)
        source.sampling = changed
        say(f"{name} is {text or 'default'}.")

    def _save(self, path: str, source: ChatSource) -> None:
        """Write the conversation to a new file; an existing file is not overwritten.  ConfigError if no path is given
        or the file exists; ResourceError if it cannot be written."""
        if not path:
            raise ConfigError("/save: expected the name of a file")
        data = {"system": self.system, "messages": self.turns, "sampling": source.sampling}
        try:
            with open(path, "x", encoding="utf-8") as file:
                json.dump(data, file, ensure_ascii=False, indent=1, default=str)
        except FileExistsError:
            raise ConfigError(f"/save {shown(path)}: the file is there already; choose another name") from None
        except OSError as exc:
            raise ResourceError(f"/save {shown(path)}: {exc.strerror}") from None
        say(f"{len(self.turns)} messages are in {path}.")

    def _load(self, path: str, source: ChatSource) -> None:
        """Read a conversation from a file, in place of the present one.  ConfigError if no path is given, or if the
        file is not one that ``/save`` wrote."""
        if not path:
            raise ConfigError("/load: expected the name of a file")
        text = files.read_given(path, name=f"/load {shown(path)}")
        try:
            found = json.loads(text)
            turns = [{"role": turn["role"], "content": turn["content"]} for turn in found["messages"]]
            system = found.get("system", "")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"/load {shown(path)}: expected a file that /save wrote") from None
        plain = all(turn["role"] in ROLES and isinstance(turn["content"], str) for turn in turns)
        if not plain or not isinstance(system, str):
            raise ConfigError(f"/load {shown(path)}: expected messages of user and assistant with texts")
        self.system, self.turns = system, turns
        say(f"{len(turns)} messages are loaded.")


def _number(name: str, text: str) -> Any:
    """Return the value of a sampling parameter in a text.  RequestError for a wrong text."""
    try:
        return KINDS[name](text)
    except ValueError:
        kind = "a whole number" if KINDS[name] is int else "a number"
        raise RequestError(f"/set {name} {shown(text)}: expected {kind}, or default", name) from None


def _table(values: dict[str, Any]) -> str:
    """Return the values that are numbers or texts, by name, as aligned lines; tables and lists are left out."""
    plain = {name: value for name, value in values.items() if not isinstance(value, (dict, list))}
    width = max(map(len, plain), default=0)
    return "\n".join(f"{name:{width}}  {value}" for name, value in plain.items())


def chat(args: argparse.Namespace) -> int:
    """Answer each line of standard input until it ends; return the exit code.  ConfigError for ``--api-key`` without
    ``--url``, and for the address of a server in place of a model."""
    check_one_model(args)
    if args.url is not None:
        source = server_of(args)
        talk(args, source)
        return 0
    if args.api_key is not None:
        raise ConfigError("--api-key without --url: an engine in this process needs no key")
    if (args.model or "").startswith(("http://", "https://")):
        raise ConfigError(
            f"{brief(args.model)}: expected a model; the address of a server is --url {brief(args.model)}"
        )
    loaded = with_flags(args, load(args))
    local = LocalSource(None, dict(loaded.sampling), view_of(args.plain))
    local.check(local.sampling)  # raises for wrong parameters before the model is loaded
    with open_llm(loaded, args) as llm:
        # no limit on its length, so that an answer ends at its end token or at the end of the context
        sampling = {"max_tokens": None}
        local.sampling = {**sampling, **llm.resolved.sampling, **loaded.sampling}
        local.llm = llm
        talk(args, local)
    return 0


def server_of(args: argparse.Namespace) -> Server:
    """Return the server of ``--url`` as a source of answers.  ConfigError for flags that are for an engine."""
    engine_flags = {"--config": args.config, "--set": args.set, "--allow-target": args.allow_target}
    engine_flags |= {"--hf-overrides": args.hf_overrides, "--record": args.record, "--regex": args.regex}
    for flag, value in engine_flags.items():
        if value:
            raise ConfigError(f"{flag} with --url: it is for an engine in this process; leave one of them out")
    key = args.api_key or os.environ.get("MINIVLLM_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
    sampling = {name: getattr(args, name) for name in (*KINDS, "stop") if getattr(args, name) is not None}
    if args.json_schema is not None:
        name = f"--json-schema: {args.json_schema}"
        schema = files.parse_json(files.read_given(args.json_schema, name=name), name)
        sampling["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return Server(args.url, key, args.model, sampling, view_of(args.plain))


def talk(args: argparse.Namespace, source: ChatSource) -> None:
    """Read messages and show an answer to each until the input ends or, in a terminal, until an empty line.  A line
    that begins with "/" may be a command."""
    terminal = sys.stdin is not None and sys.stdin.isatty()
    conversation = TerminalChat(args.system or "")
    read = make_reader(terminal, COMMANDS)
    if terminal:
        say("An empty line or Ctrl-D ends; /help shows the commands.")
    while not conversation.ended:
        message = read()
        if message is None or (terminal and not message):
            break
        if not message or conversation.command(message, source):
            continue
        if message.startswith("//"):
            message = message[1:]
        answer_line(source, conversation, message, terminal)


def answer_line(source: ChatSource, conversation: TerminalChat, text: str, terminal: bool) -> None:
    """Show the answer to a message and add both to the conversation.

    On a terminal a refused message is reported, and an interrupt stops the answer; the conversation continues.
    Without a terminal both raise.
    """
    try:
        answer = source.answer(conversation.with_question(text))
        conversation.keep(text, answer)
    except (RequestError, ResourceError) as exc:
        if not terminal:
            raise
        full = conversation.turns and getattr(exc, "param", None) == "prompt"
        say(f"minivllm: error: {exc}{FULL if full else ''}")
    except KeyboardInterrupt:
        if not terminal:
            raise
        conversation.keep(text, source.partial)
        say(STOPPED)
