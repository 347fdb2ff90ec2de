"""Models of transformers that no family serves, and families through both paths: the same tokens everywhere."""

from __future__ import annotations

import inspect
import json
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.core.interfaces.quantizer import Shard
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.loading.shapes import blueprint
from minivllm.device.loading.weights import weight_bytes
from minivllm.errors import ConfigError, ModelError, PluginError, RequestError
from minivllm.plugins.model.fallback.arch import TransformersArch
from minivllm.plugins.model.fallback.layers import Replaced
from minivllm.plugins.model.fallback.plan import make_plan
from minivllm.plugins.quantizer.int8 import Int8
from minivllm.plugins.specs import BUILTINS
from minivllm.registry import ANY, Catalog, Entry, PluginQuery, Registry, Spec
from minivllm.testing import ModelConformance
from minivllm.testing.harness import Harness
from minivllm.testing.tiny import quiet, read_tensors, save, small_config, tiny_model, write_tensors

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8]
SMALL_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 8, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, **SMALL_EXPERTS,
}  # fmt: skip
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = {"sliding_window": 6, "global_head_dim": 16, "num_kv_shared_layers": 0}
# model type without a family -> fields of its small config, and the recognised feature (a word of ``report``)
OTHERS = {
    "apertus": ({}, {"merged", "norm", "head_norm", "rope"}),
    "arcee": ({}, {"merged", "norm", "rope"}),
    "biogpt": ({}, {"merged", "norm"}),
    "codegen": ({"rotary_dim": 4}, {"linear", "norm"}),
    "deepseek_v3": (MLA, {"mlp", "experts", "norm", "kept"}),
    "ernie4_5": ({}, {"merged", "mlp", "norm"}),
    "exaone4": (WINDOW, {"merged", "mlp", "norm", "head_norm", "rope"}),
    "gemma4_text": (GEMMA4, {"merged", "mlp", "norm", "kept"}),
    "glm": ({}, {"merged", "norm"}),
    "gpt_bigcode": ({}, {"linear", "norm"}),
    "gpt_neox": ({}, {"linear", "norm", "rope"}),
    "gptj": ({"rotary_dim": 4}, {"merged", "norm", "kept"}),
    "granite_swa": ({"sliding_window": 6}, {"merged", "norm"}),
    "helium": ({}, {"merged", "mlp", "norm"}),
    "hunyuan_v1_dense": ({"attention_head_dim": 8}, {"merged", "mlp", "norm"}),
    "nemotron": ({}, {"merged", "linear"}),
    "olmo": ({}, {"merged", "mlp"}),
    "olmoe": ({"num_experts": 4, **SMALL_EXPERTS}, {"merged", "experts", "norm", "rope", "kept"}),
    "persimmon": ({}, {"linear", "norm"}),
    "phi": ({}, {"merged", "norm", "kept"}),
    "seed_oss": ({}, {"merged", "mlp", "norm", "rope"}),
}
FAMILIES = sorted(target.rpartition(":")[2] for seam, name, target in BUILTINS if seam == "model")
FAMILIES.remove("TRANSFORMERS")
OWN_ATTENTION = ("BLOOM", "FALCON", "GPT_NEO", "MPT")  # transformers' classes of these compute attention themselves


def class_of(model_type):
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def make(path, model_type, seed=0, **values):
    with quiet():
        hf = tiny_model(small_config(CONFIG_MAPPING[model_type], **values), seed, class_of(model_type))
        return str(save(hf, path)), hf


def harness(path, **more):
    return Harness(path, TransformersArch(), open_checkpoint(path).hf_config(), **more)


def reference(hf, tokens):
    with torch.inference_mode():
        return hf(torch.tensor([tokens])).logits[0].float()


