"""An answer that is nothing but JSON: a call, ``{"name": ..., "arguments": {...}}``, or a list of calls."""

from minivllm.runtime.replies import Calls, DescribedParser, ReplyFormat

LISTED = Calls("object", begin="[", between=", ", end="]")
SINGLE = Calls("object", between="\n")
SPELLINGS = (LISTED, SINGLE)


class Json(DescribedParser):
    """Finds function calls at the beginning of an answer."""

    format = ReplyFormat(calls=SPELLINGS)
