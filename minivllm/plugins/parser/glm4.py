"""The format of GLM 4.5: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""

from minivllm.runtime.replies import Calls, DescribedParser, Pairs, Reasoning, ReplyFormat

from . import hermes, qwen3

KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
BEFORE = KEY + "{key}" + KEY_END + "\n" + VALUE
AFTER = f"{VALUE_END}\n"
PAIRS = Pairs(BEFORE, AFTER)
HEAD = "{name}\n"
CALLS = Calls("pairs", HEAD, hermes.OPEN, hermes.CLOSE, between="\n", pairs=PAIRS)
REASONING = Reasoning(qwen3.THINK, qwen3.ANSWER)
TAGS = (*qwen3.TAGS, KEY, KEY_END, VALUE, VALUE_END)


class Glm4Parser(DescribedParser):
    """Finds reasoning and function calls in an answer."""

    format = ReplyFormat(REASONING, (CALLS,), TAGS, gap="\n")