def greedy(hf, ids, n):
    ids = list(ids)
    for _ in range(n):
        ids.append(int(reference(hf, ids)[-1].argmax()))
    return ids[-n:]


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_model_without_a_family_gives_what_transformers_gives(model_type, tmp_path):
    values, words = OTHERS[model_type]
    path, hf = make(tmp_path, model_type, **values)
    run, want = harness(path), reference(hf, PROMPT)
    assert want.std() > 0.05, "the test has no power"
    ways = {
        "whole": run.step({0: PROMPT})[0],
        "in chunks": run.chunked(1, PROMPT, (4, 5, 11)),
        "beside others": run.step({2: PROMPT, 3: [9] * 7, 4: [3]})[2],
    }
    assert {way: float((got - want).abs().max()) for way, got in ways.items() if (got - want).abs().max() > 1e-4} == {}
    assert run.greedy(5, PROMPT, 32) == greedy(hf, PROMPT, 32)
    found = TransformersArch().notes(open_checkpoint(path).hf_config())
    assert {
        word for word in words if not found.get(word, "no").partition(" ")[0] not in ("no", "transformers'")
    } == set()


def test_heads_shorter_than_cos_and_sin_give_what_transformers_gives(tmp_path):
    path, hf = make(tmp_path, "apertus", num_attention_heads=32)  # one element of a head, which torch repeats
    assert harness(path).greedy(0, PROMPT, 8) == greedy(hf, PROMPT, 8)


STATES = ("QWEN3_5", "QWEN3_5_MOE", "QWEN3_NEXT", "LFM2", "LFM2_MOE")  # the fallback has no recurrent states


def suite_of(family):
    suite = type("Suite", (ModelConformance,), {"plugin": f"minivllm/{family.lower()}"})()
    (cls,) = suite.families().values()
    return suite, cls


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_a_family_whose_class_computes_its_own_attention_is_refused_by_the_fallback(family, tmp_path):
    suite, cls = suite_of(family)
    with pytest.raises(ModelError, match="use a model that attends to all tokens of a sequence with softmax"):
        harness(str(suite.case(cls, tmp_path).path))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in (*OWN_ATTENTION, *STATES)])
def test_a_family_and_the_fallback_give_the_same_tokens(family, tmp_path):
    from minivllm.plugins.model import spec

    one = getattr(spec, family)
    suite, cls = suite_of(family)
    case = suite.case(cls, tmp_path)
    native, other = suite.harness(case.path), harness(str(case.path))
    assert suite.difference(other.step({0: PROMPT})[0], case) == "" or len(PROMPT) != len(case.want), one.summary
    assert other.greedy(1, PROMPT, 32) == native.greedy(1, PROMPT, 32)


def test_layers_that_read_the_keys_of_another_do_so(tmp_path):
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": WINDOW["layer_types"] * 2}
    path, hf = make(tmp_path, "gemma4_text", **{**GEMMA4, **layers})
    run, want = harness(path), reference(hf, PROMPT)
    assert "model.layers.3.self_attn.k_proj" not in run.parts.modules, "the test has no power"
    assert (run.chunked(0, PROMPT, (4, 9)) - want).abs().max() < 1e-4


SIZES = {"max_num_seqs": 4, "max_model_len": 96, "kvcache_block_size": 4, "skip_tokenizer_init": True}
WAYS = {
    "whole": {"max_num_batched_tokens": 256, "num_kvcache_blocks": 128},
    "in chunks": {"max_num_batched_tokens": 5, "num_kvcache_blocks": 128},
    "preempted": {"max_num_batched_tokens": 64, "num_kvcache_blocks": 27},
    "process": {"max_num_batched_tokens": 64, "num_kvcache_blocks": 128, "executor": "process"},
}


