"""Options and variables of other engines are refused or noted with the name that this engine has for them."""

from __future__ import annotations

import json

import pytest

from minivllm import SamplingParams
from minivllm.config import load_config
from minivllm.config.other_names import ENVIRONMENT, NEUTRAL, OPTIONS
from minivllm.config.values import ALIASES, EngineConfig
from minivllm.core.interfaces.params import NAMES
from minivllm.errors import ConfigError, RequestError
from minivllm.registration.parameters import OTHER_NAMES


@pytest.mark.parametrize("key", sorted(OPTIONS))
def test_a_refused_option_names_its_replacement(key):
    name = key.replace("*", "thing")
    assert name not in EngineConfig.model_fields and name not in ALIASES, "the engine reads it"
    with pytest.raises(ConfigError) as refused:
        load_config(keywords={name: "other"})
    assert OPTIONS[key] in str(refused.value)


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_a_value_that_asks_for_the_case_anyway_is_noted_and_any_other_refused(name):
    values, why = NEUTRAL[name]
    assert name not in EngineConfig.model_fields and name not in ALIASES, "the engine reads it"
    for text in values:
        loaded = load_config(keywords={name: {"True": True, "False": False}.get(text, text)})
        assert loaded.notes == (f"{name}={text} is another engine's option, and needs nothing here: {why}",)
        assert load_config(environ={f"MINIVLLM__{name.upper()}": text.lower()}).engine == loaded.engine
    with pytest.raises(ConfigError, match="another engine's"):
        load_config(keywords={name: "other"})


def test_no_pattern_of_other_names_hides_an_option_of_the_engine():
    options = [*EngineConfig.model_fields, *ALIASES]
    patterns = [key[:-1] for key in OPTIONS if key.endswith("*")]
    assert patterns and not [(option, key) for option in options for key in patterns if option.startswith(key)]


@pytest.mark.parametrize("name", ["override_generation_config", "rope_scaling", "kv_events_config", "lora_modules"])
def test_another_engines_option_is_not_taken_for_a_misspelt_one(name):
    with pytest.raises(ConfigError) as refused:
        load_config(keywords={name: {}})
    assert "another engine's" in str(refused.value) and "Did you mean" not in str(refused.value)


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_a_refused_request_parameter_names_its_replacement(name):
    assert name not in NAMES, "the engine reads it"
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: 1})
    assert OTHER_NAMES[name] in str(refused.value)


def test_an_option_without_a_counterpart_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="Did you mean 'max_num_seqs'"):
        load_config(keywords={"max_num_seq": 1})


@pytest.mark.parametrize("name", sorted(ENVIRONMENT))
def test_a_variable_of_another_engine_is_noted(name):
    notes = load_config(environ={name: "1"}).notes
    assert notes == (f"{name} is vLLM's and not read here: {ENVIRONMENT[name]}",)
    assert load_config(environ={name: ""}).notes == ()


def test_block_sizes_have_the_names_of_vllm():
    engine = load_config(keywords={"block_size": 32, "num_gpu_blocks_override": 7}).engine
    assert (engine.kvcache_block_size, engine.num_kvcache_blocks) == (32, 7)
    with pytest.raises(ConfigError, match="given twice"):
        load_config(keywords={"block_size": 32, "kvcache_block_size": 32})


# ---- JSON files ------------------------------------------------------------------------------------------------------


def test_a_json_file_gives_the_values_of_a_toml_file(tmp_path):
    values = {"model": "pocket", "max_num_seqs": 4, "scheduler": {"name": "fcfs"}, "sampling": {"temperature": 0.5}}
    (tmp_path / "a.json").write_text(json.dumps(values, indent="\t"))
    (tmp_path / "b.toml").write_text(
        'model = "pocket"\nmax_num_seqs = 4\n[scheduler]\nname = "fcfs"\n[sampling]\ntemperature = 0.5\n'
    )
    a, b = (load_config([tmp_path / name], environ={}) for name in ("a.json", "b.toml"))
    assert (a.engine, a.sampling) == (b.engine, b.sampling)


def test_a_fault_in_a_json_file_names_file_and_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{\n\t"model": "pocket",\n\t"max_num_seqs": "many"\n}\n')
    with pytest.raises(ConfigError, match=rf"{path}:3: max_num_seqs"):
        load_config([path], environ={})


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[1]", "expected a JSON object"),
        ("{", "broken JSON"),
        ('{"max_num_seqs": 1, "max_num_seqs": 2}', "given twice|twice"),
        ('{"nothing_like_it": 1}', "unknown option"),
    ],
)
def test_a_json_file_that_is_no_table_of_options_is_refused(text, reported, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=reported):
        load_config([tmp_path / "a.json"], environ={})
