"""The time that a parser of replies takes for each token, in text, in reasoning, in arguments and in hostile text.

    python benchmarks/reply_parsers.py

A token is a word with the space before it, or four other characters.  Hostile texts come both in tokens and as one
piece; their time is that of the whole text.  Times are of the processor, since other processes may run.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Sequence

from minivllm.plugins.specs import BUILTINS
from minivllm.runtime.replies import ReplyContext, ReplyParser
from minivllm.runtime.replies.write import write_reply

TOKEN = re.compile(r" ?\w{1,8}|\s+|[^\w\s]{1,4}")
PROSE = "The quick brown fox jumps over the lazy dog, and then it rests a while in the sun. " * 400
CODE = "if a < b and b > c:\n    print(`x`, [1, 2], {'a': <b>})\n" * 400
HOSTILE = ("<", "[", "{", "`", "\n", "<tool_call>", '<tool_call>{"id":', "[f(a=[", '{"name": "f", "arguments": {"a":')
LENGTH = 100_000
REPEATS = 5


def parsers() -> dict[str, ReplyParser]:
    """Return the built-in parsers by name."""
    found = {}
    for seam, name, where in BUILTINS:
        if seam == "parser":
            module, _, attribute = where.partition(":")
            target = getattr(importlib.import_module(module), attribute).impl
            home, _, called = target.partition(":")
            found[name] = getattr(importlib.import_module(home), called)()
    return found


def seconds(parser: ReplyParser, pieces: Sequence[str]) -> float:
    """Return the shortest time in which a parser reads pieces."""
    best = float("inf")
    for _ in range(REPEATS):
        reply = parser.start(ReplyContext())
        begin = time.process_time()
        for piece in pieces:
            reply.feed(piece)
        reply.feed("", True)
        best = min(best, time.process_time() - begin)
    return best


def tokens(text: str) -> list[str]:
    """Return a text in pieces of one token."""
    return TOKEN.findall(text)


def texts(parser: ReplyParser) -> dict[str, str]:
    """Return a text of each kind in the parser's format."""
    form = getattr(parser, "format", None)
    found = {"text": PROSE, "code": CODE}
    if form is None:
        return found
    if form.reasoning is not None or form.channels is not None:
        found["reasoning"] = write_reply(form, thought=PROSE)
    arguments = {"text": PROSE, "list": list(range(2000))}
    found["arguments"] = write_reply(form, calls=[("f", arguments)])
    return found


def main() -> None:
    """Print a table."""
    print(f"{'parser':14} microseconds for a token of each kind, and milliseconds for the slowest hostile text")
    for name, parser in parsers().items():
        cells = []
        for kind, text in texts(parser).items():
            pieces = tokens(text)
            cells.append(f"{kind} {1e6 * seconds(parser, pieces) / len(pieces):5.2f}")
        whole, shape = max((seconds(parser, [shape * (LENGTH // len(shape))]), shape) for shape in HOSTILE)
        slow, slowest = max((seconds(parser, tokens(shape * (LENGTH // len(shape)))), shape) for shape in HOSTILE)
        hostile = f"at once {1e3 * whole:6.1f} {shape!r}, in tokens {1e3 * slow:6.1f} {slowest!r}"
        print(f"{name:14} {'  '.join(cells):70} {hostile}")


if __name__ == "__main__":
    main()
