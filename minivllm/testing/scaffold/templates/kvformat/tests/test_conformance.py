from minivllm import LLM, SamplingParams
from minivllm.testing import KVFormatConformance


class TestMyPlugin(KVFormatConformance):
    plugin = "my-plugin/my-plugin"


def test_the_model_still_writes_a_story():
    own = {"kv_format": "my-plugin/my-plugin", "attention": "my-plugin/my-plugin-attention"}
    with LLM(model="pocket", dtype="float32", device="cpu", max_model_len=128, **own) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=12)
        text = llm.generate(["Once upon a time there was a fox"], greedy, use_tqdm=False)[0]["text"]
    assert text.startswith(" named "), text
