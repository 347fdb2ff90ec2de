from my_plugin.plugin import MyPlugin

from minivllm.plugin import ReplyContext, Said, Thought
from minivllm.testing import ParserConformance


class TestMyPlugin(ParserConformance):
    plugin = "my-plugin/my-plugin"


def test_reasoning_is_apart_from_the_answer():
    reply = MyPlugin().start(ReplyContext())
    assert list(reply.feed("<r>Hm.</r>Five.", True)) == [Thought("Hm."), Said("Five.")]
