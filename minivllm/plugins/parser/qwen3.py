"""The format of Qwen3: calls as those of Hermes, and reasoning between ``<think>`` and ``</think>``."""

from minivllm.runtime.replies import DescribedParser, Reasoning, ReplyFormat

from . import hermes

THINK = "<think>"
ANSWER = "</think>"
REASONING = Reasoning(f"{THINK}\n", ANSWER)
TAGS = (THINK, ANSWER, *hermes.TAGS)


class Qwen3Parser(DescribedParser):
    """Finds reasoning and function calls.  A call also ends reasoning that is not closed."""

    format = ReplyFormat(REASONING, (hermes.CALLS,), TAGS)
