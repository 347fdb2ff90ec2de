from my_plugin.plugin import MyPlugin

from minivllm.plugin import BranchEnd
from minivllm.testing import StrategyConformance


class TestMyPlugin(StrategyConformance):
    plugin = "my-plugin/my-plugin"


def test_the_likeliest_comes_first_and_what_failed_last():
    ends = [BranchEnd(0, 10, -9.0, "stop"), BranchEnd(1, 5, -2.0, "stop"), BranchEnd(2, 5, -1.0, "error")]
    found = list(MyPlugin().result(None, ends))
    expected = [1, 0, 2]
    assert found == expected
