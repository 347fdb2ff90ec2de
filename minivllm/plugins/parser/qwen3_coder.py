"""The format of Qwen3-Coder and Qwen3.5: ``<function=NAME><parameter=KEY>VALUE</parameter></function>``.

Values have no quotes.  The schema of the function declares which of them are strings.
"""

from minivllm.runtime.replies import Calls, DescribedParser, Pairs, ReplyFormat

from . import qwen3

FUNCTION = "<function="
END = "</function>"
PARAMETER = "<parameter="
VALUE = "</parameter>"
BEFORE = PARAMETER + "{key}>\n"
AFTER = f"\n{VALUE}\n"
PAIRS = Pairs(BEFORE, AFTER)
OPEN = "<tool_call>\n"
CLOSE = "</tool_call>"
NAMED = FUNCTION + "{name}>\n"
LINE = "\n"
TAIL = f"{END}\n"
TAGGED = Calls("pairs", NAMED, OPEN, CLOSE, TAIL, between=LINE, pairs=PAIRS)
BARE = Calls("pairs", "{name}>\n", FUNCTION, CLOSE, END, between=LINE, pairs=PAIRS)
TAGS = (*qwen3.TAGS, FUNCTION, END, PARAMETER, VALUE)


class Qwen3Coder(DescribedParser):
    """Finds reasoning and function calls.  The tag ``<tool_call>`` around a call may be missing, as some models leave
    it out.
    """

    format = ReplyFormat(qwen3.REASONING, (TAGGED, BARE), TAGS)
