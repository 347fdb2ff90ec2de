"""``minivllm chat``: a conversation in the terminal, one line a message; piped input is answered line by line."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from minivllm.cli.commands import heard, with_flags, write_stream
from minivllm.cli.common import load, open_llm
from minivllm.errors import ConfigError, RequestError, shown

HELP = """\
/help          show these commands
/reset         forget the conversation
/system TEXT   set the system message, and forget the conversation
/exit          end, as an empty line or Ctrl-D does
//TEXT         send a message that begins with a slash"""
ALIASES = {"/?": "/help", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}


def say(text: str) -> None:
    """Write a line for the person, not for the program that reads the answers."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Conversation:
    """The messages so far.  ``ended``: /exit was typed."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)
    ended: bool = False

    def with_question(self, text: str) -> list[dict[str, str]]:
        """Return the messages of a request: system message, earlier turns and the question."""
        begin = [{"role": "system", "content": self.system}] if self.system else []
        return [*begin, *self.turns, {"role": "user", "content": text}]

    def keep(self, question: str, answer: str) -> None:
        """Add a finished turn."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> bool:
        """Run a line that is a command and return True; return False for a message."""
        word, _, rest = line.partition(" ")
        word = ALIASES.get(word, word)
        if word == "/help":
            say(HELP)
        elif word == "/reset":
            self.turns.clear()
            say("The conversation is empty.")
        elif word == "/system":
            self.system = rest.strip()
            self.turns.clear()
            say("The system message is set." if self.system else "There is no system message.")
        elif word == "/exit":
            self.ended = True
        elif re.fullmatch(r"/[A-Za-z?]+", line):  # a path or a sentence is a message
            say(f"There is no command {shown(line)}.\n{HELP}")
        else:
            return False
        return True


def chat(args: argparse.Namespace) -> int:
    """Answer each line of standard input until it ends; return the exit code."""
    from minivllm.core.interfaces.params import SamplingParams

    if args.positional is not None:
        if args.model is not None:
            raise ConfigError(f"MODEL {shown(args.positional)} beside --model {shown(args.model)}: want one")
        args.model = args.positional
    loaded = with_flags(args, load(args))
    SamplingParams.make(**loaded.sampling)  # refuses before the model is loaded
    asks = sys.stdin is not None and sys.stdin.isatty()
    talk = Conversation(args.system or "")
    with open_llm(loaded, args) as llm:
        given = {**llm.resolved.sampling, **loaded.sampling}
        # without a limit an answer ends where the model ends it, or where the context is full
        params = SamplingParams.make(**{"max_tokens": None, **given})
        if asks:
            say("An empty line or Ctrl-D ends; /help shows the commands.")
        while not talk.ended:
            if asks:
                print("> ", end="", file=sys.stderr, flush=True)
            line = heard(sys.stdin.readline)
            said = line.strip()
            if not line or (asks and not said):
                break
            if said and not talk.command(said):
                answer_line(llm, talk, said[1:] if said.startswith("//") else said, params, asks)
    return 0


def answer_line(llm: Any, talk: Conversation, text: str, params: Any, asks: bool) -> None:
    """Write the answer to a message and keep both.  A refused message ends a pipe, not a person's conversation."""
    try:
        pieces = llm.chat_stream(talk.with_question(text), params)
        talk.keep(text, write_stream(pieces, llm.engine, params.max_tokens))
    except RequestError as exc:
        if not asks:
            raise
        say(f"minivllm: error: {exc}")
