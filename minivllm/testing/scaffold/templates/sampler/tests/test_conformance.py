import torch

from minivllm.testing import SamplerConformance


class TestMyPlugin(SamplerConformance):
    plugin = "my-plugin/my-plugin"

    def params(self, vocab):
        """Return values of the plug-in's own parameters for the kit to test."""
        return [{"my_plugin": 0.3}, {"my_plugin": 0.9, "temperature": 0.7}]

    def wrong_params(self, vocab):
        return [{"my_plugin": value} for value in (-0.1, 1.5, "a")]

    def probabilities(self, params, logits):
        """Return the expected probabilities f64 [V] of one row."""
        a = params.my_plugin
        if a == 0 or params.temperature == 0:
            return None  # the kit has a reference of the temperature
        p = torch.softmax(logits / params.temperature, 0)
        limit = a * p.max() ** 2
        if ((p / limit - 1).abs() < 1e-4).any():
            return None  # so near the limit, float32 may decide differently
        p = torch.where(p >= limit, p, 0.0)
        return p / p.sum()