@pytest.mark.parametrize("model_type", ["exaone4", "gpt_neox", "olmoe"])
def test_tokens_do_not_depend_on_batching_chunks_prefix_hits_or_preemption(model_type, tmp_path):
    path, hf = make(tmp_path, model_type, **OTHERS[model_type][0])
    requested = [PROMPT * 2, PROMPT * 2 + [7, 9], [7, 8, 9], [11]]
    want = [greedy(hf, ids, 24) for ids in requested]
    for way, more in WAYS.items():
        if way == "process" and model_type != "gpt_neox":
            continue
        with LLM(model=path, device="cpu", dtype="float32", **SIZES, **more) as llm:
            assert llm.engine.wiring.parts["model"].name == "minivllm/transformers"
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            for again in range(2):
                outs = llm.generate([{"prompt_token_ids": ids} for ids in requested], params, use_tqdm=False)
                assert [out.outputs[0].token_ids for out in outs] == want, (way, again)
            assert way == "preempted" or any(out.num_cached_tokens for out in outs), "no prefix was hit"
            assert way != "preempted" or llm.engine.planner.preemptions, "nothing was preempted"


# ---- which code runs a model -------------------------------------------------------------------------------------


def chosen(path, **values):
    options = {"device": "cpu", "load_format": "dummy", **values}
    return resolve(EngineConfig(model=str(path), **options), Catalog.discover())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make(tmp_path_factory.mktemp("llama"), "llama")[0]


@pytest.fixture(scope="module")
def neox(tmp_path_factory):
    return make(tmp_path_factory.mktemp("neox"), "gpt_neox")[0]


@pytest.mark.parametrize(
    "impl, name",
    [("auto", "llama"), ("minivllm", "llama"), ("vllm", "llama"), ("transformers", "transformers")],
)
def test_an_architecture_of_a_family_is_the_familys_unless_transformers_is_asked_for(llama, impl, name):
    assert chosen(llama, model_impl=impl).parts["model"].name == f"minivllm/{name}"


def test_an_architecture_without_a_family_is_transformers_and_explain_lists_what_was_recognised(neox):
    found = chosen(neox)
    assert found.parts["model"].name == "minivllm/transformers"
    text = found.explain("model")
    assert "model.impl       minivllm/transformers: no other plug-in serves the model" in text
    assert "model.linear     gpt_neox.layers.*.attention.query_key_value x 2, " in text
    assert "model.kept       no weights: all are the engine's" in text
    assert "device  " not in text and "device  " in found.explain()
    assert chosen(neox, model_arch="transformers").parts["model"].name == "minivllm/transformers"


def test_the_engines_own_code_alone_refuses_what_it_does_not_name(neox):
    with pytest.raises(ModelError, match="no plug-in serves the architecture 'GPTNeoXForCausalLM'"):
        chosen(neox, model_impl="minivllm")
    with pytest.raises(PluginError, match="is used if no other plug-in serves the architecture"):
        chosen(neox, model_impl="minivllm", model_arch="transformers")
    with pytest.raises(PluginError, match="feature 'any_architecture' not declared"):
        chosen(neox, model_impl="transformers", model_arch="llama")
    with pytest.raises(ConfigError, match="model_impl"):
        EngineConfig(model_impl="huggingface")


def test_a_plug_in_of_another_package_that_names_the_architecture_comes_first(monkeypatch):
    limits = {"architecture": {"ArceeForCausalLM"}, "model_type": {"arcee"}, "device": ANY, "dtype": ANY}
    theirs = Spec("their.arcee:Arcee", (2, 0), "Arcee", limits=limits)
    own, entry, spec = Catalog.discover()["model"], Entry("model", "arcee", "a:B", "theirs", "1.0"), Registry.spec
    both = Registry(own.kind, [*own.entries, entry])
    monkeypatch.setattr(Registry, "spec", lambda self, e: theirs if e == entry else spec(self, e))
    query = PluginQuery(
        {"architecture": "ArceeForCausalLM", "model_type": "arcee", "device": "cpu", "dtype": "float32"}
    )
    assert both.select(query).chosen.entry == entry
    assert own.select(query).chosen is None


# ---- what is refused ---------------------------------------------------------------------------------------------

