"""BLOOM, Falcon, MPT, GPT-Neo and StableLM equal transformers in their special features, in every way of
running them.
"""

from __future__ import annotations

import json

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.device.layers import fields
from minivllm.device.loading.hf_config import open_checkpoint
from minivllm.errors import ModelError
from minivllm.plugins.model.falcon import _bfloat16
from minivllm.testing import ModelConformance
from minivllm.testing.model_config import logits
from minivllm.testing.tiny import read_tensors, write_tensors

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8]
NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
HEADS6 = {"hidden_size": 48, "n_head": 6}
EQUAL = {
    "bloom": [{}, HEADS6, {"tie_word_embeddings": True}],
    "falcon": [
        {}, NEW, {**NEW, "num_kv_heads": 4}, {**NEW, "num_ln_in_parallel_attn": 1}, {**NEW, "alibi": True}, RW,
        {**RW, "parallel_attn": True}, {"alibi": True, "num_attention_heads": 6, "hidden_size": 48},
        {"parallel_attn": False}, {"multi_query": False}, {"ffn_hidden_size": 40, "bias": True},
    ],
    "mpt": [
        {}, {"d_model": 48, "n_heads": 6}, {"attn_config": {"clip_qkv": 0.5}}, {"attn_config": {"softmax_scale": 0.3}},
    ],
    "gpt_neo": [
        {}, {"attention_types": [[["local"], 2]], "window_size": 3}, {"attention_types": [[["global"], 2]]},
        {"intermediate_size": 40, "activation_function": "relu"},
    ],
    "stablelm": [
        {}, {"use_parallel_residual": True}, {"qk_layernorm": True}, {"use_qkv_bias": True, "num_key_value_heads": 1},
        {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}, {"partial_rotary_factor": 1.0},
    ],
}  # fmt: skip
REFUSED = {
    "bloom": {"apply_residual_connection_post_layernorm": True},
    "falcon": {"num_ln_in_parallel_attn": 2},
    "mpt": {"no_bias": False},
    "gpt_neo": {"is_causal": False},
    "stablelm": {"head_dim": 16},
}


def suite(family):
    return type("Suite", (ModelConformance,), {"plugin": f"minivllm/{family}"})()


@pytest.mark.parametrize("family", EQUAL)
def test_every_form_of_a_family_gives_the_logits_of_transformers(family, tmp_path):
    one = suite(family)
    found = {
        str(values): one.judge(one.first(), tmp_path / str(i), values, (4, 5, 11))
        for i, values in enumerate(EQUAL[family])
    }
    assert {values: reported for values, reported in found.items() if reported != ("equal", "")} == {}


@pytest.mark.parametrize("family", REFUSED)
def test_a_form_that_is_not_implemented_is_refused_by_its_field(family, tmp_path):
    one, (name, value) = suite(family), next(iter(REFUSED[family].items()))
    cfg = one.config(one.first())
    cfg.architectures = [one.first().__name__]
    raw = {**json.loads(cfg.to_json_string(use_diff=False)), name: value}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=name):
        one.build().describe(open_checkpoint(str(tmp_path)).hf_config())


SIZES = {"max_num_seqs": 4, "max_model_len": 96, "kvcache_block_size": 4, "skip_tokenizer_init": True}
WAYS = {
    "captured, prefix hits": {"max_num_batched_tokens": 256, "num_kvcache_blocks": 128},
    "chunks, not captured": {"max_num_batched_tokens": 5, "num_kvcache_blocks": 128, "graph": "off"},
    "preempted": {"max_num_batched_tokens": 64, "num_kvcache_blocks": 27},
    "any batch, same bits": {"max_num_batched_tokens": 64, "num_kvcache_blocks": 128, "batch_invariant": True},
}
RUN = {
    "bloom": {},
    "falcon": RW,
    "mpt": {"attn_config": {"clip_qkv": 1.0}},
    "gpt_neo": {},
    "stablelm": EQUAL["stablelm"][4],
}


ALSO = [pytest.param(family, marks=pytest.mark.slow) for family in ("gpt_neo", "mpt", "stablelm")]


@pytest.mark.parametrize("family", ["bloom", "falcon", *ALSO])
def test_tokens_do_not_depend_on_captures_chunks_prefix_hits_or_preemption(family, tmp_path):
    one = suite(family)
    case = one.case(one.first(), tmp_path, **RUN[family])
    requested = [PROMPT * 2, PROMPT * 2 + [7, 9], [7, 8, 9], [11]]
    want = [greedy(case.hf, ids, 20) for ids in requested]
    for way, more in WAYS.items():
        with LLM(model=str(case.path), device="cpu", dtype="float32", **SIZES, **more) as llm:
            assert llm.engine.wiring.parts["model"].name == f"minivllm/{family}"
            params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            for again in range(2):
                outs = llm.generate([{"prompt_token_ids": ids} for ids in requested], params, use_tqdm=False)
                assert [out.outputs[0].token_ids for out in outs] == want, (way, again)
            assert way == "preempted" or any(out.num_cached_tokens for out in outs), "no prefix was hit"
            assert way != "preempted" or llm.engine.planner.preemptions, "nothing was preempted"


def greedy(hf, ids, n):
    ids = list(ids)
    for _ in range(n):
        ids.append(int(logits(hf, ids)[-1].argmax()))
    return ids[-n:]


def test_slopes_are_those_of_transformers_for_any_number_of_heads():
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    for heads in range(1, 130):
        mine = torch.tensor(fields.alibi(heads), dtype=torch.float64)
        torch.testing.assert_close(mine.float(), _get_alibi_slopes(heads, "cpu"), rtol=1e-5, atol=0)
        torch.testing.assert_close(mine.float(), -build_mpt_alibi_tensor(heads, 2)[:, 0, 0], rtol=1e-5, atol=0)
        assert [_bfloat16(slope) for slope in mine.tolist()] == mine.float().bfloat16().double().tolist()


def rootless(tensors):
    return {name.removeprefix("transformer."): x for name, x in tensors.items() if name != "lm_head.weight"}


def with_masks(tensors):
    masks = {f"transformer.h.{i}.attn.attention.{name}": torch.ones(1, 1, 4, 4) for i in (0, 1) for name in MASKS}
    return tensors | masks


MASKS = ("bias", "masked_bias")
AS_ON_THE_HUB = {  # values of the config, keys of config.json, the tensors
    "bloom": ({"tie_word_embeddings": True}, {"n_embed": 32, "seq_length": 64}, rootless),
    "mpt": ({}, {"architectures": ["MPTForCausalLM"], "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}}, dict),
    "gpt_neo": ({"intermediate_size": None}, {}, with_masks),
    "falcon": ({"tie_word_embeddings": True}, {"auto_map": {"AutoModel": "modeling_falcon.FalconModel"}}, dict),
}


@pytest.mark.parametrize("family", AS_ON_THE_HUB)
def test_checkpoints_as_they_lie_on_the_hub_are_read(family, tmp_path):
    values, keys, change = AS_ON_THE_HUB[family]
    one = suite(family)
    case = one.case(one.first(), tmp_path, **values)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, **keys}))
    write_tensors(tmp_path, change(read_tensors(tmp_path)))
    sizes = {**SIZES, "max_model_len": None, "num_kvcache_blocks": 128}
    with LLM(model=str(tmp_path), device="cpu", dtype="float32", **sizes) as llm:
        assert llm.engine.wiring.max_model_len == {"bloom": 64, "gpt_neo": 256, "falcon": 256, "mpt": 2048}[family]
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        (out,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        assert list(out.outputs[0].token_ids) == greedy(case.hf, PROMPT, 8)
