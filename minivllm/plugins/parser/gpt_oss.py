"""The format of gpt-oss (harmony): messages in channels, ``analysis`` for reasoning and ``final`` for the answer."""

from minivllm.runtime.replies import Channels, DescribedParser, ReplyFormat

CHANNELS = Channels()


class GptOssParser(DescribedParser):
    """Finds reasoning, calls and content in channels."""

    format = ReplyFormat(tags=CHANNELS.tags, channels=CHANNELS)
