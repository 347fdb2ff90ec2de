from my_plugin.plugin import MyPlugin

from minivllm.testing import HooksConformance


class TestMyPlugin(HooksConformance):
    plugin = "my-plugin/my-plugin"

    def test_it_counts_the_steps(self):
        mine = MyPlugin()
        engine = self.engine(mine)
        self.busy(engine)
        summary = mine.summary()
        engine.stop()
        assert summary["steps"] > 20 and summary["p50_ms"] <= summary["p99_ms"]
