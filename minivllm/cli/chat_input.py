"""Read the messages of ``minivllm chat``: with prompt_toolkit on a terminal where it is installed, else line by line.

A message of several lines begins and ends with a line of three quotes, or has a backslash before each line break.
With prompt_toolkit, Alt+Enter begins a line, and the arrow keys bring back earlier messages, also of earlier days.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from minivllm.cli.commands import read_stdin

QUOTES = '"""'
# largest size in bytes of a file of earlier messages that is read; a larger file is replaced by a new one
LONGEST_HISTORY = 1 << 20


def history_path() -> Path:
    """Return the path of the file with earlier messages."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "minivllm" / "chat_history"


class InputLines:
    """Read messages from standard input.  ``terminal`` means that a prompt is shown."""

    def __init__(self, terminal: bool) -> None:
        self._terminal = terminal

    def _line(self, prompt: str) -> str:
        """Return a line with its line break, "" at the end of the input."""
        if self._terminal:
            print(prompt, end="", file=sys.stderr, flush=True)
        return read_stdin(sys.stdin.readline)

    def read(self) -> str | None:
        """Return the next message, None at the end of the input.  A line that ends with a backslash continues, and a
        message between lines of quotes may have several lines."""
        line = self._line("> ")
        if not line:
            return None
        if line.strip() == QUOTES:
            return self._quoted()
        text = line
        while text.endswith("\\\n"):
            text = text[:-2] + "\n" + self._line(". ")
        return text.strip()

    def _quoted(self) -> str:
        """Return the lines of a message up to the line with three quotes."""
        lines = []
        while line := self._line(". "):
            if line.strip() == QUOTES:
                break
            lines.append(line)
        return "".join(lines).strip("\n")


class Toolkit:
    """Read messages on a terminal with the package prompt_toolkit."""

    def __init__(self, commands: Sequence[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory
        from prompt_toolkit.key_binding import KeyBindings

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def begin_line(event: object) -> None:
            event.current_buffer.insert_text("\n")  # type: ignore[attr-defined]

        path = history_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.path.exists(path) and path.stat().st_size > LONGEST_HISTORY:
            path.unlink()
        path.touch(mode=0o600)
        words = WordCompleter(list(commands), sentence=True)
        self._session: PromptSession[str] = PromptSession(
            history=FileHistory(str(path)), key_bindings=keys, completer=words, complete_while_typing=False
        )

    def read(self) -> str | None:
        """Return the next message, None at the end of the input."""
        try:
            return self._session.prompt("> ", prompt_continuation=". ").strip()
        except EOFError:
            return None


def make_reader(terminal: bool, commands: Sequence[str]) -> Callable[[], str | None]:
    """Return the function that reads the next message, and returns None at the end of the input."""
    if terminal and importlib.util.find_spec("prompt_toolkit") is not None:
        return Toolkit(commands).read
    return InputLines(terminal).read
