"""``minivllm models`` and ``minivllm completion``."""

import json
import shutil
import subprocess

import pytest

from minivllm.cli import main, make_parser, models
from minivllm.cli.completion import words_of

CONFIG = {"model_type": "qwen3", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
          "head_dim": 64, "hidden_size": 512}  # fmt: skip


def make(folder, size=1 << 20, config=CONFIG, weights="model.safetensors"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights:
        (folder / weights).write_bytes(b"\0" * size)
    return folder


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "memory_of_device", lambda: (10 << 20, "a device"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def listed(capsys, *arguments):
    assert main(["models", "--json", *map(str, arguments)]) == 0
    found = json.loads(capsys.readouterr().out)
    return {row["name"]: row for row in found["models"]}


def test_models_of_the_package_the_cache_and_folders_are_listed(machine, capsys):
    make(machine / "hub" / "models--Some--Model" / "snapshots" / ("a" * 40))
    quantized = {**CONFIG, "quantization_config": {"quant_method": "gptq"}}
    one = make(machine / "mine" / "deep" / "one", config=quantized)
    (machine / "mine" / "two.gguf").write_bytes(b"GGUF")
    found = listed(capsys, machine / "mine")
    assert {"pocket", "pocket-draft", "Some/Model", str(one), str(machine / "mine" / "two.gguf")} == found.keys()
    assert found["Some/Model"]["type"] == "qwen3" and found["Some/Model"]["kv_token"] == 2 * 4 * 2 * 64 * 2
    assert found[str(one)]["format"] == "safetensors, gptq" and found["pocket"]["complete"]


def test_what_does_not_fit_says_why(machine, capsys):
    make(machine / "big", 12 << 20)
    make(machine / "tight", (10 << 20) - (3 << 10))
    make(machine / "good", 1 << 20)
    part = make(machine / "part", weights="model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    make(machine / "empty", weights=None)
    found = {name.rpartition("/")[2]: row["fits"] for name, row in listed(capsys, machine).items()}
    assert found["big"] == "no: its weights need 2.0 MiB more"
    assert found["tight"].startswith("hardly: 0.0 MiB remain, the KV cache of 1 tokens")
    assert found["good"] == f"yes: 9.0 MiB remain, the KV cache of {(9 << 20) // 2048:,} tokens"
    assert "files of its weights are missing" in found["part"] and "missing" in found["empty"]


def test_the_table_names_the_device(machine, capsys):
    assert main(["models"]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first == "a device: 0.0 GiB for weights and KV cache"
    assert head.split() == ["model", "type", "format", "size", "fits"]
    assert rows[0].startswith("pocket ") and len(rows) == 2


def test_a_folder_that_is_not_there_is_refused(machine, capsys):
    assert main(["models", str(machine / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_damaged_files_are_no_models(machine, capsys):
    for name, text in (("a", "{"), ("b", "[]"), ("c", "\x00")):
        (machine / name).mkdir()
        (machine / name / "config.json").write_text(text)
    assert listed(capsys, machine).keys() == {"pocket", "pocket-draft"}


# ---- completion ----------------------------------------------------------------------------------------------------


def test_every_command_and_flag_is_completed():
    words = words_of(make_parser())
    assert {"serve", "chat", "models", "completion", "bench"} <= words.keys()
    assert {"--no-page", "--port", "--max-num-seqs"} <= set(words["serve"]) and "--url" in words["chat"]
    assert words["completion"] == ["--debug", "--help", "bash", "fish", "zsh"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [(["mod"], {"models"}), (["serve", "--no-pa"], {"--no-page"}), (["completion", "f"], {"fish"})],
)
def test_bash_completes(typed, expected, capsys, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    words = " ".join(["minivllm", *typed])
    script += f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _minivllm; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert set(done.stdout.split()) == expected and not done.stderr


def test_other_shells_get_scripts_of_their_own(capsys):
    assert main(["completion", "zsh"]) == 0 and "bashcompinit" in capsys.readouterr().out
    assert main(["completion", "fish"]) == 0
    assert "complete -c minivllm -n '__fish_seen_subcommand_from serve' -l no-page" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["completion", "tcsh"])
