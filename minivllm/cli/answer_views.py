"""Show an answer in the terminal while it is generated: as markdown with the package rich, or as plain text.

The text of a model never controls the terminal: control characters are replaced by visible ones there.  Text that goes
to a file or a pipe stays as the model wrote it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

PICTURES = 0x2400  # code point of the visible sign of control character 0; those of the others follow
REPLACED = {code: chr(PICTURES + code) for code in range(0x20) if chr(code) not in "\t\n"}
# the character DEL, and the control characters from 0x80 to 0x9F
REPLACED |= {0x7F: "\u2421", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}
# Bidirectional control characters can change the order in which a text is shown.
REPLACED |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")
REPLACED[0x0D] = ""  # of line ends
# time between two drawings of an unfinished answer: at least, in seconds; as a multiple of the time of the last
# drawing; at most, in seconds
LEAST_WAIT, SHARE, MOST_WAIT = 0.08, 8.0, 0.5
LONG = 60_000  # characters of an unfinished paragraph or code block, from which on it is shown as plain text
THOUGHT_LINES = 6  # number of last lines of the reasoning that are shown while it is generated
FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.M)
# the start of a paragraph that cannot continue a list: it begins neither with an item's marker nor with a part of one
PARAGRAPH = re.compile(r"\n\n+(?=[^\s\d*+-]|[*+-]\S|\d+[^\d.)]|\d+[.)]\S)")


def printable(text: str) -> str:
    """Return a text in which no character controls a terminal.  Tabs and line breaks stay."""
    return text.translate(REPLACED)


def for_output(text: str) -> str:
    """Return a text for standard output: printable on a terminal, else unchanged."""
    return printable(text) if sys.stdout.isatty() else text


class Answered(Protocol):
    """A receiver of the pieces of an answer's text."""

    def text(self, piece: str) -> None:
        """Take a piece of the answer."""

    def end(self) -> None:
        """Finish the answer, also an answer that was stopped or has failed."""


class AnswerView(Answered, Protocol):
    """A receiver of answers that shows them on standard output, one after another."""

    def thought(self, piece: str) -> None:
        """Show a piece of the reasoning."""


class PlainView:
    """Write the pieces of an answer to standard output as they arrive.

    Reasoning that is separate from the answer is not shown.
    """

    def __init__(self) -> None:
        self._written = False

    def text(self, piece: str) -> None:
        """Write a piece of the answer."""
        self._written |= bool(piece)
        sys.stdout.write(for_output(piece))
        sys.stdout.flush()

    def thought(self, piece: str) -> None:
        """Ignore a piece of the reasoning."""

    def end(self) -> None:
        """Write a line break after an answer that has any text."""
        if self._written:
            self._written = False
            sys.stdout.write("\n")
            sys.stdout.flush()


def markdown(text: str) -> Any:
    """Return a text, parsed as markdown, for rich to print; HTML tags and the addresses of links are shown, not hidden.

    HTML entities are decoded by the parser, so characters that control a terminal are replaced after that."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    shown = Markdown("", hyperlinks=False)
    shown.parsed = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(text)
    rest = list(shown.parsed)
    while rest:
        token = rest.pop()
        token.content, token.info = printable(token.content), printable(token.info)
        rest += token.children or ()
    return shown


class LastLines:
    """The last lines of a rich renderable, at most ``most``, so that they fit on the screen."""

    def __init__(self, shown: Any, most: int) -> None:
        self.shown, self.most = shown, most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        lines = console.render_lines(self.shown, options, pad=False)
        for line in lines[-self.most :]:
            yield from line
            yield Segment.line()


class MarkdownView:
    """Show an answer as markdown.

    Finished paragraphs are printed once.  Only the unfinished end is drawn again, in the last lines of the screen, so
    an answer may be longer than the screen.  Reasoning is dim while it is generated, and is replaced by one line after
    it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Any = None
        self._tail = self._thought = ""
        self._begun = 0.0  # time at which the reasoning began
        self._drawn = self._cost = 0.0  # time at which the last drawing ended, and its duration in seconds

    def text(self, piece: str) -> None:
        """Show a piece of the answer."""
        if piece:
            self._fold()
            self._tail += printable(piece)
            self._print_finished()
            self._draw()

    def thought(self, piece: str) -> None:
        """Show a piece of the reasoning, after printing the text before it."""
        if not piece:
            return
        if self._tail.strip():
            self._print_all()
        if not self._thought:
            self._begun = time.monotonic()
        self._thought += printable(piece)
        self._draw()

    def end(self) -> None:
        """Print the rest of the answer."""
        self._fold()
        self._print_all()

    def _fold(self) -> None:
        """Replace the shown reasoning by one line with its duration and its number of words."""
        if self._thought:
            seconds, words = time.monotonic() - self._begun, len(self._thought.split())
            self._thought = ""
            self._stop()
            line = f"Reasoning: {words} words in {seconds:.1f} s. /thought shows it."
            self._console.print(line, style="dim", markup=False, highlight=False)

    def _print_finished(self) -> None:
        """Print the paragraphs that are followed by another paragraph, outside of code blocks."""
        cut = 0
        for found in PARAGRAPH.finditer(self._tail):
            if len(FENCE.findall(self._tail, cut, found.start())) % 2 == 0:
                self._print(self._tail[cut : found.start()])
                cut = found.end()
        self._tail = self._tail[cut:]

    def _print_all(self) -> None:
        rest, self._tail = self._tail, ""
        self._print(rest)
        self._stop()

    def _print(self, text: str) -> None:
        """Print a finished text above the drawing of the unfinished one."""
        if text.strip():
            self._stop()
            self._console.print(self._rendered(text))

    def _rendered(self, text: str) -> Any:
        """Return a text as markdown, or as plain text if it is long."""
        from rich.text import Text

        return markdown(text) if len(text) <= LONG else Text(text)

    def _draw(self) -> None:
        """Draw the unfinished end of the answer, unless it was drawn a moment ago."""
        from rich.live import Live
        from rich.text import Text

        begin = time.monotonic()
        if begin - self._drawn < max(LEAST_WAIT, min(SHARE * self._cost, MOST_WAIT)):
            return
        most = max(1, self._console.height - 2)
        if self._thought:
            shown = LastLines(Text(self._thought.strip(), style="dim italic"), min(most, THOUGHT_LINES))
        else:
            shown = LastLines(self._rendered(self._tail), most)
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(shown, refresh=True)
        self._drawn = time.monotonic()
        self._cost = self._drawn - begin

    def _stop(self) -> None:
        """Remove the drawing of the unfinished end, and show the cursor again."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        self._drawn = 0.0


def view_of(plain: bool) -> AnswerView:
    """Return the view for standard output.

    It shows markdown on a terminal if rich is installed, unless ``plain``.
    """
    installed = importlib.util.find_spec("rich") is not None
    if plain or not installed or not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        return PlainView()
    from rich.console import Console

    for name in ("rich.live", "rich.markdown"):  # imported now, so that the first answer does not wait for the import
        importlib.import_module(name)

    return MarkdownView(Console(file=sys.stdout, emoji=False, soft_wrap=False))