REFUSED = {
    "rembert": ({}, "RemBertForCausalLM cannot run with .*: its attention is its own, not one that can be exchanged"),
    "xglm": ({"attention_heads": 4}, "XGLMForCausalLM cannot run with .*: its attention is its own, not one that"),
    "mamba": ({}, "it has a state besides keys and values"),
    "bert": ({}, r"\(BertSelfAttention\) attends to later tokens"),
    "diffllama": ({}, "calls attention twice in a step"),
    "doge": ({}, "has a mask of its own"),
    "jetmoe": ({"num_local_experts": 4, "kv_channels": 8}, "cannot run without values of tensors on the host"),
    "llama4_text": ({}, "layer_types has 'chunked_attention'"),
    "seed_oss": ({"sliding_window": 6}, "sliding_window=6: no layer passes it to attention"),
    "arcee": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type='dynamic'"),
    "phi": ({"is_causal": False}, "is_causal=False: expected True"),
    "bart": ({}, "is_encoder_decoder=true|its attention is its own"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_the_engine_cannot_serve_is_refused_in_one_line(model_type, tmp_path):
    values, message = REFUSED[model_type]
    with quiet():
        cfg = small_config(CONFIG_MAPPING[model_type], **values)
        cfg.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
        cfg.save_pretrained(tmp_path)
    with quiet(), pytest.raises(ModelError, match=message) as info:
        chosen(tmp_path)
    assert "\n" not in str(info.value) and str(info.value).startswith(f"{tmp_path}/config.json: ")


@pytest.mark.parametrize(
    "raw, message",
    [
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"},
         "no plug-in serves the architecture 'FooForCausalLM', and transformers .* has no causal language model"),
        ({"architectures": ["FooForCausalLM"], "model_type": "foo", "auto_map": {"AutoModelForCausalLM": "evil.Evil"}},
         r"its code is in its own directory \(auto_map\), which is never run"),
        ({"architectures": ["GPTNeoXModel"], "model_type": "gpt_neox"}, "expected GPTNeoXForCausalLM"),
        ({"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"},
         "no plug-in serves the architecture"),
    ],
)  # fmt: skip
def test_an_architecture_that_transformers_does_not_have_is_refused_and_no_code_is_run(tmp_path, raw, message):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelError, match=message) as info:
        chosen(tmp_path)
    assert "\n" not in str(info.value) and not (tmp_path / "ran").exists()


def test_remote_code_of_an_architecture_that_transformers_has_is_not_needed(tmp_path):
    path, hf = make(tmp_path, "gpt_neox")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert (harness(path).step({0: PROMPT})[0] - reference(hf, PROMPT)).abs().max() < 1e-4
    assert not (tmp_path / "ran").exists()


def test_a_model_is_not_split_over_processes(neox):
    with pytest.raises(ModelError, match="set tensor_parallel_size=1"):
        Harness(None, TransformersArch(), open_checkpoint(neox).hf_config(), shard=Shard(0, 2))


def test_requests_with_taps_are_refused(neox):
    more = {"max_num_batched_tokens": 64, "num_kvcache_blocks": 64}
    with LLM(model=neox, device="cpu", dtype="float32", **SIZES, **more) as llm, pytest.raises(RequestError):
        llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(taps=["layers.0.residual"]), use_tqdm=False)


# ---- weights -----------------------------------------------------------------------------------------------------


