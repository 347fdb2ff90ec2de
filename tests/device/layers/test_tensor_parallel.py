"""Processes that share a model compute what one computes alone; ranks are threads here."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from packed_checkpoints import Eight, Four, awq, coded, compressed, gptq, packed_dir, scaled
from transformers import AutoConfig, Olmo2Config

from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.core.interfaces.quantizer import Shard
from minivllm.device.layers.embedding import VocabRange
from minivllm.errors import ModelError
from minivllm.plugins.quantizer.gptq import Gptq
from minivllm.plugins.quantizer.int8 import Int8
from minivllm.registry import Catalog, build_part
from minivllm.testing.harness import Harness, play, seats
from minivllm.testing.tiny import save, small_config, tiny_dir, tiny_model

PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12]
WIDE = {"num_attention_heads": 8, "intermediate_size": 64, "head_dim": 8}  # what 8 processes can share
# of 61 tokens 2, 4 and 8 processes have 31, 16 and 8 each, the last one fewer
FAMILIES = {
    "llama": ("llama", {**WIDE, "num_key_value_heads": 8, "attention_bias": True, "mlp_bias": True}),
    "two KV heads and biases": ("qwen2", {**WIDE, "num_key_value_heads": 2}),
    "one KV head, tied": ("qwen3", {**WIDE, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "tied, windows, four norms": ("gemma3", {**WIDE, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "parallel blocks, scaled logits": ("cohere2", {**WIDE, "num_key_value_heads": 2}),
    "one qkv tensor": ("phi3", {**WIDE, "num_key_value_heads": 4}),
    "learned positions": ("gpt2", {"num_attention_heads": 8, "num_key_value_heads": 8}),
    "experts": ("mixtral", {**WIDE, "num_key_value_heads": 2, "vocab_size": 9}),
    "a shared expert": ("qwen2_moe", {**WIDE, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}),
    "norms over all heads": (Olmo2Config, {**WIDE, "num_key_value_heads": 4}),
    "sinks, biases of experts": ("gpt_oss", {**WIDE, "num_key_value_heads": 2}),
}


def architecture(path):
    """Return the model plug-in and the config of a folder."""
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", skip_tokenizer_init=True)
    made = build_part("model", resolve(config, Catalog.discover()).wiring.parts["model"])
    return made, AutoConfig.from_pretrained(path)


def logits_of(harness, prompt):
    return torch.cat([harness.step({0: prompt[:6], 1: [7]})[0], harness.step({0: prompt[6:], 1: [8]})[0]])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Create a family's folder, architecture, config and the logits of one process."""
    found = {}

    def make(name):
        if name not in found:
            family, values = FAMILIES[name]
            path = tmp_path_factory.mktemp("tp") / "model"
            if isinstance(family, str):
                tiny_dir(path, family, **values)
            else:
                save(tiny_model(small_config(family, **values)), path)
            arch, cfg = architecture(path)
            prompt = [t % cfg.vocab_size for t in PROMPT]
            found[name] = path, arch, cfg, prompt, logits_of(Harness(path, arch, cfg), prompt)
        return found[name]

    return make


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_ranks_compute_what_one_process_computes(made, name, size):
    """Fewer KV heads than ranks, vocabularies that do not divide, heads that share the embedding's weight."""
    path, arch, cfg, prompt, want = made(name)
    group = seats(size)
    shares = [Harness(path, arch, cfg, group=seat) for seat in group]
    for rank, got in enumerate(play(group, [partial(logits_of, h, prompt) for h in shares])):
        assert got.shape == want.shape
        assert (got - want).abs().max() <= 1e-4 * want.abs().max(), (name, rank)
    assert want.std() > 0.01


