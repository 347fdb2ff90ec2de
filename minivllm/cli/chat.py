"""``minivllm chat``: a conversation in the terminal.  Each line of standard input, also of a pipe, is a message."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from minivllm.cli.commands import read_stdin, with_flags, write_stream
from minivllm.cli.common import check_one_model, load, open_llm
from minivllm.errors import RequestError, shown

HELP = """\
/help          show these commands
/reset         forget the conversation
/system TEXT   set the system message, and forget the conversation
/exit          end, as an empty line or Ctrl-D does
//TEXT         send a message that begins with a slash"""
ALIASES = {"/?": "/help", "/clear": "/reset", "/quit": "/exit", "/bye": "/exit"}


def say(text: str) -> None:
    """Print a line to standard error, where it does not mix with the answers on standard output."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Conversation:
    """The messages of a conversation.  ``ended`` is True once /exit was typed."""

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
        """Run a line that is a command.  Returns False for a line that is a message."""
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

    check_one_model(args)
    loaded = with_flags(args, load(args))
    SamplingParams.make(**loaded.sampling)  # raises for wrong parameters before the model is loaded
    terminal = sys.stdin is not None and sys.stdin.isatty()
    talk = Conversation(args.system or "")
    with open_llm(loaded, args) as llm:
        sampling = {"max_tokens": None}  # an answer ends where the model ends it, or where the context is full
        sampling |= llm.resolved.sampling
        sampling |= loaded.sampling
        params = SamplingParams.make(**sampling)
        if terminal:
            say("An empty line or Ctrl-D ends; /help shows the commands.")
        while not talk.ended:
            if terminal:
                print("> ", end="", file=sys.stderr, flush=True)
            line = read_stdin(sys.stdin.readline)
            message = line.strip()
            if not line or (terminal and not message):
                break
            if not message or talk.command(message):
                continue
            if message.startswith("//"):
                message = message[1:]
            answer_line(llm, talk, message, params, terminal)
    return 0


def answer_line(llm: Any, talk: Conversation, text: str, params: Any, terminal: bool) -> None:
    """Write the answer to a message and add both to the conversation.

    A refused message is reported on a terminal, where the conversation continues.  Without a terminal it raises
    RequestError.
    """
    try:
        pieces = llm.chat_stream(talk.with_question(text), params)
        talk.keep(text, write_stream(pieces, llm.engine, params.max_tokens))
    except RequestError as exc:
        if not terminal:
            raise
        say(f"minivllm: error: {exc}")
