import numpy as np
from my_plugin.plugin import MyPlugin

from minivllm.plugin import PredictorContext, RequestFacts
from minivllm.testing import PredictorConformance


class TestMyPlugin(PredictorConformance):
    plugin = "my-plugin/my-plugin"


def test_the_mean_of_earlier_answers_is_predicted():
    predictor = MyPlugin(None, PredictorContext(100, 8, 64))
    prompt = np.array([1, 2, 3], np.int32)
    request = RequestFacts(prompt, 90, 0, 0, 0.0)
    assert predictor.output_tokens(request) is None
    for tokens in (10, 30):
        predictor.ended(request, tokens, cut=False)
    assert predictor.output_tokens(request) == 20
