"""The format of gpt-oss (harmony): messages in channels, ``analysis`` for reasoning and ``final`` for the answer."""

from minivllm.runtime.replies import Channels, DescribedParser, ReplyFormat

CHANNELS = Channels()


class GptOssParser(DescribedParser):
    """Finds reasoning, function calls and content in the channels of an answer."""

    format = ReplyFormat(tags=CHANNELS.tags, channels=CHANNELS)
