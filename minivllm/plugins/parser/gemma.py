"""The format of Gemma 4: ``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:5}<tool_call|>``."""

from minivllm.runtime.replies import Calls, DescribedParser, Reasoning, ReplyFormat

OPEN = "<|tool_call>"
CLOSE = "<tool_call|>"
QUOTE = '<|"|>'
CHANNEL = "<|channel>"
CHANNEL_END = "<channel|>"
HEAD = "call:{name}"
THOUGHT = f"{CHANNEL}thought\n"
CALLS = Calls("quoted", HEAD, OPEN, CLOSE, quote=QUOTE)
REASONING = Reasoning(THOUGHT, CHANNEL_END)
TAGS = (CHANNEL, CHANNEL_END, OPEN, CLOSE, QUOTE)


class Gemma(DescribedParser):
    """Finds reasoning, in the channel ``thought``, and function calls in an answer."""

    format = ReplyFormat(REASONING, (CALLS,), TAGS, gap="")
