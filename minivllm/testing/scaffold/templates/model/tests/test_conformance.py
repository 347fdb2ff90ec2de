from minivllm.testing import ModelConformance


class TestMyPlugin(ModelConformance):
    plugin = "my-plugin/my-plugin"
