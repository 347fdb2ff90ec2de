from pathlib import Path

from my_plugin.plugin import MyPlugin

from minivllm.plugin import TokenizerContext
from minivllm.testing import TokenizerConformance


class TestMyPlugin(TokenizerConformance):
    plugin = "my-plugin/my-plugin"


def test_a_text_is_its_bytes_and_special_tokens():
    tokenizer = MyPlugin(None, TokenizerContext(Path()))
    found = tokenizer.encode("é</s>", True)
    expected = [256, 0xC3, 0xA9, 257]
    assert found == expected
