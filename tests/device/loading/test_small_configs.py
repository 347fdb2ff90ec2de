"""``small_config`` of the kit makes every class of transformers small, however it calls the number of its experts."""

from __future__ import annotations

import pytest
import transformers

from minivllm.testing.model import LARGEST
from minivllm.testing.tiny import small_config

MIXTURES = [
    "DeepseekV2", "DeepseekV3", "Dots1", "Ernie4_5_Moe", "Glm4Moe", "GptOss", "GraniteMoe", "HunYuanMoEV1", "Jamba",
    "Mixtral", "Qwen2Moe", "Qwen3Moe", "SolarOpen", "MiniMaxM2", "OlmoeFor", "Phimoe",
]  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_at_most_six_experts_by_any_name(name):
    cls = getattr(transformers, f"{name.removesuffix('For')}Config", None)
    if cls is None:
        pytest.skip("not in this version of transformers")
    cfg = small_config(cls)
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = {n: getattr(cfg, n) for n in names if isinstance(getattr(cfg, n, None), int)}
    assert counts and max(counts.values()) <= 6, counts


def test_a_value_that_is_given_wins_by_whatever_name():
    assert small_config(transformers.DeepseekV3Config, n_routed_experts=12).n_routed_experts == 12
    assert small_config(transformers.DeepseekV3Config, num_local_experts=10).n_routed_experts == 10
    assert small_config(transformers.MixtralConfig, num_local_experts=3).num_local_experts == 3


def test_the_kit_refuses_a_config_that_would_make_it_hang():
    from minivllm.testing import ModelConformance

    class Large(ModelConformance):
        plugin = "llama"

        def config(self, cls, **values):
            return small_config(cls.config_class, **{"vocab_size": 500_000, **values})

    with pytest.raises(pytest.fail.Exception, match=rf"at most {LARGEST:,}.*vocab_size=500000"):
        suite = Large()
        suite.check_size(transformers.LlamaForCausalLM, suite.config(transformers.LlamaForCausalLM))
