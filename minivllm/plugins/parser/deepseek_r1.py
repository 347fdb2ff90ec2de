"""The formats of DeepSeek R1 and V3, with calls as blocks of ```` ```json ````, and of V3.1."""

from minivllm.runtime.replies import Calls, DescribedParser, ReplyFormat

from . import qwen3

BEGIN = "<｜tool▁calls▁begin｜>"
END = "<｜tool▁calls▁end｜>"
OPEN = "<｜tool▁call▁begin｜>"
CLOSE = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
NAME = "{name}"
HEAD = f"function{SEPARATOR}{NAME}\n```json\n"
TAIL = "\n```"
BLOCK = Calls("json", HEAD, OPEN, CLOSE, TAIL, BEGIN, END, between="\n")
PLAIN = Calls("json", NAME + SEPARATOR, OPEN, CLOSE, "", BEGIN, END)
TAGS = (qwen3.THINK, qwen3.ANSWER, BEGIN, END, OPEN, CLOSE, SEPARATOR)


class DeepSeekR1(DescribedParser):
    """Finds reasoning and function calls in the answers of DeepSeek R1 and V3."""

    format = ReplyFormat(qwen3.REASONING, (BLOCK, PLAIN), TAGS)


class DeepSeekV31(DescribedParser):
    """Finds reasoning and function calls as ``DeepSeekR1`` does, and writes calls in the format of V3.1."""

    format = ReplyFormat(qwen3.REASONING, (PLAIN, BLOCK), TAGS)
