"""Calls as a list in Python: ``[f(a=1), g(b="x")]``, the format of Llama 4, Llama 3.2 (small), OLMo 3 and others."""

from minivllm.runtime.replies import Calls, DescribedParser, ReplyFormat

START = "<|python_start|>"
END = "<|python_end|>"
HEAD = "{name}("
FIRST = f"{START}["
LAST = f"]{END}"
NEXT = ", "
PLAIN = Calls("python", HEAD, begin="[", between=NEXT, end="]")
TAGGED = Calls("python", HEAD, begin=FIRST, between=NEXT, end=LAST)
SPELLINGS = (PLAIN, TAGGED)
TAGS = (START, END)


class Pythonic(DescribedParser):
    """Finds a list of function calls at the beginning of an answer."""

    format = ReplyFormat(None, SPELLINGS, TAGS)
