"""Separate the reasoning from the text of an answer, in the format that the model's chat template prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from minivllm.errors import MinivllmError
from minivllm.registration.spec import PluginQuery
from minivllm.registry import Catalog
from minivllm.runtime.replies import ReplyContext, ReplyParser, Said, Thought, detect

if TYPE_CHECKING:
    from minivllm.cli.answer_views import AnswerView

TAIL = 400  # number of last characters of a prompt in which the start of the reasoning is searched


def parser_of(tokenizer: Any) -> ReplyParser | None:
    """Return a parser that separates the reasoning of a model's replies; None if the format is unknown or has none."""
    name, _ = detect(tokenizer.written, tokenizer.response_template)
    registry = Catalog.discover()["parser"]
    try:
        candidate = registry.select(PluginQuery(), name).require()
        parser: ReplyParser = registry.load(candidate)(registry.options(candidate, {}, "chat"))
    except MinivllmError:
        return None
    return parser if parser.thinks() else None


class Separated:
    """Separate the reasoning from the pieces of an answer, and pass both on to a view.

    ``thoughts`` has the reasoning so far.  ``opened`` means that the prompt ends within the reasoning.
    """

    def __init__(self, view: AnswerView, parser: ReplyParser | None, opened: bool = False) -> None:
        self._view = view
        self._reply = None if parser is None else parser.start(ReplyContext(opened=opened, calls=False))
        self.thoughts = ""

    def text(self, piece: str) -> None:
        """Take a piece of an answer as the model wrote it."""
        if self._reply is None:
            self._view.text(piece)
        else:
            self._pass(self._reply.feed(piece))

    def thought(self, piece: str) -> None:
        """Pass a piece of the reasoning on to the view."""
        self.thoughts += piece
        self._view.thought(piece)

    def end(self) -> None:
        """Pass the rest of the answer on to the view, and end the answer."""
        reply, self._reply = self._reply, None
        try:
            if reply is not None:
                self._pass(reply.feed("", final=True))
        finally:
            self._view.end()

    def _pass(self, parts: Sequence[Any]) -> None:
        for part in parts:
            if isinstance(part, Thought):
                self.thought(part.text)
            elif isinstance(part, Said):
                self._view.text(part.text)
