"""The format of Hermes and Qwen 2.5: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from minivllm.runtime.replies import Calls, DescribedParser, ReplyFormat

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
BEFORE = f"{OPEN}\n"
AFTER = f"\n{CLOSE}"
CALLS = Calls("object", open=BEFORE, close=AFTER, between="\n")
TAGS = (OPEN, CLOSE)


class Hermes(DescribedParser):
    """Finds function calls between tags; this format has no reasoning."""

    format = ReplyFormat(calls=(CALLS,), tags=TAGS)
