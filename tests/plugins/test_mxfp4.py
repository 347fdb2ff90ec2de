"""Experts that come in MXFP4: unpacked as transformers does it, refused by name where they do not fit."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.quantizer import ModuleInfo
from minivllm.errors import ModelError
from minivllm.plugins.model.gpt_oss import GptOss
from minivllm.plugins.quantizer.mxfp4 import KeptExperts, Mxfp4, Mxfp4Kept
from minivllm.testing.harness import Harness, play, seats
from minivllm.testing.tiny import quiet, save, tiny_config, tiny_model

PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(24)]
SIZES = {"max_num_seqs": 4, "num_kvcache_blocks": 64, "max_model_len": 64, "device": "cpu", "skip_tokenizer_init": True}


def packed_dir(path, inner=32):
    """A tiny GPT-OSS as the hub has it, and the same unpacked by transformers."""
    cfg = tiny_config("gpt_oss", hidden_size=64, intermediate_size=inner, num_experts=4)
    with quiet():
        for form in ("plain", "packed"):
            save(tiny_model(cfg), path / form)
    tensors = load_file(path / "plain" / "model.safetensors")
    packed = dict(tensors)
    torch.manual_seed(5)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inp, out = tensors[name].shape
        blocks = torch.randint(0, 256, (experts, out, inp // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (experts, out, inp // 32), dtype=torch.uint8)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del packed[name]
        packed |= {name + "_blocks": blocks, name + "_scales": scales}
    save_file(tensors, path / "plain" / "model.safetensors", {"format": "pt"})
    save_file(packed, path / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "packed" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (path / "packed" / "config.json").write_text(json.dumps(config))


def test_packed_experts_are_those_that_transformers_unpacks(tmp_path):
    packed_dir(tmp_path)
    found = []
    for form in ("plain", "packed"):
        with LLM(model=str(tmp_path / form), dtype="float32", batch_invariant=True, **SIZES) as llm:
            found.append(
                llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=12, temperature=0, logprobs=3))
            )
            modules = llm.engine.executor.runner.model.blocks[1].experts
            found[-1] = found[-1][0].outputs[0], modules.gate_up.tensors, modules.down.tensors
    (out, *plain), (other, *packed) = found
    for a, b in zip(plain, packed, strict=True):
        assert torch.equal(a["weight"], b["weight"]) and torch.equal(a["bias"], b["bias"])
    assert out.token_ids == other.token_ids and out.cumulative_logprob == other.cumulative_logprob


def test_experts_that_are_kept_in_4_bits_are_unpacked_when_they_are_hit_and_no_others(tmp_path, monkeypatch):
    packed_dir(tmp_path)
    made = []
    numbers = KeptExperts.numbers

    def counted(self, rows, like):
        made.append((id(self), rows.start, rows.stop))
        return numbers(self, rows, like)

    monkeypatch.setattr(KeptExperts, "numbers", counted)
    found, prompt = [], PROMPT[:3]
    for quantizer in ("auto", "mxfp4-kept"):
        config = {"quantizer": quantizer, "dtype": "float32", "graph": "off", **SIZES}
        with LLM(model=str(tmp_path / "packed"), **config) as llm:
            params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=3)
            made.clear()
            (out,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            experts = [block.experts for block in llm.engine.executor.runner.model.blocks]
            modules = [module for one in experts for module in (one.gate_up, one.down)]
            found.append((out.outputs[0], sum(m.scheme.bytes for m in modules), len(made), modules[0].scheme))
    (plain, whole, none, _), (kept, packed, products, scheme) = found
    assert plain.token_ids == kept.token_ids
    assert kept.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=1e-5)
    assert none == 0 and packed == whole // 32 * 17 // 4  # of float32
    # 2 layers with 2 products; at most 4 experts for a prompt, and 2 for each of 5 tokens
    assert isinstance(scheme, KeptExperts) and 0 < products <= 2 * 2 * (4 + 5 * 2)
    each = scheme.info.out_features // scheme.info.experts
    assert {stop - start for owner, start, stop in made if owner == id(scheme)} == {each}


@pytest.mark.parametrize("quantizer", [Mxfp4, Mxfp4Kept])
def test_ranks_cut_packed_experts_between_their_groups(tmp_path, quantizer):
    packed_dir(tmp_path, inner=64)
    path = tmp_path / "packed"
    cfg = AutoConfig.from_pretrained(path)
    reported = {"quant_method": "mxfp4"}
    make = partial(Harness, path, GptOss(), cfg)
    want = make(quantizer=quantizer(None, reported)).step({0: PROMPT})[0]
    group = seats(2)
    shares = [make(quantizer=quantizer(None, reported), group=seat) for seat in group]
    got = play(group, [partial(share.step, {0: PROMPT}) for share in shares])[0][0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()
    with pytest.raises(ModelError, match="has 16 inputs here: expected a multiple of 32, which share a scale"):
        make(quantizer=quantizer(None, reported), group=seats(4)[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t[:3].clone(), r"expected 4 experts first"),
        (lambda t: t.int(), r"and int32, expected \[.*\] and uint8"),
        (lambda t: t[:, :, :1].clone(), r"of shape \[.*expected \["),
    ],
)
@pytest.mark.parametrize("quantizer", ["mxfp4", "mxfp4-kept"])
def test_packed_experts_that_do_not_fit_are_refused_by_name(quantizer, change, says, tmp_path):
    packed_dir(tmp_path)
    name, file = "model.layers.0.mlp.experts.gate_up_proj_blocks", tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: change(tensors[name])}, file)
    with pytest.raises(ModelError, match=rf"'{name}'.*{says}"):
        LLM(model=str(tmp_path / "packed"), dtype="float32", quantizer=quantizer, **SIZES)


def test_what_is_not_packed_so_is_not_taken_for_it():
    with pytest.raises(ModelError, match="quantized with no method: expected mxfp4"):
        Mxfp4()
    info = ModuleInfo("down", "experts", 48, (("0", 8),), "float32", "cpu", experts=1)
    with pytest.raises(ModelError, match="48 inputs here: expected a multiple of 32"):
        Mxfp4(None, {"quant_method": "mxfp4"}).scheme(info)


def test_a_checkpoint_that_is_not_packed_as_its_config_says_is_refused(tmp_path):
    packed_dir(tmp_path)
    (tmp_path / "packed" / "model.safetensors").write_bytes((tmp_path / "plain" / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match="or load a checkpoint that is quantized as config"):
        LLM(model=str(tmp_path / "packed"), dtype="float32", **SIZES)
