"""Every bad input of a user gets one line (the input, the expected form, advice) and its exit code, and
nothing is run.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import minivllm
from minivllm.cli import main
from minivllm.testing.tiny import tiny_dir

POCKET = Path(minivllm.__file__).parent / "pocket" / "model"


@pytest.fixture
def broken(tmp_path):
    """A copy of pocket to break."""
    folder = tmp_path / "m"
    shutil.copytree(POCKET, folder)
    return folder


def expect_refusal(capsys, code: int, *words: str, args=()):
    assert main(list(args)) == code
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("minivllm: error: ")]
    assert len(lines) == 1 and err.splitlines()[-1] == lines[0] and "Traceback" not in err
    for word in words:
        assert word in lines[0], lines[0]
    assert out == ""


def generate(model, *more):
    return ["generate", "Once", "--model", str(model), *more]


def test_unknown_model(capsys):
    expect_refusal(capsys, 3, "/no/such/model", args=generate("/no/such/model"))


def test_missing_weights(capsys, broken):
    (broken / "model.safetensors").unlink()
    expect_refusal(capsys, 3, "no model.safetensors", "load_format='dummy'", args=generate(broken))


@pytest.mark.parametrize("keep", [0, 7, 1000, -8])
def test_truncated_weights(capsys, broken, keep):
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[:keep])
    expect_refusal(capsys, 3, "model.safetensors", "download it again", args=generate(broken))


def test_pickled_weights_are_never_opened(capsys, broken):
    (broken / "model.safetensors").unlink()
    canary = broken / "canary"
    (broken / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    expect_refusal(capsys, 3, "pytorch_model.bin", "safetensors", args=generate(broken))
    assert not canary.exists()


def test_no_code_of_a_model_directory_is_run(capsys, broken):
    config = json.loads((broken / "config.json").read_text())
    config |= {"architectures": ["EvilForCausalLM"], "model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "evil.py").write_text(f"open({str(broken / 'canary')!r}, 'w')\nclass Evil: pass\n")
    expect_refusal(capsys, 3, "EvilForCausalLM", "Available", "Qwen3ForCausalLM", args=generate(broken))
    assert not (broken / "canary").exists()


def test_broken_config_json(capsys, broken):
    (broken / "config.json").write_text('{"architectures": [')
    expect_refusal(capsys, 3, "config.json", args=generate(broken))


def test_a_tensor_of_a_wrong_shape(capsys, broken):
    config = json.loads((broken / "config.json").read_text())
    config["intermediate_size"] += 64
    (broken / "config.json").write_text(json.dumps(config))
    expect_refusal(capsys, 3, "has shape", "expected", args=generate(broken))


def test_a_tensor_too_many_and_one_too_few(capsys, tmp_path):
    tiny_dir(tmp_path / "m", "qwen3")
    shutil.copy(POCKET / "tokenizer.json", tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    for layers, words in ((1, "has no place in this architecture"), (3, "the checkpoint lacks")):
        config["num_hidden_layers"] = layers
        config["layer_types"] = ["full_attention"] * layers
        (tmp_path / "m/config.json").write_text(json.dumps(config))
        expect_refusal(capsys, 3, words, args=generate(tmp_path / "m"))


@pytest.mark.parametrize(
    ("code", "words", "more"),
    [
        (4, ("sdpaa", "Did you mean 'sdpa'"), ["--set", "attention=sdpaa"]),
        (4, ("is a target", "--allow-target os"), ["--set", "attention=os:system"]),
        (2, ("skpi", "Did you mean 'skip'"), ["--set", "quantizer.name=int8", "--set", "quantizer.options.skpi=['a']"]),
        (2, ("lru", "takes no options"), ["--set", "evictor.name=lru", "--set", "evictor.options.x=1"]),
        (2, ("max_num_seq", "Did you mean 'max_num_seqs'"), ["--set", "max_num_seq=4"]),
        (2, ("max_num_batched_tokens=4", "max_num_seqs=512"), ["--set", "max_num_batched_tokens=4"]),
        (2, ("max_model_len=99999", "4096"), ["--set", "max_model_len=99999"]),
        (2, ("temperature=nan", "finite"), ["--temperature", "nan"]),
        (2, ("top_k=-7", "-1 or 0"), ["--top-k", "-7"]),
        (2, ("top_p=0.0",), ["--top-p", "0"]),
        (2, ("max_tokens=0",), ["--max-tokens", "0"]),
        (2, ("tensor_parallel_size",), ["--set", "tensor_parallel_size=0"]),
        (4, ("tensor_parallel_size: expected 9",), ["--set", "tensor_parallel_size=9"]),
        (2, ("expected 1 or 2 or 4",), ["--set", "tensor_parallel_size=3"]),
        (2, ("dtype",), ["--set", "dtype=float12"]),
    ],
)
def test_wrong_options(capsys, code, words, more):
    expect_refusal(capsys, code, *words, args=generate("pocket", *more))


@pytest.mark.parametrize("prompt", ["", "word " * 5000])
def test_prompts_that_cannot_be_served(capsys, prompt):
    args = ["generate", prompt, "--model", "pocket"]
    expect_refusal(capsys, 2, "the prompt", "expected at", args=args)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = ", ("exp.toml:1:9",)),
        ("modle = 'pocket'", ("exp.toml", "Did you mean 'model'")),
        ("max_num_seqs = 'many'", ("exp.toml", "max_num_seqs")),
        ("[scheduler]\nnmae = 'fcfs'", ("exp.toml", "Did you mean 'name'")),
        ("allow_targets = ['os']", ("exp.toml", "--allow-target")),
    ],
)
def test_wrong_config_files(capsys, tmp_path, text, words):
    path = tmp_path / "exp.toml"
    path.write_text(text)
    expect_refusal(capsys, 2, *words, args=["run", str(path)])
    expect_refusal(capsys, 2, "no.toml", args=["run", str(tmp_path / "no.toml")])
