"""Checkpoints of bitsandbytes: NF4, FP4 and int8, also with sizes that are quantized themselves."""

from __future__ import annotations

import json

import pytest
import torch
from packed_checkpoints import (
    LLM_SIZES,
    PROMPT,
    STATE,
    Eight,
    Four,
    change,
    forms,
    held,
    info,
    loaded,
    logits_of,
    packed_dir,
)

from minivllm import LLM, SamplingParams
from minivllm.core.interfaces.quantizer import PartSource, Shard
from minivllm.errors import ModelError
from minivllm.plugins.quantizer.bitsandbytes import BitsAndBytes
from minivllm.plugins.quantizer.forms import PlainRows, TableRows
from minivllm.plugins.quantizer.int8 import ByteRows
from minivllm.plugins.quantizer.packed import NAMES


def config(**more):
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **more}


def source(tensors):
    return PartSource("model.layers.0.mlp.down_proj", {k: (tuple(t.shape), NAMES[t.dtype]) for k, t in tensors.items()})


def read(one, split=None, rank=0, size=1):
    n, k = one.weight.shape
    shape = (n // size if split == "column" else n,), k // size if split == "row" else k
    quantizer = BitsAndBytes(None, config())
    m = info(*shape, split=split, shard=Shard(rank, size), sources={"a": source(one.tensors)})
    return quantizer, loaded(quantizer, m, {"a": one.tensors})


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("stored", [torch.uint8, torch.bfloat16])
def test_what_is_held_is_what_the_codes_stand_for_and_each_process_holds_its_slice(kind, nested, stored):
    torch.manual_seed(2)
    one = Four(96, 384, kind, nested, stored=stored)
    assert forms(read(one)[1]) == [TableRows]
    for split, size in ((None, 1), ("column", 2), ("column", 3), ("row", 2), ("row", 3)):
        for rank in range(size):
            want = one.weight.double().chunk(size, 1 if split == "row" else 0)[rank]
            torch.testing.assert_close(held(read(one, split, rank, size)[1]), want, rtol=1e-6, atol=1e-7)


def test_blocks_that_go_on_into_the_next_row_are_unpacked_and_told():
    one = Four(24, 80)
    quantizer, scheme = read(one)
    torch.testing.assert_close(held(scheme), one.weight.double(), rtol=1e-6, atol=1e-7)
    assert forms(scheme) == [PlainRows] and "blocks of 64 numbers do not end with the rows" in quantizer.notes[0]


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 64.5, "64", True, None, [64], 0, -64, 2**40, 10**30])
@pytest.mark.parametrize("key", ["blocksize", "nested_blocksize"])
def test_a_state_with_another_number_of_a_block_is_refused_and_allocates_nothing(key, number):
    one = Four(32, 64, nested=True)
    name = STATE + "nf4"
    state = json.loads(bytes(one.tensors[name].tolist()))
    one.tensors[name] = torch.tensor(list(json.dumps({**state, key: number}).encode()), dtype=torch.uint8)
    if key == "nested_blocksize" and type(number) is int and number > 256:
        torch.testing.assert_close(held(read(one)[1]), one.weight.double(), rtol=1e-6, atol=1e-7)  # one block of all
        return
    with pytest.raises(ModelError, match=r"state of the quantization is broken|its state says"):
        read(one)


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"[]", b"\xff", b'{"blocksize": ' + b"9" * 5000 + b"}"])
def test_a_state_that_is_no_object_is_refused(content):
    one = Four(32, 64)
    one.tensors[STATE + "nf4"] = torch.tensor(list(content), dtype=torch.uint8)
    with pytest.raises(ModelError, match="state of the quantization is broken"):
        read(one)


def test_a_single_block_longer_than_the_weight_is_that_of_the_weight():
    one = Four(32, 64, block=2048)
    state = {"quant_type": "nf4", "blocksize": 2**40, "dtype": "float32", "shape": [32, 64]}
    one.tensors[STATE + "nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    torch.testing.assert_close(held(read(one)[1]), one.weight.double(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("param", ["weight.absmax", "weight.quant_map"])
@pytest.mark.parametrize("inputs", [64, 80])
def test_sizes_and_tables_that_are_no_numbers_are_refused(param, inputs):
    one = Four(32, inputs)
    one.tensors[param][3] = float("nan")
    with pytest.raises(ModelError, match="that are inf or NaN, expected numbers: the file is damaged"):
        read(one)


def test_int8_is_multiplied_by_the_kernels_of_rows():
    one = Eight(48, 96)
    for split, size in ((None, 1), ("column", 3), ("row", 2)):
        for rank in range(size):
            scheme = read(one, split, rank, size)[1]
            want = one.weight.double().chunk(size, 1 if split == "row" else 0)[rank]
            torch.testing.assert_close(held(scheme), want, rtol=1e-6, atol=1e-7)
            assert forms(scheme) == [ByteRows]


SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("bnb")
    torch.manual_seed(1)

    def code(name, n, k):
        if name == "lm_head" or name.endswith("1.self_attn.o_proj"):
            return None
        return Eight(n, k) if "v_proj" in name else Four(n, k, nested="mlp" in name)

    return path, *packed_dir(path, config(), code, lambda c, name: c.tensors, **SIZES)


def test_logits_are_those_of_the_weights_in_floating_numbers(checkpoint):
    harness, got, want = logits_of(*checkpoint, BitsAndBytes)
    assert (got - want).abs().max() <= 1e-4
    modules = harness.parts.modules
    assert forms(modules["layers.1.mlp.gate_up"].scheme) == [TableRows]
    assert forms(modules["layers.0.attn.qkv"].scheme) == [TableRows, TableRows, ByteRows]


def test_auto_takes_it(checkpoint):
    path, _, hf = checkpoint
    with LLM(model=str(path), **LLM_SIZES) as llm:
        ids = llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=8, temperature=0))[0].outputs[0]
    with torch.inference_mode():
        want = hf.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
    assert list(ids.token_ids) == want[len(PROMPT) :].tolist()


NAME = "model.layers.1.mlp.up_proj."


@pytest.mark.parametrize(
    ("param", "made", "wanted"),
    [
        ("weight.absmax", None, r"lacks model.*up_proj.weight.absmax"),
        ("weight.absmax", lambda t: t[:-1].clone(), r"says shape \[128, 64\] in blocks of 64 with 127 blocks"),
        (STATE + "nf4", lambda t: t[:-3].clone(), r"the state of the quantization is broken"),
        (STATE + "nf4", None, r"has model.*up_proj.weight of U8 and no scales for it"),
        ("weight", lambda t: t[:-1].clone(), r"shape \[4095, 1\] of U8, expected \[4096, 1\] of U8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(checkpoint, tmp_path, param, made, wanted):
    for file in checkpoint[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def edit(tensors):
        found = tensors.pop(NAME + param)
        if made is not None:
            tensors[NAME + param] = made(found)

    change(tmp_path, edit)
    with pytest.raises(ModelError, match=wanted):
        LLM(model=str(tmp_path), **LLM_SIZES)


def test_files_of_the_library_itself_are_read_as_it_reads_them():
    library = pytest.importorskip("bitsandbytes.functional")
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            weight = torch.randn(96, 128)
            codes, state = library.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=nested)
            one = Four(96, 128)
            one.weight = library.dequantize_4bit(codes, state).float()
            one.tensors = {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()} | {"weight": codes}
            torch.testing.assert_close(held(read(one)[1]), one.weight.double(), rtol=1e-5, atol=1e-6)
