"""Files that are read without transformers say what transformers says of them; the others are left to it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
from transformers import AutoConfig

from minivllm.device.loading import plain_config
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.device.loading.plain_config import FIELDS, PlainConfig
from minivllm.errors import ModelError
from minivllm.testing.tiny import ARCHS, CONFIGS, SMALL, VARIANTS, small_config

SINGLES = {"the plain config": {}, **{k: v for axis in VARIANTS.values() for k, v in axis.items()}}


def described(arch, cfg):
    """Return an architecture's description of a configuration, or its error."""
    try:
        return arch.describe(cfg), arch.switch(cfg)
    except ModelError as e:
        return str(e)


@pytest.mark.parametrize("family", ARCHS)
def test_a_file_that_is_read_here_says_the_same_as_to_transformers(family, tmp_path):
    """Each variation of the kit, as transformers writes it and as an author does, by hand and in the old names."""
    plain = 0
    for i, values in enumerate(SINGLES.values()):
        for form in ("written", "by hand"):
            folder = tmp_path / f"{i}-{form[0]}"
            folder.mkdir()
            try:
                small_config(CONFIGS[family], **values).save_pretrained(folder)
            except Exception:  # no config that transformers takes
                continue
            if form == "by hand":
                mine = {k: v for k, v in {**SMALL, **values}.items() if k in FIELDS[family] or k in values}
                (folder / "config.json").write_text(json.dumps({"model_type": family, **mine}))
            raw = json.loads((folder / "config.json").read_text())
            raw["architectures"] = ["Any"]
            (folder / "config.json").write_text(json.dumps(raw))
            try:
                cfg, whole = open_checkpoint(str(folder)).hf_config(), AutoConfig.from_pretrained(folder)
            except Exception:
                continue
            if not isinstance(cfg, PlainConfig):
                continue
            plain += 1
            assert described(ARCHS[family](), cfg) == described(ARCHS[family](), whole), (values, form)
            for name in (*FIELDS[family], "hidden_size"):
                assert getattr(cfg, name) == getattr(whole, name), (values, form, name)
    assert plain >= 30, f"the test has no power: {plain} files were read here"


@pytest.mark.parametrize("family", FIELDS)
def test_defaults_are_transformers_own(family):
    cfg = plain_config.plain_config({"model_type": family}, dict)
    whole = CONFIGS[family]()
    assert {n: getattr(cfg, n) for n in FIELDS[family]} == {n: getattr(whole, n) for n in FIELDS[family]}
    assert described(ARCHS[family](), cfg) == described(ARCHS[family](), whole)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 33}, {"hidden_size": "32"}, {"hidden_act": None}, {"vocab_size": 61.0}, {"a_new_field": 1},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}}, {"num_attention_heads": 0}, {"layer_types": ["x"]},
        {"quantization_config": {"quant_method": "gptq"}}, {"rope_parameters": {"rope_type": "default", "beta": 2}},
        {"model_type": "mistral"}, {"tie_word_embeddings": 1}, {"per_layer_config": {"0": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_unusual_is_left_to_transformers(change):
    assert plain_config.plain_config({"model_type": "qwen3", **SMALL, **change}, dict) is None


def test_an_attribute_that_is_not_known_comes_from_transformers():
    raw = {"model_type": "llama", **{k: v for k, v in SMALL.items() if k in FIELDS["llama"]}}
    cfg = plain_config.plain_config(raw, lambda: CONFIGS["llama"](**raw))
    assert cfg.initializer_range == 0.02
    assert not hasattr(cfg, "quantization_config") and not hasattr(cfg, "no_such_field")
    other = copy.deepcopy(cfg)
    other.rms_norm_eps = 0.5
    assert cfg.rms_norm_eps == 1e-6 and other.attention_dropout == 0.0


def test_the_model_in_the_package_is_served_without_transformers():
    code = """
        import sys
        from minivllm import LLM, SamplingParams
        with LLM(model="pocket", device="cpu") as llm:
            llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
        print(sorted(m for m in sys.modules if m.partition(".")[0] == "transformers"))
    """
    code = "\n".join(line[8:] for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stdout
