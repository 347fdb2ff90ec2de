"""The page that maps vLLM's modules: its files exist, and its refused models are refused with its reasons."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.errors import ConfigError, ModelError, PluginError
from minivllm.registry import Catalog

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "vllm-names.md"


def test_every_file_and_folder_of_the_page_exists():
    named = re.findall(r"`(minivllm/[\w/.]+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 40
    assert not [name for name in named if not (ROOT / name).exists()]


def test_no_module_of_vllm_is_listed_twice():
    rows = [line.split("|")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `vllm")]
    names = [name for row in rows for name in re.findall(r"`(vllm[\w.]+)`", row)]
    assert len(names) == len(set(names)) > 30


LLAMA4 = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
MAMBA = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "words"),
    [(LLAMA4, "chunked_attention"), (MAMBA, "a state besides keys and values")],
    ids=["llama4", "mamba"],
)
def test_llama4_and_mamba_are_refused_with_the_reason(config, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100, **config}))
    with pytest.raises((ConfigError, ModelError, PluginError), match=words):
        resolve(EngineConfig(model=str(tmp_path), device="cpu"), Catalog.discover())


@pytest.mark.parametrize("device", ["neuron", "tpu", "xpu"])
def test_a_device_of_another_package_is_refused_with_a_pointer(device):
    with pytest.raises(ConfigError, match=f"no back end for {device} is built in") as refusal:
        EngineConfig(device=device)
    for place in ("contrib/minivllm-accelerator-template", "docs/accelerators.md"):
        assert place in str(refusal.value)
        assert (ROOT / place).exists()
