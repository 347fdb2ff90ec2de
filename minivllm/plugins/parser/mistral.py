"""The formats of Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]`` and ``[TOOL_CALLS]NAME[ARGS]{...}``."""

from minivllm.runtime.replies import Calls, DescribedParser, Reasoning, ReplyFormat

TAG = "[TOOL_CALLS]"
LIST = f"{TAG}["
LISTED = Calls("object", begin=LIST, between=", ", end="]")
NAMED = Calls("json", "{name}[ARGS]", TAG)
WITH_ID = Calls("json", "{name}[CALL_ID]{id}[ARGS]", TAG)
BARE = Calls("json", "{name}", TAG)
SPELLINGS = (LISTED, NAMED, WITH_ID, BARE)
REASONING = Reasoning("[THINK]", "[/THINK]")
TAGS = (TAG, "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


class MistralParser(DescribedParser):
    """Finds reasoning and function calls in an answer."""

    format = ReplyFormat(REASONING, SPELLINGS, TAGS, gap="")