def test_what_a_checkpoint_holds_for_each_expert_is_stacked(tmp_path):
    path, _ = make(tmp_path, "olmoe", **OTHERS["olmoe"][0])
    stored = read_tensors(tmp_path)
    assert stored["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (48, 32), "the test has no power"
    run = harness(path)
    kept = run.parts.modules["model.layers.1.mlp.experts.own"].tensors
    assert {name: tuple(t.shape) for name, t in kept.items()} == {"gate_up_proj": (4, 96, 32), "down_proj": (4, 32, 48)}
    assert torch.equal(kept["gate_up_proj"][3, 48:], stored["model.layers.1.mlp.experts.3.up_proj.weight"])
    broken = {k: v for k, v in stored.items() if k != "model.layers.1.mlp.experts.3.up_proj.weight"}
    write_tensors(tmp_path, broken)
    with pytest.raises(ModelError, match=r"experts\.gate_up_proj"):
        harness(path)


@pytest.mark.parametrize("change", ["missing", "left over", "another shape"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_the_tensors_name(change, tmp_path):
    path, _ = make(tmp_path, "gpt_neox")
    tensors, name = read_tensors(tmp_path), "gpt_neox.layers.1.mlp.dense_4h_to_h.bias"
    if change == "missing":
        del tensors[name]
    elif change == "left over":
        name = "gpt_neox.layers.1.mlp.extra.weight"
        tensors[name] = torch.zeros(2)
    else:
        tensors[name] = torch.zeros(3)
    write_tensors(tmp_path, tensors)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        harness(path)


@pytest.mark.parametrize("model_type", ["apertus", "deepseek_v3", "granite_swa", "phi"])
def test_all_weights_are_counted_and_dummy_fills_them(model_type, tmp_path):
    path, hf = make(tmp_path, model_type, **OTHERS[model_type][0])
    run = harness(path, load_format="dummy")
    own = {id(p): p.numel() for p in hf.state_dict(keep_vars=True).values()}
    assert sum(t.numel() for m in run.parts.modules.values() for t in m.tensors.values()) == sum(own.values())
    assert weight_bytes(run.parts) == 4 * sum(own.values())
    assert run.step({0: PROMPT})[0].isfinite().all()
    plan = blueprint(TransformersArch(), open_checkpoint(path).hf_config(), run.parts)
    assert plan is not None and plan.modules.keys() == run.parts.modules.keys()


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_shares_the_embeddings_weight_as_config_and_checkpoint_say(tied, tmp_path):
    path, hf = make(tmp_path, "seed_oss", tie_word_embeddings=tied)
    run = harness(path)
    assert (run.step({0: PROMPT})[0] - reference(hf, PROMPT)).abs().max() < 1e-4
    if tied:
        tensors = read_tensors(tmp_path)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
        write_tensors(tmp_path, tensors)
        with quiet():
            hf = type(hf).from_pretrained(path, dtype=torch.float32)
        assert (harness(path).step({0: PROMPT})[0] - reference(hf, PROMPT)).abs().max() < 1e-4


def test_quantized_products_are_those_of_the_family(llama):
    from minivllm.plugins.model.llama import Llama

    found = []
    for arch in (Llama(), TransformersArch()):
        run = Harness(llama, arch, open_checkpoint(llama).hf_config(), quantizer=Int8(None, None))
        found.append(run.step({0: PROMPT})[0])
        assert any(t.dtype == torch.int8 for m in run.parts.modules.values() for t in m.tensors.values())
    assert torch.allclose(*found, atol=1e-5)


def test_bfloat16_keeps_what_transformers_keeps_in_float32(tmp_path):
    path, hf = make(tmp_path, "deepseek_v3", **MLA)
    run = harness(path, dtype="bfloat16")
    kept = run.parts.modules["model.layers.1.mlp.gate.own"].tensors
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).model.layers[1].mlp.gate
    assert kept["e_score_correction_bias"].dtype == theirs.e_score_correction_bias.dtype == torch.float32
    assert kept["weight"].dtype == theirs.weight.dtype  # the dtype depends on the version of transformers
    assert all(b.dtype == torch.float32 for n, b in run.model.body.named_buffers() if n.endswith("inv_freq"))
    off = (run.step({0: PROMPT})[0] - reference(hf, PROMPT)).abs()
    assert off.mean() < 0.2


def test_transformers_classes_stay_as_they_are(llama):
    """A model of transformers beside the engine's computes by itself."""
    cls = transformers.LlamaForCausalLM
    forward = transformers.models.llama.modeling_llama.LlamaAttention.forward
    names = inspect.unwrap(forward).__globals__
    turn = names["apply_rotary_pos_emb"]
    with quiet():
        hf = cls.from_pretrained(llama, dtype=torch.float32).eval()
    before = reference(hf, PROMPT)
    run = harness(llama)
    run.step({0: PROMPT})
    assert torch.equal(reference(hf, PROMPT), before)
    assert transformers.models.llama.modeling_llama.LlamaAttention.forward is forward
    assert names["apply_rotary_pos_emb"] is turn
    assert any(isinstance(m, Replaced) for m in run.model.body.modules())


def test_a_plan_is_made_once_for_a_configuration(llama, monkeypatch):
    from minivllm.plugins.model.fallback import arch as module

    made = []
    monkeypatch.setattr(module, "make_plan", lambda cfg: made.append(1) or make_plan(cfg))
    one, cfg = TransformersArch(), open_checkpoint(llama).hf_config()
    one.attention(cfg), one.weights(cfg), one.conversion(cfg), one.notes(cfg)
    assert len(made) == 1


@contextmanager
def nothing_on_the_host():
    """Raise an error if a step reads a tensor on the host, as a capture does."""
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__bool__, torch.Tensor.cpu):
                raise AssertionError(f"{func.__name__} in a step")
            return func(*args, **(kwargs or {}))

    with Mode():
        yield


@pytest.mark.parametrize("model_type", ["gpt_neox", "granite_swa", "exaone4", "phi"])
def test_a_step_reads_no_values_on_the_host(model_type, tmp_path):
    """So that it can be captured."""
    path, _ = make(tmp_path, model_type, **OTHERS[model_type][0])
    run = harness(path)
    steps, model = [], run.model
    run.model = type("Watched", (), {"logits": model.logits, "__call__": lambda self, s: steps.append(s) or model(s)})()
    run.step({0: PROMPT})
    layers = [m for m in model.body.modules() if "minivllm_attends" in vars(m)]
    for layer in layers:  # the back end of a CPU may read from the host
        vars(layer)["minivllm_attends"] = lambda q, k, v: (q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3]), None)
    with torch.inference_mode(), nothing_on_the_host():
        model.logits(model(steps[0]))
    assert layers


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["apertus", "exaone4", "gemma3_text", "gpt_neox", "llama", "phi", "qwen3"])
def test_each_value_of_a_config_is_computed_or_refused(model_type, tmp_path):
    families = {model_type: class_of(model_type)}
    made = {"plugin": "minivllm/transformers", "families": lambda self: families}
    suite = type("Suite", (ModelConformance,), made)()
    found = suite.verdicts(suite.first(), tmp_path)
    assert {what: verdict for what, verdict in found.items() if verdict[0] == "wrong"} == {}
    assert sum(status == "equal" for status, _ in found.values()) > 25


