from my_plugin.plugin import MyPlugin

from minivllm.plugin import Begun, Ended, ReplyContext, Said, Thought, Written
from minivllm.testing import ParserConformance


class TestMyPlugin(ParserConformance):
    plugin = "my-plugin/my-plugin"


def test_a_reply_is_divided_into_its_parts():
    reply = MyPlugin().start(ReplyContext())
    parts = reply.feed('<r>Hm.</r>Five.<call>find {"text": "five"}</call>', True)
    kinds = [type(part) for part in parts]
    assert kinds == [Thought, Said, Begun, Written, Ended] and parts[2].name == "find"
