"""``hf_overrides`` changes config.json before anything is read from it.  A change without effect is refused."""

from __future__ import annotations

import json

import pytest
from config_cases import model_of

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.config import load_config
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.errors import ConfigError, ModelError
from minivllm.frontend.explaining import explain
from minivllm.testing.tiny import tiny_dir
from minivllm.validation import merge

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
PROMPT = {"prompt_token_ids": [(7 * i * i + 3 * i + 5) % 61 for i in range(40)]}
SIZES = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "graph": "off"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_dir(tmp_path_factory.mktemp("model"), "qwen3")[0]


def answer(folder, **more):
    with LLM(str(folder), num_kvcache_blocks=64, **SIZES, **more) as llm:
        made = llm.generate(PROMPT, SamplingParams(max_tokens=6, temperature=0), use_tqdm=False)[0].outputs[0]
    return made.token_ids


def edited(folder, to, **values):
    """Return a copy of a model directory with other keys in its config.json."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**raw, **values}))
    return to


def test_an_overridden_key_does_what_the_same_key_in_the_file_does(model, tmp_path):
    changed = answer(edited(model, tmp_path / "b", rope_scaling=YARN))
    assert changed != answer(model)
    assert answer(model, hf_overrides={"rope_scaling": YARN}) == changed


@pytest.mark.slow
def test_a_worker_process_reads_the_overridden_file(model):
    changed = {"hf_overrides": {"rope_scaling": YARN}}
    assert answer(model, executor="process", **changed) == answer(model, **changed) != answer(model)


def test_an_end_of_sequence_id_of_the_overrides_ends_an_answer(model):
    whole = answer(model)
    assert answer(model, hf_overrides={"eos_token_id": whole[2]}) == whole[:3]


def test_tables_merge_key_by_key_and_other_values_are_replaced():
    raw = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    assert merge(raw, {"a": {"c": [3]}, "d": {"e": 1}}) == {"a": {"b": 1, "c": [3]}, "d": {"e": 1}}
    assert raw == {"a": {"b": 1, "c": [1, 2]}, "d": None}


def test_each_source_of_options_can_hold_overrides_and_they_merge(tmp_path):
    base = tmp_path / "base.toml"
    base.write_text('[hf_overrides]\nhidden_act = "gelu"\n[hf_overrides.rope_scaling]\nfactor = 2.0\ntype = "linear"\n')
    loaded = load_config([base], ["hf_overrides.rope_scaling.factor=4.0"], environ={"MINIVLLM__HF_OVERRIDES": "{a=1}"})
    found = {"hidden_act": "gelu", "rope_scaling": {"factor": 4.0, "type": "linear"}, "a": 1}
    assert loaded.engine.hf_overrides == found
    assert loaded.origins["hf_overrides.rope_scaling.factor"] == "--set"
    assert loaded.origins["hf_overrides.hidden_act"].endswith("base.toml:2")


def test_overrides_are_explained_and_recorded(model, tmp_path, capsys):
    text = json.dumps({"rope_scaling": YARN})
    assert main(["explain", "--model", str(model), "--set", "skip_tokenizer_init=true", "--hf-overrides", text]) == 0
    assert 'rope_scaling.rope_type="yarn", rope_scaling.factor=4.0' in capsys.readouterr().out
    path = tmp_path / "run.json"
    answer(model, hf_overrides={"rope_scaling": YARN, "sliding_window": None}, record=path)
    again = load_config([path]).engine.hf_overrides
    assert again == {"rope_scaling": YARN, "sliding_window": None}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (5, "5 is not a table"),
        ("x", "'x' is not a table"),
        ([1], "is not a table"),
        ({"rope_theta": float("inf")}, "rope_theta=inf: expected a finite number"),
        ({"rope_scaling": {"factor": 1j}}, "rope_scaling.factor is a complex"),
        ({"rope_scalling": YARN}, "Did you mean 'rope_scaling'"),
        ({"num_hidden_layer": 1}, "Did you mean 'num_hidden_layers'"),
        ({"nothing_like_it": 1}, "'nothing_like_it'.*reads no such key"),
        ({"attention_dropout": 0.1}, "'attention_dropout' changes nothing: of training"),
        ({"use_cache": False}, "'use_cache' changes nothing"),
        ({"sliding_window": 7}, "'sliding_window'=7 has no effect.*becomes None"),
        ({"rope_theta": 77.0}, "'rope_theta' has no effect"),
        ({"text_config": {"hidden_size": 8}}, "'text_config'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "factor has no effect with rope_type=default"),
        ({"rope_scaling": {**LINEAR, "beta_fast": 8.0}}, "beta_fast has no effect with rope_type=linear"),
    ],
    ids=str,
)
def test_overrides_that_change_nothing_or_are_no_json_are_refused_by_key(model, overrides, says):
    with pytest.raises(ConfigError, match=says):
        explain(str(model), hf_overrides=overrides, **SIZES)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"vocab_size": -1}, "with hf_overrides: vocab_size=-1: expected a whole number"),
        ({"dtype": "int3"}, "with hf_overrides: dtype='int3'"),
        ({"rope_scaling": {"rope_type": "zigzag"}}, "rope_type='zigzag'"),
        ({"hidden_act": "sine"}, "hidden_act='sine'"),
        ({"architectures": ["NoSuch"]}, "NoSuch"),
    ],
    ids=str,
)
def test_overrides_with_values_that_no_model_has_are_refused_as_in_the_file(model, overrides, says):
    with pytest.raises(ModelError, match=says):
        explain(str(model), hf_overrides=overrides, **SIZES)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gemma3_text", "sliding_window_pattern", 2), ("gemma3_text", "rope_local_base_freq", 9.0),
        ("glm4", "partial_rotary_factor", 1.0), ("gpt2", "n_layer", 1), ("gpt2", "num_hidden_layers", 1),
        ("smollm3", "no_rope_layer_interval", 2), ("mixtral", "num_local_experts", 4), ("phi3", "rope_theta", 77.0),
        ("qwen2_moe", "num_experts_per_tok", 1), ("cohere2", "logit_scale", 0.5), ("llama", "rope_theta", 77.0),
    ],
)  # fmt: skip
def test_a_key_that_a_family_reads_in_any_spelling_is_taken_and_changes_the_layers(family, key, value, tmp_path):
    raw = {k: v for k, v in model_of(family).items() if k not in ("num_hidden_layers", "num_experts")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    explain(str(tmp_path), hf_overrides={key: value}, load_format="dummy", **SIZES)
    plain = open_checkpoint(str(tmp_path)).hf_config()
    changed = open_checkpoint(str(tmp_path), overrides={key: value}).hf_config()
    assert vars(plain) != vars(changed)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt_oss", "hidden_act", "gelu"), ("gemma3_text", "attn_logit_softcapping", 3.0),
        ("mixtral", "output_router_logits", True), ("gpt2", "summary_type", "first"), ("opt", "layerdrop", 0.5),
        ("llama", "pretraining_tp", 2), ("mistral", "use_sliding_window", True),
    ],
)  # fmt: skip
def test_a_key_that_a_family_does_not_read_is_refused(family, key, value, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(model_of(family)))
    with pytest.raises(ConfigError, match=f"hf_overrides: '{key}'"):
        explain(str(tmp_path), hf_overrides={key: value}, load_format="dummy", **SIZES)


def test_a_file_with_two_spellings_of_the_rotary_embedding_is_noted(model, tmp_path):
    both = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    found = explain(str(edited(model, tmp_path / "b", rope_scaling={**YARN, "rope_theta": 1e6}, **both)), **SIZES)
    assert dict(found.notes)["model.rope"] == "rope_scaling is read, and rope_parameters is not, as in transformers"
    lost = {k: v for k, v in YARN.items() if k != "rope_theta"}
    found = explain(str(edited(model, tmp_path / "c", rope_scaling=lost, **both)), **SIZES)
    assert "rope_theta is 10000.0 and not 1000000.0" in dict(found.notes)["model.rope"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"rope_theta": 77.0}, "write text_config.rope_theta"),
        ({"vision_config": {"hidden_size": 8}}, "'vision_config': only the text model is served"),
        ({"text_config": {"rope_thta": 77.0}}, "'text_config.rope_thta'.*Did you mean 'rope_theta'"),
    ],
    ids=str,
)
def test_overrides_of_a_text_model_inside_of_others_are_in_its_table(overrides, says, tmp_path):
    text = {k: v for k, v in model_of("gemma3_text").items() if k != "architectures"}
    raw = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps({**raw, "vision_config": {}}))
    right = {"text_config": {"rope_theta": 77.0}, "tie_word_embeddings": False, "dtype": "float16"}
    explain(str(tmp_path), hf_overrides=right, load_format="dummy", **SIZES)
    with pytest.raises(ConfigError, match=says):
        explain(str(tmp_path), hf_overrides=overrides, load_format="dummy", **SIZES)
