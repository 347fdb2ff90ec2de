from minivllm.testing import QuantizerConformance


class TestMyPlugin(QuantizerConformance):
    plugin = "my-plugin/my-plugin"
