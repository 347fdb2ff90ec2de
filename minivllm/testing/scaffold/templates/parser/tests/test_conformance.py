from my_plugin.plugin import MyPlugin

from minivllm.plugin import ReplyContext, Said, Thought
from minivllm.testing import ParserConformance


class TestMyPlugin(ParserConformance):
    plugin = "my-plugin/my-plugin"


def test_reasoning_is_apart_from_the_answer():
    reply = MyPlugin().start(ReplyContext())
    found = list(reply.feed("<r>Hm.</r>Five.", True))
    expected = [Thought("Hm."), Said("Five.")]
    assert found == expected
