"""``minivllm explain quantizer``: its report on bytes and kernels, without loading a model."""

from __future__ import annotations

import re

import pytest
import torch

from minivllm import LLM
from minivllm.cli import main
from minivllm.errors import OptionError
from minivllm.frontend.explaining import explain_loaded
from minivllm.frontend.front_door import load
from minivllm.plugins.quantizer.fast import served_by
from minivllm.testing.tiny import tiny_dir


def explained(model: str, **options) -> dict[str, str]:
    found = explain_loaded(load(None, {"model": model, **options}), weights=True)
    return {key.removeprefix("quantizer."): text for key, text in found.notes if key.startswith("quantizer.")}


@pytest.mark.parametrize(
    "chosen",
    [
        {"name": "none"},
        {"name": "int8", "options": {"lm_head": True, "skip": ["*.o"]}},
        {"name": "int4", "options": {"symmetric": False, "bits": {"re:.*down": 8}}},
        {"name": "nf4"},
        {"name": "int8", "options": {"embedding": True, "bits": {"*.q_proj": 4, "layers.1.mlp.down": 16}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_that_are_told_are_those_that_the_loaded_model_takes(tmp_path, chosen, tied):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "tie_word_embeddings": tied}
    tiny_dir(tmp_path, "llama", **sizes)
    options = dict(device="cpu", dtype="float32", skip_tokenizer_init=True)
    reported = explained(str(tmp_path), quantizer=chosen, **options)
    with LLM(model=str(tmp_path), quantizer=chosen, num_kvcache_blocks=20, graph="off", **options) as llm:
        held = llm.engine.capacity.weight_bytes
    assert float(reported["weights"].split(" MiB")[0]) == pytest.approx(held / 2**20, abs=0.05)
    plain = re.fullmatch(r"[\d.]+ MiB of ([\d.]+) MiB", reported["weights"])
    assert plain and float(plain[1]) * 2**20 >= held - 2**16


def test_components_say_what_is_left_unquantized_and_by_which_form_others_are_held():
    rules = {"name": "int4", "options": {"skip": ["*.o"], "bits": {"*.down": 8}}}
    reported = explained("pocket", quantizer=rules, dtype="float32", device="cpu")
    assert reported["attn.o"].endswith("unquantized, float32") and reported["embed"].endswith("unquantized, float32")
    assert reported["mlp.down"].endswith("int8 and float32, as int8") and reported["mlp.gate_up"].endswith(
        "uint8 and float32"
    )
    assert reported["lm_head"] == "0.0 MiB: the embedding's weight"
    assert "made numbers of" in reported["rows any"]


def test_rules_by_layer_and_by_part_and_the_embedding_are_told():
    rules = {"embedding": True, "bits": {"layers.[0-2].mlp.down": "nf4", "*.v_proj": 16, "*.o_proj": "llm-int8"}}
    reported = explained("pocket", quantizer={"name": "int4", "options": rules}, dtype="float32", device="cpu")
    assert reported["mlp.down"].endswith("MiB: uint8 and float32, as nf4 (3); uint8 and float32 (5)")
    assert reported["attn.qkv"] == "8 modules, 1.5 MiB of 4.0 MiB: uint8 and float32, as int4 (q, k) and none (v)"
    assert (
        reported["attn.o"].endswith("int8 and float32, as llm-int8")
        and reported["lm_head"] == "0.0 MiB: the embedding's weight"
    )
    assert reported["embed"] == "0.3 MiB of 2.0 MiB: uint8 and float32"
    assert not any("captured" in key for key in reported), "the native part reads no packed embedding"
    whole = explained("pocket", quantizer="int4", dtype="float32", device="cpu")
    assert "rows of captured steps" in whole
    assert not any(
        "captured" in key for key in explained("pocket", quantizer="llm-int8", dtype="float32", device="cpu")
    )


def test_a_rule_that_names_no_module_is_refused_by_explain_too(capsys):
    given = ("--set", "quantizer.name=int8", "--set", 'quantizer.options.skip=["layer.*"]')
    assert main(["explain", "quantizer", *given]) == OptionError.exit_code == 2
    assert "names no module" in capsys.readouterr().err


def test_kernels_are_told_by_rows_and_only_where_there_are_some():
    pytest.importorskip("triton")
    hopper, ampere = (served_by(torch.int8, "cuda", sm) for sm in (90, 80))
    assert any(rows.startswith("33 to") for rows in hopper) and not any(rows.startswith("33") for rows in ampere)
    assert set(served_by(torch.float8_e4m3fn, "cuda", 80)) == {"any"} == set(served_by(torch.int8, "cpu", 0, True))
