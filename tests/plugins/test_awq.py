"""Checkpoints of AWQ: products use exactly the weights that the tensors describe."""

from __future__ import annotations

import pytest
import torch
from packed_checkpoints import (
    LLM_SIZES,
    PROMPT,
    awq,
    change,
    coded,
    held,
    info,
    loaded,
    logits_of,
    packed_dir,
    say,
)

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.quantizer import Shard
from minivllm.errors import ModelError
from minivllm.plugins.quantizer.awq import Awq
from minivllm.plugins.quantizer.int4 import Int4Rows


def config(group_size=32, **more):
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True, **more}


@pytest.mark.parametrize("group", [32, 128, 48, -1])
def test_what_is_held_is_what_the_tensors_say_with_zero_points_of_0_and_15(group):
    torch.manual_seed(group)
    parts = {"a": coded(32, 160, 4, group, False), "b": coded(64, 160, 4, group, False)}
    scheme = loaded(Awq(None, config(group)), info((32, 64), 160), {part: awq(one) for part, one in parts.items()})
    want = torch.cat([one.weight for one in parts.values()]).double()
    torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)
    assert (type(scheme._held[0].scheme) is Int4Rows) == (group != 48) and len(scheme._held) == 1


@pytest.mark.parametrize("split", ["column", "row"])
def test_each_process_holds_its_slice_also_where_it_cuts_through_words(split):
    one = coded(96, 192, 4, 32, symmetric=False)
    for size in (2, 3, 8):  # 12 outputs of 8 are one word and a half
        for rank in range(size):
            shape = (96 // size, 192) if split == "column" else (96, 192 // size)
            m = info(shape[:1], shape[1], split=split, shard=Shard(rank, size))
            want = one.weight.double().chunk(size, 0 if split == "column" else 1)[rank]
            torch.testing.assert_close(held(loaded(Awq(None, config()), m, {"a": awq(one)})), want)


def code(name, n, k):
    return None if name == "lm_head" or "layers.0.self_attn" in name else coded(n, k, 4, 32, symmetric=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("awq")
    torch.manual_seed(1)
    return path, *packed_dir(
        path,
        config(modules_to_not_convert=["layers.0.self_attn"]),
        code,
        lambda c, name: awq(c),
        tie_word_embeddings=True,
    )


def test_logits_are_those_of_the_weights_in_floating_numbers(checkpoint):
    harness, got, want = logits_of(*checkpoint, Awq)
    assert (got - want).abs().max() <= 1e-4
    assert type(harness.parts.modules["layers.1.attn.qkv"].scheme).__name__ == "PackedWeight"


def test_auto_takes_it(checkpoint):
    path, _, hf = checkpoint
    with LLM(model=str(path), **LLM_SIZES) as llm:
        ids = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0]
    with torch.inference_mode():
        want = hf.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    assert list(ids.token_ids) == want[len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("reported", "wanted"),
    [
        ({"version": "gemv"}, r"AWQ of version='gemv': its words lie in another order; use the same .* version=gemm"),
        ({"version": "gemv_fast"}, r"AWQ of version='gemv_fast'"),
        ({"backend": "llm-awq"}, r"AWQ of backend='llm-awq'"),
        ({"bits": 8}, r"bits=8: expected 4"),
        ({"group_size": 64}, r"qzeros': shape .2, 12. of I32, expected .1, 12. of I32 with bits=4, group_size=64"),
        ({"modules_to_not_convert": ["mlp"]}, r"model.*mlp.*qweight, and modules_to_not_convert=\['mlp'\] excludes"),
        ({"modules_to_not_convert": "mlp"}, r"modules_to_not_convert='mlp': expected a list of names"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(checkpoint, reported, wanted):
    path = checkpoint[0]
    say(
        path,
        config(**reported) if "bits" not in reported and "group_size" not in reported else {**config(), **reported},
    )
    with pytest.raises(ModelError, match=wanted):
        LLM(model=str(path), **LLM_SIZES)


def test_a_tensor_that_is_missing_is_named(checkpoint):
    path = checkpoint[0]
    say(path, config())
    change(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"))
    with pytest.raises(ModelError, match=r"lacks model.layers.1.mlp.up_proj.scales; download it again"):
        LLM(model=str(path), **LLM_SIZES)
