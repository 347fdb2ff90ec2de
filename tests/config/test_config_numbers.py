"""An impossible number in config.json is refused by its key, before memory is allocated for it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import minivllm
from minivllm import LLM
from minivllm.device.loading import numbers
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.loading.numbers import LIMITS, ROPE, ROPE_LIMITS, Real, Whole
from minivllm.device.worker import build
from minivllm.errors import ModelError, ResourceError
from minivllm.testing.tiny import tiny_dir

DRAFT = Path(minivllm.__file__).parent / "pocket" / "draft"
CONFIG = {**json.loads((DRAFT / "config.json").read_text()), "use_sliding_window": True}
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64, "num_kvcache_blocks": 16}
COUNTS = [key for key, limit in LIMITS.items() if isinstance(limit, Whole)]
IDS = ["bos_token_id", "eos_token_id"]
REALS = [key for key, limit in LIMITS.items() if isinstance(limit, Real) and not key.startswith("swiglu")]

never = st.one_of(  # no number of a model is any of these
    st.booleans(),
    st.text(max_size=5),
    st.just([True]),
    st.just({}),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.floats(max_value=-1e-9, allow_nan=False),
    st.integers(max_value=-2),
    st.integers(min_value=2**128),
)
no_count = never | st.floats() | st.just(0) | st.integers(min_value=2**31) | st.lists(st.integers(0, 9))
no_real = never | st.just(0) | st.just(0.0) | st.just(5e-324) | st.lists(st.floats())
no_id = (
    never
    | st.floats()
    | st.lists(st.integers(0, 9) | st.integers(max_value=-1), min_size=1).filter(lambda ids: min(ids) < 0)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


def refusal(folder: Path, config: dict) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(folder))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    return text


@given(st.sampled_from(COUNTS), no_count)
def test_counts_are_whole_numbers_that_a_model_can_have(folder, key, value):
    may_be_none = ("max_window_layers", "num_labels", "shared_expert_intermediate_size", *numbers.COUNTS)
    if key in may_be_none and value == 0 and type(value) is int:
        return
    assert f"config.json: {key}=" in refusal(folder, {**CONFIG, key: value})


@pytest.mark.parametrize("value", [65537, 4194304])
def test_labels_are_not_made_without_end(folder, value):
    assert f"config.json: num_labels={value}" in refusal(folder, {**CONFIG, "num_labels": value})
    assert f"text_config.num_labels={value}" in refusal(folder, {**CONFIG, "text_config": {"num_labels": value}})


@given(st.sampled_from(REALS), no_real)
def test_real_numbers_are_positive_and_fit_float32(folder, key, value):
    assert f"config.json: {key}=" in refusal(folder, {**CONFIG, key: value})


@given(st.sampled_from(IDS), no_id)
def test_token_ids_are_whole_and_not_negative(folder, key, value):
    assert f"config.json: {key}=" in refusal(folder, {**CONFIG, key: value})


@given(st.sampled_from(ROPE), st.sampled_from(sorted(ROPE_LIMITS)), no_real)
def test_numbers_of_the_rotary_embedding_are_named_with_their_table(folder, table, key, value):
    given_ = {"rope_type": "llama3", "rope_theta": 1e4, key: value}
    assert f"config.json: {table}.{key}=" in refusal(folder, {**CONFIG, table: given_})
    assert f"{table}.full_attention.{key}=" in refusal(folder, {**CONFIG, table: {"full_attention": given_}})


@given(st.sampled_from(COUNTS + REALS), never)
def test_the_text_part_of_a_larger_model_is_held_to_the_same(folder, key, value):
    assert f"config.json: text_config.{key}=" in refusal(folder, {**CONFIG, "text_config": {key: value}})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float7", "int8", 5, True, [], {}, "", 0])
def test_a_dtype_is_one_that_weights_have(folder, key, value):
    assert f"config.json: {key}=" in refusal(folder, {**CONFIG, key: value})


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters", "text_config", "quantization_config"])
@pytest.mark.parametrize("value", [5, "linear", [1], True])
def test_a_table_is_an_object(folder, key, value):
    assert f"config.json: {key}=" in refusal(folder, {**CONFIG, key: value})


@pytest.mark.parametrize("text", ["1" * 5000, "[" * 100_000, "-" + "9" * 10_000])
def test_numbers_and_lists_without_end_are_refused(folder, text):
    (folder / "config.json").write_text('{"vocab_size": ' + text + "}")
    with pytest.raises(ModelError, match=r"config\.json"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "more",
    [
        {"pad_token_id": -1}, {"eos_token_id": None}, {"eos_token_id": [1, 2]}, {"bos_token_id": None},
        {"head_dim": None},
        {"sliding_window": None}, {"rope_scaling": None}, {"torch_dtype": "torch.bfloat16"}, {"max_window_layers": 0},
        {"num_labels": 0}, {"num_labels": None}, {"num_labels": 3}, {"id2label": {"0": "A"}, "label2id": {"A": 0}},
        {"time_step_limit": [0.0, math.inf]}, {"num_key_value_heads": None}, {"rope_theta": 10_000_000},
    ],
)  # fmt: skip
def test_what_published_models_say_is_read(folder, more):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))
    open_checkpoint(str(folder))


@pytest.fixture
def nothing_is_built(monkeypatch):
    def fail(*args):
        raise AssertionError("memory was taken for the model")

    monkeypatch.setattr(build, "build_model", fail)


def load(folder: Path, **options) -> None:
    LLM(model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, **SIZES, **options).close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", 1 << 24), ("vocab_size", 60), ("hidden_size", 1 << 18), ("hidden_size", 64),
        ("intermediate_size", 1 << 22), ("intermediate_size", 47), ("head_dim", 4096), ("head_dim", 6),
        ("num_attention_heads", 16), ("num_attention_heads", 16384), ("num_key_value_heads", 1),
        ("num_key_value_heads", 4),
        ("num_hidden_layers", 10_000), ("num_hidden_layers", 3), ("num_hidden_layers", 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shard", [None, "20KB"], ids=["one file", "shards"])
@pytest.mark.usefixtures("nothing_is_built")
def test_a_size_that_the_weights_contradict_is_refused_by_its_key(tmp_path, key, value, shard):
    path, _, _ = tiny_dir(tmp_path / "m", "qwen3", shard=shard)
    config = json.loads((path / "config.json").read_text())
    config[key] = value
    if key == "num_hidden_layers":
        config["layer_types"] = ["full_attention"] * value
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"config\.json: .*{key}={value}.* expected "):
        load(path)


@pytest.mark.parametrize(
    "more",
    [
        {"vocab_size": 1 << 24, "hidden_size": 1 << 16}, {"intermediate_size": 1 << 22, "hidden_size": 1 << 16},
        {"head_dim": 4096, "num_attention_heads": 16384, "hidden_size": 1 << 16},
    ],
)  # fmt: skip
@pytest.mark.parametrize("quantizer", ["none", "int8"])
@pytest.mark.usefixtures("nothing_is_built")
def test_random_weights_that_no_memory_holds_are_refused_before_they_are_made(tmp_path, more, quantizer):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **more}))
    with pytest.raises(ResourceError, match=r"no memory for the model's weights: .* GiB are free"):
        load(tmp_path, load_format="dummy", quantizer=quantizer)


def test_a_draft_model_is_held_to_the_same(tmp_path):
    shutil.copytree(DRAFT, tmp_path / "draft")
    config = {**CONFIG, "intermediate_size": CONFIG["intermediate_size"] + 2}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"intermediate_size={config['intermediate_size']}"):
        drafter = {"name": "model", "options": {"model": str(tmp_path / "draft")}}
        LLM(model="pocket", device="cpu", drafter=drafter, **SIZES).close()


EXPERTS = {"moe_intermediate_size": None, "num_experts_per_tok": 0, "decoder_sparse_step": None, "swiglu_limit": "x"}


@pytest.mark.parametrize(
    "off",
    [
        {"enable_moe_block": False, "num_experts": None, **EXPERTS}, {"enable_moe_block": False, **EXPERTS},
        {"num_experts": 0, **EXPERTS}, {"num_local_experts": None, **EXPERTS}, {"n_routed_experts": 0, **EXPERTS},
        {"shared_expert_intermediate_size": None}, {"shared_expert_intermediate_size": 0},
        {"use_sliding_window": False, "sliding_window": 0, "max_window_layers": -1},
    ],
)  # fmt: skip
def test_fields_of_a_part_that_is_disabled_are_not_looked_at(folder, off):
    for config in (
        {**CONFIG, **off},
        {**CONFIG, "text_config": off},
        {**CONFIG, "thinker_config": {"text_config": off}},
    ):
        (folder / "config.json").write_text(json.dumps(config))
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "on", [{"enable_moe_block": True}, {"num_experts": 4}, {"num_experts": 0, "n_routed_experts": 2}]
)
def test_fields_of_a_part_that_is_enabled_are_looked_at(folder, on):
    assert "moe_intermediate_size=None" in refusal(folder, {**CONFIG, **on, "moe_intermediate_size": None})


LEAVES = (
    math.inf, -math.inf, math.nan, 1.5, 3, None, "Infinity", {"__float__": "else"}, {"__float__": 3},
)  # fmt: skip
nested = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(nested)
def test_infinities_are_read_as_transformers_writes_them(folder, value):
    from transformers.configuration_utils import PreTrainedConfig

    written = PreTrainedConfig._encode_special_floats({"time_step_limit": value})
    (folder / "config.json").write_text(json.dumps({**CONFIG, **written}))
    found = open_checkpoint(str(folder)).raw["time_step_limit"]
    assert repr(found) == repr(PreTrainedConfig._decode_special_floats(written)["time_step_limit"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": ...}, "model_type is missing: expected the type that transformers has for 'Qwen3ForCausalLM'"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": ""}, "model_type is missing"),
        ({"architectures": ...}, "names no architecture"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": "Qwen3ForCausalLM"}, "names no architecture"),
        ({"architectures": ["Qwen99ForCausalLM"]}, "no plug-in serves the architecture 'Qwen99ForCausalLM'"),
    ],
)
@pytest.mark.parametrize("impl", ["auto", "minivllm", "transformers"])
def test_a_config_that_names_no_model_is_refused_with_the_key(folder, change, says, impl):
    config = {k: v for k, v in {**CONFIG, **change}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=says) as caught:
        minivllm.explain(str(folder), model_impl=impl, device="cpu").text("model")
    assert str(caught.value).startswith(f"{folder}/config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [[], 3, "x", None, True])
def test_a_config_that_is_no_object_is_refused(folder, value):
    (folder / "config.json").write_text(json.dumps(value))
    with pytest.raises(ModelError, match=r"config\.json: expected a JSON object, got a "):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("value", [[], ["x"], 5, True, 0.5], ids=str)
@pytest.mark.parametrize("key", ["model_type", "quantization_config", "text_config", "rope_scaling.type"])
def test_names_and_tables_of_another_kind_are_refused_by_their_key_at_any_depth(folder, key, value):
    name, _, inner = key.partition(".")
    given = {name: {inner: value} if inner else value}
    assert f" {key}={value!r}: expected" in refusal(folder, {**CONFIG, **given})
    assert f" text_config.{key}={value!r}: expected" in refusal(folder, {**CONFIG, "text_config": given})
