"""Sampling defaults of generation_config.json hold where a request sets nothing, and nowhere else."""

from __future__ import annotations

import json

import pytest

from minivllm import LLM, SamplingParams
from minivllm.cli import main
from minivllm.config import load_config
from minivllm.device.loading.generation import read_generation
from minivllm.errors import ConfigError, ModelError
from minivllm.frontend.explaining import explain
from minivllm.testing.tiny import tiny_dir

SIZES = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 64, "graph": "off"}
FILE = {
    "do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1,
    "max_new_tokens": 7, "eos_token_id": [2, 3], "num_beams": 4, "transformers_version": "5",
}  # fmt: skip
DEFAULTS = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 7,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_dir(tmp_path_factory.mktemp("model"), "qwen3")[0]
    (path / "generation_config.json").write_text(json.dumps(FILE))
    return path


def opened(folder, **more):
    return LLM(str(folder), num_kvcache_blocks=64, **{**SIZES, **more})


def differs(params):
    """Return the parameters that are not at their defaults."""
    return {name: value for name, value in vars(params).items() if value != getattr(SamplingParams(), name)}


def test_a_call_without_parameters_has_those_of_the_file_and_one_with_them_has_its_own(model):
    with opened(model) as llm:
        assert differs(llm.get_default_sampling_params()) == DEFAULTS
        assert len(llm.generate([5, 6, 7], use_tqdm=False)[0].outputs[0].token_ids) <= 7
        whole = llm.generate([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
        assert len(whole[0].outputs[0].token_ids) == 9
        assert llm.engine.wiring.eos_ids == (2, 3)


def test_the_sampling_table_lies_over_the_file(model):
    with opened(model, sampling={"temperature": 0.2, "seed": 5}) as llm:
        assert differs(llm.get_default_sampling_params()) == {**DEFAULTS, "temperature": 0.2, "seed": 5}


@pytest.mark.parametrize("word", ["none", "vllm"])
def test_the_file_is_left_alone_where_that_is_asked_but_ends_answers_as_before(model, word):
    with opened(model, generation_config=word) as llm:
        assert differs(llm.get_default_sampling_params()) == {}
        assert llm.engine.wiring.eos_ids == (2, 3)


def test_another_file_takes_the_place_of_the_models(model, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": 9}))
    for path in (tmp_path, tmp_path / "generation_config.json"):
        with opened(model, generation_config=path) as llm:
            assert differs(llm.get_default_sampling_params()) == {"temperature": 0.3}
            assert llm.engine.wiring.eos_ids == (9,)


def test_a_path_in_a_file_is_relative_to_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "exp.toml").write_text('generation_config = "mine"\n')
    assert load_config(["sub/exp.toml"], environ={}).engine.generation_config == str(tmp_path / "sub" / "mine")
    (tmp_path / "sub" / "exp.toml").write_text('generation_config = "none"\n')
    assert load_config(["sub/exp.toml"], environ={}).engine.generation_config == "none"


def test_explain_has_the_defaults_and_the_fields_without_effect(model):
    note = dict(explain(str(model), **SIZES).notes)["sampling"]
    assert note.startswith("temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.1, max_tokens=7 (")
    assert note.endswith("without effect: num_beams=4)")
    assert "sampling" not in dict(explain(str(model), generation_config="none", **SIZES).notes)


def test_parameters_that_no_part_reads_are_left_out(model, caplog):
    with opened(model, processors=["logit_bias"]) as llm:
        assert differs(llm.get_default_sampling_params()) == {k: v for k, v in DEFAULTS.items() if k[:3] != "rep"}
        assert "reads repetition_penalty: not applied" in caplog.text
        llm.generate([5, 6, 7], use_tqdm=False)


def test_do_sample_is_not_read_as_in_vllm(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6}))
    found = read_generation("auto", tmp_path)
    assert found.values == {"temperature": 0.6} and found.left == ("do_sample=False",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"temperature": 3}', "temperature=3: expected a number from 0"), ('{"top_p": "x"}', "top_p='x'"),
        ('{"top_k": 1.5}', "top_k=1.5"), ('{"max_new_tokens": 0}', "max_new_tokens=0"),
        ('{"min_p": true}', "min_p=True"),
        ('{"temperature": NaN}', "temperature"), ("[1]", "expected a JSON object"), ("{", "generation_config.json"),
        ('{"repetition_penalty": -1}', "repetition_penalty=-1"),
    ],
)  # fmt: skip
def test_a_value_that_no_request_may_have_is_refused_with_the_file(content, says, tmp_path):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=says) as error:
        read_generation("auto", tmp_path)
    assert "generation_config.json" in str(error.value)
    assert read_generation("none", tmp_path).values == {}


def test_a_path_without_a_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file as .*; expected auto"):
        read_generation(str(tmp_path / "nowhere"), tmp_path)
    assert read_generation("auto", tmp_path).values == {}  # a model may have none


def test_the_commands_use_the_defaults_and_flags_win(model, tmp_path, capsys):
    prompts, out = tmp_path / "p.toml", tmp_path / "out.json"
    prompts.write_text('[run]\nprompts = ["x"]\n')
    pocket = ["--set", "device=cpu", "--set", f"generation_config={model}", "--set", "num_kvcache_blocks=64"]
    assert main(["run", str(prompts), *pocket, "--record", str(out)]) == 0
    assert json.loads(out.read_text())["config"]["sampling"] == DEFAULTS
    assert len(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]) == DEFAULTS["max_tokens"]
    assert main(["run", str(out), "--set", "generation_config=none"]) == 0  # the values are in the record
    assert len(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"]) == DEFAULTS["max_tokens"]
    assert main(["generate", "x", "--temperature", "0.1", *pocket, "--record", str(out)]) == 0
    assert json.loads(out.read_text())["config"]["sampling"] == {**DEFAULTS, "temperature": 0.1}


def test_a_server_uses_the_defaults_for_absent_fields_and_the_file_is_no_limit(model):
    from http_helpers import Running

    from minivllm.server.openai.generate import Service

    seen = []
    running = Running(engine={"generation_config": str(model), "device": "cpu"})
    try:
        service: Service = running.app.service
        assert {name: service.defaults[name] for name in DEFAULTS} == DEFAULTS and service.most_tokens is None
        stream = service.client.stream
        service.client.stream = lambda ids, params, *args, **more: (
            seen.append(params) or stream(ids, params, *args, **more)
        )
        ask = {"prompt": "Once upon", "ignore_eos": True}
        short = running.post("/v1/completions", ask).json()
        assert short["usage"]["completion_tokens"] == 7 and short["choices"][0]["finish_reason"] == "length"
        requested = {**ask, "max_tokens": 12, "temperature": 0, "top_k": 0}
        assert running.post("/v1/completions", requested).json()["usage"]["completion_tokens"] == 12
    finally:
        running.close()
    assert (seen[0].temperature, seen[0].top_k, seen[0].min_p) == (0.6, 20, 0.1)
    assert (seen[1].temperature, seen[1].top_k, seen[1].top_p) == (0, 0, 0.95)
