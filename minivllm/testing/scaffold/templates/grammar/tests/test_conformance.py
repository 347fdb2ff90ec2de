import numpy as np
from my_plugin.plugin import MyPlugin

from minivllm.plugin import GrammarContext, GrammarSource
from minivllm.testing import GrammarConformance


class TestMyPlugin(GrammarConformance):
    plugin = "my-plugin/my-plugin"


def test_a_text_is_spelled_to_its_end():
    plugin = MyPlugin(None, GrammarContext((b"n", b"o", b"no", b""), 4, (3,)))
    matcher = plugin.start(plugin.compile(GrammarSource("choice", '["no"]')))
    mask = np.zeros((1, 1), np.int32)
    plugin.fill([matcher], mask, [0])
    assert mask[0, 0] == 0b0101
    found = list(plugin.accept([matcher], [[0, 1, 3]]))
    assert found == [3]
