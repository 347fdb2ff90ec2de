"""Parsers of replies, which find reasoning and calls of functions in the text of a model while it is generated.

contract.py      the seam: ``ReplyParser`` and the parser of one answer parts.py         the parts that a parser returns
description.py   a format as data described.py     the parser of a description: ``plan.py`` compiles it, ``machine.py``
reads an answer detect.py        the format that fits a chat template
"""

from .contract import API, FIRST_MARK, MOST_TAGS, Reply, ReplyContext, ReplyParser
from .described import DescribedParser
from .description import Calls, Channels, Pairs, Reasoning, ReplyFormat
from .detect import detect
from .parts import NAME, Begun, Ended, Part, Said, Thought, Written, new_id

__all__ = [
    "API", "FIRST_MARK", "MOST_TAGS", "NAME", "Begun", "Calls", "Channels", "DescribedParser", "Ended", "Pairs", "Part",
    "Reasoning", "Reply", "ReplyContext", "ReplyFormat", "ReplyParser", "Said", "Thought", "Written", "detect",
    "new_id",
]  # fmt: skip
