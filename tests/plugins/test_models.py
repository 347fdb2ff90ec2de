"""Tests of Llama, Qwen2 and Qwen3 alone.  The conformance kit checks that they equal transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.attention import AttnSpec
from minivllm.core.interfaces.decoder import HEAD, MLP, DecoderSpec, Experts, LayerSpec, Norm, Rope, Router
from minivllm.core.interfaces.model import ModelArch, decoder_rules, takes_logits_indices
from minivllm.core.interfaces.quantizer import Shard
from minivllm.device.layers.decoder import Decoder
from minivllm.device.loading.weights import as_halves
from minivllm.errors import ModelError
from minivllm.plugins.model.mistral import Ministral3
from minivllm.plugins.specs import BUILTINS
from minivllm.testing import ModelConformance
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import ARCHS, LLAMA3_ROPE, tiny_config, tiny_dir, tiny_model

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8]
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "num_hidden_layers": 3}
ALL = {
    "the plain config", "mha", "mqa", "kv heads null", "8 heads", "head_dim 16", "head_dim 6", "tied", "one layer",
    "three layers", "64 tokens", "odd intermediate_size", "rms_norm_eps 0.05", "rope_theta", "rope linear",
    "rope llama3", "rope llama3 of max_position_embeddings", "rope_scaling, the old name", "hidden_act swish",
}  # fmt: skip
NEAR = {"window from layer 1 on", "window in all layers", "window in layer 0", "window of one token"}
SERVED = {
    "llama": ALL | {"attention_bias", "mlp_bias", "both biases", "head_dim null"},
    "qwen2": ALL | NEAR,
    "qwen3": ALL | NEAR | {"attention_bias"},
}


@pytest.mark.parametrize("name", SERVED)
def test_what_equals_transformers_is_not_refused_tomorrow(name, tmp_path):
    """The kit allows an architecture to refuse a config, but these configs must be accepted."""
    suite = type("Suite", (ModelConformance,), {"plugin": f"minivllm/{name}"})()
    found = suite.verdicts(suite.first(), tmp_path)
    assert {what: found[what] for what in SERVED[name] if found[what][0] != "equal"} == {}


def reference(hf, tokens) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([tokens])).logits[0].float()


def test_cache_format_may_differ_from_the_activations(tmp_path):
    path, cfg, hf = tiny_dir(tmp_path)
    harness = Harness(path, ARCHS["llama"](), cfg, kv="float16")
    assert harness.parts.layers[0].cache["k"].dtype == torch.float16
    assert (harness.step({0: PROMPT})[0] - reference(hf, PROMPT)).abs().max() < 0.02


def test_layers_with_and_without_a_window_are_two_kv_groups(tmp_path):
    path, cfg, _ = tiny_dir(tmp_path, "qwen2", "mqa", **WINDOWS)
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
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor=None"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "beta": 2}}, "beta not known"),
        ("llama", {"head_dim": 7}, "head_dim=7"),
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
    with pytest.raises(ModelError, match="cannot be split over 3 processes"):
        Harness("nowhere", ARCHS["llama"](), tiny_config(heads="gqa"), shard=Shard(0, 3), load_format="dummy")


def test_tiny_models_are_not_degenerate():
    """The comparisons mean something only if logits depend on the whole context."""
    hf = tiny_model(tiny_config())
    a, b = reference(hf, PROMPT)[-1], reference(hf, [6, *PROMPT[1:]])[-1]
    assert (a - b).abs().max() > 0.05 and a.std() > 0.5


def test_after_the_last_attention_only_tokens_that_draw_are_computed():
    """Results for a prompt's other tokens are not used there, unless their log-probabilities are requested."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "num_kvcache_blocks": 64}
    llm = LLM(model="pocket", device="cpu", dtype="float32", enable_prefix_caching=False, graph="off", **sizes)
    rows: list[int] = []
    last = llm.engine.executor.runner.model.blocks[-1]
    gate_up = last.up
    last.up = lambda h: rows.append(len(h.x)) or gate_up(h)
    ids = [{"prompt_token_ids": list(range(20, 20 + n))} for n in (5, 7)]
    one = SamplingParams(max_tokens=1, temperature=0)

    llm.generate(ids, one)
    assert rows == [2]
    rows.clear()  # three chunks; only the last one draws
    llm.generate([{"prompt_token_ids": list(range(20, 60))}], one)
    assert rows == [1, 1, 1]
    rows.clear()
    llm.generate(ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    assert sum(rows) == 12
    llm.close()


@pytest.mark.parametrize("more", [{}, {"drafter": "ngram", "speculate": "always"}], ids=["plain", "drafts"])
def test_tokens_are_those_of_a_model_that_gives_all_hidden_states(more):
    """Chunks, decode rows beside them, rows that end before others: whatever draws gets its own hidden states."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 96, "num_kvcache_blocks": 64}
    llm = LLM(model="pocket", device="cpu", dtype="float32", enable_prefix_caching=False, **sizes, **more)
    runner = llm.engine.executor.runner
    ids = [
        {"prompt_token_ids": [20 + i * k % 40 for i in range(n)]}
        for k, n in ((3, 30), (1, 7), (2, 19), (7, 1), (5, 44))
    ]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 20, 5, 14, 3)]
    found = []
    for runner.selects in (True, False):
        found.append([out.outputs[0].token_ids for out in llm.generate(ids, params)])
    assert found[0] == found[1]
    llm.close()


def test_a_model_with_a_call_of_its_own_says_itself_whether_it_takes_logits_indices():
    class Whole(Decoder):
        def __call__(self, step):
            return super().__call__(replace(step, logits_indices=None))

    class Other(Decoder):
        pass

    made = [cls.__new__(cls) for cls in (Decoder, Other, Whole)]
    assert [takes_logits_indices(model) for model in made] == [True, True, False]


OTHERS = sorted({name for seam, name, _ in BUILTINS if seam == "model"} - {*SERVED, "transformers"})


@pytest.mark.parametrize("name", OTHERS)
def test_a_family_gives_the_logits_of_transformers_whole_and_in_chunks(name, tmp_path):
    """The slow tests hold each to the whole kit."""
    suite = type("Suite", (ModelConformance,), {"plugin": f"minivllm/{name}"})()
    for i, cls in enumerate(suite.families().values()):
        assert suite.judge(cls, tmp_path / str(i), {}, (5, 6, 23)) == ("equal", "")


TABLE = DecoderSpec(61, 32, (LayerSpec(AttnSpec(4, 2, 8, 8), MLP(48), Rope(8, 100.0)),) * 2, Norm(1e-6))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"norms": "arround"}, "layer 0: norms='arround': expected one of before, after, around"),
        ({"norms": ["before"]}, "layer 0: norms=['before']: expected one of before, after, around"),
        ({"qk_norm": "rows"}, "layer 0: qk_norm='rows': expected one of None, head, width, heads"),
        ({"mlp": MLP(48, "mish")}, "layer 0: mlp.activation='mish': expected one of silu, gelu, "),
        ({"mlp": Experts(4, 2, 8, "mish")}, "layer 0: mlp.activation='mish': expected one of silu, gelu, "),
        (
            {"mlp": Experts(4, 2, 8, shared=MLP(8, "mish"))},
            "layer 0: mlp.shared.activation='mish': expected one of silu, ",
        ),
        ({"mlp": Experts(4, 2, 8, router=Router("max"))}, "layer 0: mlp.router.score='max': expected one of softmax, "),
        ({"mlp": Experts(4, 5, 8)}, "layer 0: mlp.chosen=5: expected between 1 and mlp.count=4"),
        ({"rope": Rope(8, 100.0, "ntk")}, "layer 0: rope.kind='ntk': expected one of default, linear, "),
        ({"parallel": True, "norms": "around"}, "layer 0: parallel=True is only implemented with norms='before'"),
        (
            {"gated": True, "rope": Rope(8, 100.0, interleaved=True)},
            "layer 0: gated=True is not implemented with rope.interleaved=True",
        ),
        ({"mlp": Experts(4, 2, 8, shared_gate=True)}, "layer 0: mlp.shared_gate=True needs the MLP mlp.shared"),
        ({"mlp": Experts(4, 2, 8, limit=7.0)}, "layer 0: mlp.limit=7.0 is only for mlp.activation='swiglu_oai'"),
    ],
)
def test_a_word_that_no_table_has_is_refused(change, message):
    class Typed(ModelArch):
        def describe(self, cfg):
            return replace(TABLE, layers=tuple(replace(layer, **change) for layer in TABLE.layers))

    with pytest.raises(ModelError) as info:
        Harness(None, Typed(), None)
    assert str(info.value).startswith(message)


def test_a_bias_of_an_rms_norm_is_refused():
    class Typed(ModelArch):
        def describe(self, cfg):
            return replace(TABLE, norm=Norm(1e-6, bias=True))

    with pytest.raises(ModelError, match="norm: an RMSNorm has no bias: expected bias=False, or centered=True"):
        Harness(None, Typed(), None)


def test_norms_of_heads_are_put_in_order_with_the_rows_that_they_weigh():
    rope = Rope(4, 100.0, interleaved=True)
    spec = replace(TABLE, layers=tuple(replace(layer, rope=rope, qk_norm=HEAD) for layer in TABLE.layers))
    ordered = {rule.source.rpartition(".")[2]: rule.pairs for rule in decoder_rules(spec) if rule.pairs}
    assert ordered == dict.fromkeys(("q_proj", "k_proj", "q_norm", "k_norm"), (8, 4))
    assert as_halves(torch.arange(8), 8, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("family", ["gemma3", "cohere2", "phi3"])
def test_a_number_of_layers_that_the_checkpoint_contradicts_is_named(family, tmp_path):
    """Also where layers differ from each other."""
    path, _, _ = tiny_dir(tmp_path, family, num_hidden_layers=4)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 2, "layer_types": None}))
    with pytest.raises(ModelError, match=r"num_hidden_layers=2: .* expected 4, as the checkpoint has"):
        LLM(model=str(path), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=32)


def test_drafts_of_a_row_near_its_end_beside_one_with_many():
    """The draft model continues for the row with most drafts.  It reads nothing behind the end of the other rows."""
    drafter = {"name": "model", "options": {"model": "pocket-draft"}}
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "num_kvcache_blocks": 64}
    prompts = [{"prompt_token_ids": [20 + i * k % 40 for i in range(n)]} for k, n in ((3, 45), (1, 20), (2, 48))]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    found = []
    for more in ({}, {"drafter": drafter, "num_speculative_tokens": 7, "speculate": "always"}):
        with LLM(model="pocket", device="cpu", dtype="float32", **sizes, **more) as llm:
            found.append([out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
            speculating = llm.engine.speculation
            assert speculating is None or not speculating.failed, "speculation is off"
    assert found[0] == found[1]


@pytest.mark.parametrize("beta", [0.7, 0, None])
def test_queries_of_ministral3_grow_with_their_position_as_in_transformers(beta, tmp_path):
    """The prompt is longer than the trained length, so a missing factor changes the logits."""
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 4}
    path, cfg, hf = tiny_dir(tmp_path, "ministral3", rope_parameters={**rope, "llama_4_scaling_beta": beta or 0.0})
    if beta is None:
        del cfg.rope_parameters["llama_4_scaling_beta"]
        with pytest.raises(ModelError, match="llama_4_scaling_beta=None: expected a number >= 0"):
            Harness(path, Ministral3(), cfg)
        return
    harness = Harness(path, Ministral3(), cfg)
    assert (harness.step({0: PROMPT})[0] - reference(hf, PROMPT)).abs().max() < 1e-4
    factors = harness.model.blocks[0].attn.factors
    assert (factors is None) == (beta == 0)
    if factors is not None:
        harness.model.blocks[0].attn.factors = torch.ones_like(factors)
        assert (harness.step({1: PROMPT})[1] - reference(hf, PROMPT)).abs().max() > 1e-2


@pytest.mark.parametrize("change", [{"llama_4_scaling_beta": "1"}, {"original_max_position_embeddings": 2.5}])
def test_wrong_numbers_of_the_growth_of_queries_are_refused(change):
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 8,
    }
    cfg = tiny_config("ministral3")
    cfg.rope_parameters = {**rope, **change}
    with pytest.raises(ModelError, match=next(iter(change))):
        Ministral3().describe(cfg)
