"""Checkpoints of float8 weights, as DeepSeek and Qwen publish them."""

from __future__ import annotations

import pytest
import torch
from packed_checkpoints import LLM_SIZES, PROMPT, change, forms, held, info, loaded, logits_of, say
from packed_checkpoints import packed_dir as written
from packed_checkpoints import scaled as random_bytes

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.quantizer import Shard
from minivllm.errors import ModelError
from minivllm.plugins.quantizer.forms import GroupedBytes
from minivllm.plugins.quantizer.fp8_checkpoint import Fp8Checkpoint
from minivllm.plugins.quantizer.int8 import ByteRows

FP8 = torch.float8_e4m3fn


def config(block=(128, 128), **more):
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": None if block is None else list(block),
        **more,
    }


class Weight:
    """The weight that ``packed_dir`` writes, in which blocks of 32 by 48 share a scale."""

    def __init__(self, n, k, rows=32, columns=48):
        tensors, self.weight = random_bytes(FP8, rows, columns, n, k)
        self.tensors = {
            "weight": tensors["weight"],
            "weight_scale_inv": tensors["weight_scale"].view(-(-n // rows), -1),
        }


@pytest.mark.parametrize("split", ["column", "row"])
def test_blocks_of_128_are_held_as_they_are_by_each_process_where_they_end_early_too(split):
    torch.manual_seed(0)
    for outputs, inputs in ((384, 256), (96, 192)):
        one = Weight(outputs, inputs, 128, 128)
        for size in (1, 2, 3) if split == "column" else (1, 2):
            for rank in range(size):
                shape = (outputs // size, inputs) if split == "column" else (outputs, inputs // size)
                m = info(shape[:1], shape[1], split=split, shard=Shard(rank, size))
                scheme = loaded(Fp8Checkpoint(None, config()), m, {"a": one.tensors})
                want = one.weight.double().chunk(size, 0 if split == "column" else 1)[rank]
                torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("shape", "form"), [((), ByteRows), ((1,), ByteRows), ((96, 1), ByteRows)])
def test_one_scale_or_one_a_row_is_multiplied_by_the_kernels_of_rows(shape, form):
    from minivllm.core.interfaces.quantizer import PartSource

    tensors, weight = random_bytes(FP8, 1 if shape == (96, 1) else 96, 192)
    tensors["weight_scale"] = tensors["weight_scale"].view(shape)
    names = {"weight": "F8_E4M3", "weight_scale": "F32"}
    source = PartSource("model.layers.0.mlp.down_proj", {k: (tuple(t.shape), names[k]) for k, t in tensors.items()})
    scheme = loaded(Fp8Checkpoint(None, config(None)), info((96,), 192, sources={"a": source}), {"a": tensors})
    torch.testing.assert_close(held(scheme), weight.double(), rtol=1e-6, atol=1e-7)
    assert forms(scheme) == [form]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("fp8")
    torch.manual_seed(1)
    return path, *written(
        path,
        config((32, 48), modules_to_not_convert=["lm_head"]),
        lambda name, n, k: None if name == "lm_head" else Weight(n, k),
        lambda c, name: c.tensors,
    )


def test_logits_are_those_of_the_weights_in_floating_numbers(checkpoint):
    harness, got, want = logits_of(*checkpoint, Fp8Checkpoint)
    assert (got - want).abs().max() <= 1e-4
    assert forms(harness.parts.modules["layers.0.attn.qkv"].scheme) == [GroupedBytes]
    assert harness.parts.modules["layers.0.attn.qkv"].scheme.tensors["weight"].dtype == FP8


def test_auto_takes_it(checkpoint):
    path, _, hf = checkpoint
    with LLM(model=str(path), **LLM_SIZES) as llm:
        assert "minivllm/fp8-checkpoint" in llm.explain("quantizer")
        ids = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0]
    with torch.inference_mode():
        want = hf.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    assert list(ids.token_ids) == want[len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        (config((128, 128)), r"weight_scale_inv': shape \[2, 2\] of F32, expected \[1, 1\] .*size=\[128, 128\]"),
        (config((32,)), r"weight_block_size=\[32\]: expected two numbers"),
        (config(fmt="e5m2"), r"fmt='e5m2': expected null or 'e4m3'"),
        (config(activation_scheme="token"), r"activation_scheme='token': expected null or 'dynamic'"),
        (config((32, 48), modules_to_not_convert=["model.layers.0.mlp.up_proj"]), r"has model.*up_proj.weight_scale_i"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(checkpoint, reported, wanted):
    say(checkpoint[0], reported)
    with pytest.raises(ModelError, match=wanted):
        LLM(model=str(checkpoint[0]), **LLM_SIZES)


def test_float8_without_scales_is_not_taken_for_a_weight(checkpoint):
    path = checkpoint[0]
    say(path, config((32, 48)))
    change(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale_inv"))
    with pytest.raises(ModelError, match=r"has model.layers.1.mlp.up_proj.weight of F8_E4M3 and no scales for it"):
        LLM(model=str(path), **LLM_SIZES)
