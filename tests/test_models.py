"""Llama, Qwen2 and Qwen3 compute what transformers computes, however a sequence is cut into steps."""

from __future__ import annotations

import pytest
import torch
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import ARCHS, LLAMA3_ROPE, tiny_config, tiny_dir, tiny_model

from minivllm.core.interfaces.quantizer import Shard
from minivllm.errors import ModelError

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8]
CASES = {
    "llama-mha": {"family": "llama", "heads": "mha"},
    "llama-gqa-tied": {"family": "llama", "heads": "gqa", "tie_word_embeddings": True},
    "llama-mqa-bias": {"family": "llama", "heads": "mqa", "attention_bias": True, "mlp_bias": True},
    "llama-llama3": {"family": "llama", "heads": "gqa", "rope_parameters": LLAMA3_ROPE},
    "llama-linear": {
        "family": "llama",
        "heads": "gqa",
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    },
    "qwen2-mha": {"family": "qwen2", "heads": "mha"},
    "qwen2-gqa-tied": {"family": "qwen2", "heads": "gqa", "tie_word_embeddings": True},
    "qwen2-windows": {
        "family": "qwen2",
        "heads": "mqa",
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3-mha-bias": {"family": "qwen3", "heads": "mha", "attention_bias": True},
    "qwen3-gqa-tied": {"family": "qwen3", "heads": "gqa", "tie_word_embeddings": True, "head_dim": 16},
    "qwen3-mqa": {"family": "qwen3", "heads": "mqa"},
}


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    values = dict(CASES[request.param])
    path, cfg, hf = tiny_dir(tmp_path, **values)
    return Harness(path, ARCHS[values["family"]](), cfg), hf


def reference(hf, tokens) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([tokens])).logits[0].float()


def test_logits_equal_transformers_whole_chunked_token_by_token_and_among_strangers(case):
    harness, hf = case
    want = reference(hf, PROMPT)
    ways = {"whole": harness.step({0: PROMPT})[0]}
    chunks = [harness.step({1: PROMPT[a:b]})[1] for a, b in ((0, 7), (7, 8), (8, 16), (16, 19))]
    ways["chunked"] = torch.cat(chunks)
    ways["single"] = torch.cat([harness.step({2: [t]})[2] for t in PROMPT])
    strangers = [
        {3: PROMPT[:5], 4: [9] * 11, 5: [3]},
        {3: PROMPT[5:6], 4: [4], 5: [7]},
        {3: PROMPT[6:12], 4: [8], 5: [6, 6], 6: [11, 12, 13]},
        {3: PROMPT[12:], 5: [1] * 7, 6: [2]},
    ]
    ways["among strangers"] = torch.cat([harness.step(feed)[3] for feed in strangers])
    for way, got in ways.items():
        assert (got - want).abs().max() <= 1e-4, way


def test_32_greedy_tokens_equal_transformers(case):
    harness, hf = case
    tokens = list(PROMPT)
    for _ in range(32):
        tokens.append(int(reference(hf, tokens)[-1].argmax()))
    assert harness.greedy(0, PROMPT, 32) == tokens[len(PROMPT) :]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ARCHS)
def test_half_precision_is_at_most_twice_as_far_from_float32_as_transformers(tmp_path, family, dtype):
    path, cfg, hf = tiny_dir(tmp_path, family)
    want = reference(hf, PROMPT)
    theirs = (reference(hf.to(getattr(torch, dtype)), PROMPT) - want).abs().max()
    ours = (Harness(path, ARCHS[family](), cfg, dtype=dtype).step({0: PROMPT})[0] - want).abs().max()
    assert 0 < ours <= 2 * theirs + 1e-3


def test_cache_format_may_differ_from_the_activations(tmp_path):
    path, cfg, hf = tiny_dir(tmp_path)
    harness = Harness(path, ARCHS["llama"](), cfg, kv="float16")
    assert harness.parts.layers[0].cache["k"].dtype == torch.float16
    assert (harness.step({0: PROMPT})[0] - reference(hf, PROMPT)).abs().max() < 0.02


def test_layers_with_and_without_a_window_are_two_kv_groups(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, **CASES["qwen2-windows"])
    harness = Harness(path, ARCHS["qwen2"](), cfg)
    assert [(layer.group, layer.spec.window) for layer in harness.parts.layers] == [(0, None), (1, 6), (1, 6)]


@pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")
def test_old_style_rope_configs_mean_the_same(tmp_path):
    path, cfg, hf = tiny_dir(tmp_path, rope_parameters=LLAMA3_ROPE)
    old = {k: v for k, v in LLAMA3_ROPE.items() if k not in ("rope_theta", "rope_type")}
    cfg.rope_parameters, cfg.rope_scaling, cfg.rope_theta = None, {**old, "type": "llama3"}, 10000.0
    assert (Harness(path, ARCHS["llama"](), cfg).step({0: PROMPT})[0] - reference(hf, PROMPT)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("family", "values", "says"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu': want 'silu'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='yarn'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor=None"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "beta": 2}}, "beta not known"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"sliding_window": 4}, "sliding_window=4"),
        ("llama", {"head_dim": 7}, "head_dim=7"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None},
            "sliding_window=None",
        ),
        ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    ],
)
def test_config_values_that_are_not_implemented_are_refused(family, values, says):
    cfg = tiny_config(family)
    for name, value in values.items():
        setattr(cfg, name, value)
    with pytest.raises(ModelError, match=says):
        Harness("nowhere", ARCHS[family](), cfg, load_format="dummy")


def test_heads_that_cannot_be_split_are_refused():
    with pytest.raises(ModelError, match="cannot be split over 4 processes"):
        Harness("nowhere", ARCHS["llama"](), tiny_config(heads="gqa"), shard=Shard(0, 4), load_format="dummy")


def test_tiny_models_are_not_degenerate():
    """The comparisons mean something only if logits depend on the whole context."""
    hf = tiny_model(tiny_config())
    a, b = reference(hf, PROMPT)[-1], reference(hf, [6, *PROMPT[1:]])[-1]
    assert (a - b).abs().max() > 0.05 and a.std() > 0.5
