from minivllm import LLM, SamplingParams
from minivllm.testing import AttentionConformance


class TestMyPlugin(AttentionConformance):
    plugin = "my-plugin/my-plugin"


def tokens(attention):
    with LLM(model="pocket", dtype="float32", device="cpu", attention=attention, max_model_len=128) as llm:
        out = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        return out[0].tokens


def test_the_model_writes_what_it_writes_with_the_reference():
    assert tokens("my-plugin/my-plugin") == tokens("sdpa")
