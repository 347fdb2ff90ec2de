"""Parse replies such as ``<r>Two and three.</r> I look.<call>find {"text": "five"}</call>``.

The description is all that the parser needs.  A format that no description fits is a subclass of ``ReplyParser``, whose
``start`` returns an object with ``feed`` and ``cut``.
"""

from __future__ import annotations

from minivllm.plugin import Calls, DescribedParser, Reasoning, ReplyFormat

CALLS = Calls("json", head="{name} ", open="<call>", close="</call>", between="\n")


class MyPlugin(DescribedParser):
    """Whitespace in a description is what a model writes.  The parser accepts any."""

    format = ReplyFormat(
        reasoning=Reasoning("<r>", "</r>"),
        calls=(CALLS,),
        tags=("<r>", "</r>", "<call>", "</call>"),
    )
