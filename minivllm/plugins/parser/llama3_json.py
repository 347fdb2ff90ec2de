"""The format of Llama 3.1 and 3.2: an answer that is ``{"name": ..., "parameters": {...}}``."""

from minivllm.runtime.replies import Calls, DescribedParser, ReplyFormat

TAG = "<|python_tag|>"
KEY = "parameters"
NEXT = "; "
PLAIN = Calls("object", between=NEXT, key=KEY)
TAGGED = Calls("object", begin=TAG, between=NEXT, key=KEY)
SPELLINGS = (PLAIN, TAGGED)


class Llama3Json(DescribedParser):
    """Finds function calls at the beginning of an answer, with or without the tag ``<|python_tag|>`` before them."""

    format = ReplyFormat(None, SPELLINGS, (TAG,))
