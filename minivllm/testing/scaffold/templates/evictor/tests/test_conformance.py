from my_plugin.plugin import MyPlugin

from minivllm.testing import EvictorConformance
from minivllm.testing.sim import request, run, sim_engine


class TestMyPlugin(EvictorConformance):
    plugin = "my-plugin/my-plugin"


def test_a_prefix_that_is_hit_often_outlives_prompts_that_come_once():
    engine = sim_engine(slots=1, blocks=30, evictor=MyPlugin)  # blocks of 4 tokens, on a device without a model
    hot = [7] * 16
    for i in range(20):
        for prompt in (hot, [i, *range(20)], [i, 1, *range(20)]):
            made = request(engine, f"{i}-{len(prompt)}-{prompt[1]}", prompt, max_tokens=4, ignore_eos=True)
            run(engine)
            if prompt is hot and i:
                assert made.cached_tokens == 15, "expected all tokens but the last in the cache"