@pytest.mark.parametrize("load_format", ["dummy", "auto"])
def test_random_weights_and_weights_quantized_while_loading_are_cut_alike(made, load_format):
    path, arch, cfg, prompt, _ = made("two KV heads and biases")
    quantizer = {} if load_format == "dummy" else {"quantizer": Int8()}
    one = logits_of(Harness(path, arch, cfg, load_format=load_format, **quantizer), prompt)
    group = seats(2)
    shares = [Harness(path, arch, cfg, load_format=load_format, group=seat, **quantizer) for seat in group]
    room = 0.05 if quantizer else 1e-4  # a row-split weight has a scale per share
    for got in play(group, [partial(logits_of, h, prompt) for h in shares]):
        assert (got - one).abs().max() <= room * one.abs().max()


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with a GPTQ checkpoint of 6 heads on 1 and a head of 64 outputs, which 3 ranks cannot share."""
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("packed")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "lm_head": True}
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 6, "num_key_value_heads": 1}
    packed_dir(
        path, settings, lambda name, n, k: coded(n, k, 4, 32, symmetric=False), lambda c, name: gptq(c, 4), **sizes
    )
    return partial(Harness, path, *architecture(path), quantizer=Gptq(None, settings))


def test_ranks_cut_a_packed_checkpoint_and_copy_what_their_heads_share(packed):
    one, group = logits_of(packed(), PROMPT), seats(2)
    for got in play(group, [partial(logits_of, h, PROMPT) for h in [packed(group=seat) for seat in group]]):
        assert (got - one).abs().max() <= 1e-4 * one.abs().max()


FORMATS = {
    "awq": (
        {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True},
        lambda name, n, k: coded(n, k, 4, 32, symmetric=False),
        lambda c, name: awq(c),
    ),
    "bitsandbytes, nested, v in int8": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        lambda name, n, k: Eight(n, k) if "v_proj" in name else Four(n, k, nested="mlp" in name),
        lambda c, name: c.tensors,
    ),
    "gptq, act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True, "checkpoint_format": "gptq_v2"},
        lambda name, n, k: coded(n, k, 4, 64, symmetric=False, order=True),
        lambda c, name: gptq(c, 4, v1=False),
    ),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "ignore": ["lm_head"],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "strategy": "group",
                        "group_size": 32,
                        "symmetric": False,
                    },
                }
            },
        },
        lambda name, n, k: coded(n, k, 4, 32, symmetric=False),
        lambda c, name: compressed(c, 4, symmetric=False),
    ),
    "int8 by outputs, the head too": (
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "ignore": [],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
            },
        },
        lambda name, n, k: SimpleNamespace(
            **dict(zip(("tensors", "weight"), scaled(torch.int8, 1, k, n, k), strict=True))
        ),
        lambda c, name: c.tensors,
    ),
}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", list(FORMATS))
def test_ranks_cut_checkpoints_of_every_packed_format(tmp_path, name, size):
    """Inputs and outputs, and two KV heads for four ranks: what transformers computes with the numbers themselves."""
    torch.manual_seed(6)
    settings, code, write = FORMATS[name]
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    kept = settings.get("ignore", ["lm_head"])
    plain = lambda name, n, k: None if name in kept else code(name, n, k)  # noqa: E731
    cfg, hf = packed_dir(tmp_path, settings, plain, write, **shape, head_dim=32)
    arch, cfg = architecture(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", skip_tokenizer_init=True)
    part = resolve(config, Catalog.discover()).wiring.parts["quantizer"]
    group = seats(size)
    make = partial(build_part, "quantizer", part, settings)
    shares = [Harness(tmp_path, arch, cfg, quantizer=make(), group=seat) for seat in group]
    with torch.inference_mode():
        want = hf(torch.tensor([PROMPT])).logits[0]
    got = play(group, [partial(share.step, {0: PROMPT}) for share in shares])[0][0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_a_packed_head_that_does_not_divide_is_refused_by_name(packed):
    with pytest.raises(ModelError, match="lm_head comes quantized, and its 64 outputs cannot be shared by 3"):
        packed(group=seats(3)[0])


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 61])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranges_of_a_vocabulary_are_each_row_once(vocab, size):
    whole = torch.arange(1.0, vocab + 1)[:, None]
    ranges = [VocabRange(vocab, Shard(rank, size)) for rank in range(size)]
    assert [row for r in ranges for row in range(r.first, r.end)] == list(range(vocab))
    for r in ranges:
        mine = r.cut(whole)
        assert len(mine) == r.rows == ranges[0].rows
        assert mine[: r.end - r.first].flatten().tolist() == list(range(r.first + 1, r.end + 1))
        assert not mine[r.end - r.first :].any(), "what pads a range is zero"


def test_what_cannot_be_shared_is_refused_by_name(made):
    path, arch, cfg, *_ = made("two KV heads and biases")
    with pytest.raises(ModelError, match="heads=8 cannot be split over 3 processes"):
        Harness(path / "nowhere", arch, cfg, load_format="dummy", group=seats(3)[0])
    cfg = AutoConfig.from_pretrained(path)
    cfg.intermediate_size = 37
    with pytest.raises(ModelError, match=r"layers.0.mlp.gate_up.gate outputs=37 cannot be split over 2"):
        Harness(path / "nowhere", arch, cfg, load_format="dummy", group=seats(2)[0])
