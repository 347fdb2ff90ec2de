"""Tensors of heads for next-token prediction are left out and counted; anything else without a place is refused."""

from __future__ import annotations

import json

import pytest
import torch

import minivllm
from minivllm import LLM, SamplingParams
from minivllm.errors import ModelError
from minivllm.testing.tiny import read_tensors, tiny_dir, write_tensors

PROMPT = [5, 17, 3, 44, 60, 21]
SIZES = {
    "device": "cpu", "dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_kvcache_blocks": 64,
    "max_model_len": 64, "skip_tokenizer_init": True,
}  # fmt: skip
BEHIND = ["self_attn.q_proj.weight", "mlp.gate_proj.weight", "input_layernorm.weight"]
SPELLINGS = {
    "Qwen3.5, Nemotron": ["mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight", "mtp.norm.weight"],
    "LongCat": ["model.mtp.layers.0.eh_proj.weight", "model.mtp.norm.weight"],
    "MiMo": ["model.mtp_layers.0.input_proj.weight", "model.mtp_layers.1.final_layernorm.weight"],
    "Ernie": ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.0.weight"],
    "DeepSeek": [f"model.layers.2.{name}" for name in (*BEHIND, "eh_proj.weight", "shared_head.norm.weight")],
    "two behind the last": [f"model.layers.{i}.{name}" for i in (2, 3) for name in (*BEHIND, "hnorm.weight")],
}  # fmt: skip
QUICK = ("Ernie", "DeepSeek")


def add(path, names, config=None):
    tensors = read_tensors(path)
    write_tensors(path, {**tensors, **{name: torch.randn(4, 4) for name in names}})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, **(config or {})}))


def run(path, impl):
    with LLM(model=str(path), model_impl=impl, **SIZES) as llm:
        out = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
        return list(out[0].outputs[0].token_ids), llm.engine.executor.runner.worker.notes


@pytest.mark.parametrize("impl", ["auto", pytest.param("transformers", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "spelling", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in SPELLINGS]
)
def test_heads_for_next_token_prediction_are_left_out_and_counted(spelling, impl, tmp_path):
    tiny_dir(tmp_path)
    want, _ = run(tmp_path, impl)
    add(tmp_path, SPELLINGS[spelling])
    got, notes = run(tmp_path, impl)
    shown = [
        text for what, text in minivllm.explain(str(tmp_path), model_impl=impl, **SIZES).notes if "skipped" in what
    ]
    assert got == want and len(shown) == 1 and shown[0] in notes
    assert shown[0].startswith(f"{len(SPELLINGS[spelling])} tensors of next-token prediction are not loaded (")


def test_layers_behind_the_last_one_are_left_out_where_config_json_counts_them(tmp_path):
    tiny_dir(tmp_path)
    add(tmp_path, [f"model.layers.2.{name}" for name in BEHIND], {"num_nextn_predict_layers": 1})
    assert any("3 tensors of next-token prediction" in note for note in run(tmp_path, "auto")[1])


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["model.layers.2.self_attn.q_proj.weight"], "num_hidden_layers=2: tensor 'model.layers.2"),
        (["model.layers.0.eh_proj.weight"], "'model.layers.0.eh_proj.weight' has no place"),
        (["vision_tower.patch.weight"], "'vision_tower.patch.weight' has no place"),
        (["mtpx.weight"], "'mtpx.weight' has no place"),
    ],
)
def test_other_tensors_without_a_place_are_refused(names, says, tmp_path):
    tiny_dir(tmp_path)
    add(tmp_path, names)
    with pytest.raises(ModelError, match=says):
        run(tmp_path, "auto")
