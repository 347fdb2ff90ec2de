from minivllm.testing import KVStoreConformance


class TestMyPlugin(KVStoreConformance):
    plugin = "my-plugin/my-plugin"
