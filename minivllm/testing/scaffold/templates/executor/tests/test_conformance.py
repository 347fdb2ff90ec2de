from minivllm.testing import ExecutorConformance


class TestMyPlugin(ExecutorConformance):
    plugin = "my-plugin/my-plugin"