WIDTHS = {"olmoe": (7, 32), "deepseek_v3": (13, 40), "gemma4_text": (20, 36), "gpt_oss": (7, 36), "qwen3_moe": (20, 36)}
MIXTURES = {
    "deepseek_v3": MLA, "gemma4_text": {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    "gpt_oss": {"num_local_experts": 4},
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["olmoe", *(pytest.param(n, marks=pytest.mark.slow) for n in [*WIDTHS][1:])])
def test_experts_of_a_width_that_no_grouped_product_takes_run_all_the_same(model_type, tmp_path):
    inner, hidden = WIDTHS[model_type]
    sizes = {"moe_intermediate_size": inner, "intermediate_size": inner, "hidden_size": hidden, "head_dim": 8}
    path, hf = make(tmp_path, model_type, **{"num_experts_per_tok": 2, **MIXTURES.get(model_type, {}), **sizes})
    hf.set_experts_implementation("eager")  # transformers' grouped product refuses the width
    run, want = harness(path), reference(hf, PROMPT)
    assert want.std() > 0.05, "the test has no power"
    assert (run.step({0: PROMPT})[0] - want).abs().max() < 1e-4
    assert run.greedy(5, PROMPT, 16) == greedy(hf, PROMPT, 16)
    with LLM(model=path, device="cpu", dtype="bfloat16", **SIZES, num_kvcache_blocks=64) as llm:
        assert llm.generate([{"prompt_token_ids": PROMPT}], use_tqdm=False)[0].error is None
