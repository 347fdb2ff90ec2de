from minivllm.testing import EncoderConformance


class TestMyPlugin(EncoderConformance):
    plugin = "my-plugin/my-plugin"
