"""Parsers of replies: reasoning and calls of functions, found in the text of a model while it is generated."""

from .contract import FIRST_MARK, MOST_TAGS, Reply, ReplyContext, ReplyParser
from .parts import NAME, Begun, Ended, Part, Said, Thought, Written, new_id

__all__ = [
    "FIRST_MARK", "MOST_TAGS", "NAME", "Begun", "Ended", "Part", "Reply", "ReplyContext", "ReplyParser", "Said",
    "Thought", "Written", "new_id",
]  # fmt: skip
