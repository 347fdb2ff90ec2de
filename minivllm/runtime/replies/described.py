"""A parser that is made from the description of a reply format."""

from __future__ import annotations

from typing import Any, ClassVar

from .channels import ChannelReply
from .contract import Reply, ReplyContext, ReplyParser
from .description import ReplyFormat
from .machine import DescribedReply
from .plan import FormatPlan


class DescribedParser(ReplyParser):
    """A parser of replies whose format is described as data, in the class attribute ``format``."""

    format: ClassVar[ReplyFormat]

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        # (strictness and marks of a tokenizer) -> compiled format; a process has only a few
        self._plans: dict[tuple[Any, ...], FormatPlan] = {}

    def tags(self) -> tuple[str, ...]:
        """Return the texts that are tags of the format."""
        return self.format.tags

    def thinks(self) -> bool:
        """Return whether replies may have reasoning."""
        return self.format.reasoning is not None or self.format.channels is not None

    def opens(self, prompt: str) -> bool:
        """Return whether a prompt, or its last part, ends within the reasoning."""
        reasoning = self.format.reasoning
        if reasoning is None:
            return False
        opened = prompt.rfind(reasoning.open.strip())
        closed = prompt.rfind(reasoning.close)
        return opened >= 0 and opened > closed and not prompt[opened:].strip().removeprefix(reasoning.open.strip())

    def start(self, context: ReplyContext) -> Reply:
        """Return the parser of one answer."""
        if self.format.channels is not None:
            return ChannelReply(self.format.channels, context)
        return DescribedReply(self._plan(context), context)

    def _plan(self, context: ReplyContext) -> FormatPlan:
        """Return the compiled format for the marks of an answer."""
        key = (context.strict, *context.marks.items())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = FormatPlan(self.format, context.marks, context.strict)
        return plan
