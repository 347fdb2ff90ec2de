from minivllm.testing import ProcessorConformance


class TestMyPlugin(ProcessorConformance):
    plugin = "my-plugin/my-plugin"
    options = {"last": 5}

    def params(self, vocab):
        """Return values of the plug-in's own parameters for the kit to test."""
        return [{"my_plugin": value} for value in (0.5, 2, 50.0)]

    def wrong_params(self, vocab):
        return [{"my_plugin": value} for value in (-1, "much", 1e9)]

    def reference(self, params, logits, prompt, output):
        """Return the expected logits f64 [V] of one row."""
        for token in set([*prompt, *output][-self.options["last"] :]):
            logits[token] -= params.my_plugin
        return logits
