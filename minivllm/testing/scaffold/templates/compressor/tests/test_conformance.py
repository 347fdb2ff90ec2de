from minivllm.testing import CompressorConformance


class TestMyPlugin(CompressorConformance):
    plugin = "my-plugin/my-plugin"
