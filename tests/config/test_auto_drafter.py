"""``drafter = auto`` uses the head of a checkpoint on a GPU, and no drafter wherever ``mtp`` is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from devices import DEVICE
from prediction_heads import MTPReference

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig, auto_drafter
from minivllm.config.resolve import resolve
from minivllm.device.hardware import Device
from minivllm.device.layers.native_drafts import NativeDrafts
from minivllm.device.worker import build
from minivllm.errors import MinivllmError, ModelError
from minivllm.registry import Catalog
from minivllm.testing import tiny_images
from minivllm.testing.tiny import read_tensors, tiny_dir, write_tensors

FOUND = "the checkpoint holds a head for next-token prediction"
GPU = Device("cuda", "a GPU", 90, 1 << 36, "a test", devices=2)
MTP, NONE = "minivllm/mtp", "minivllm/none"
SMALL = {"device": DEVICE, "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder, _, net = tiny_dir(tmp_path_factory.mktemp("head"), "qwen3", eos_token_id=60)
    MTPReference(net).write(folder)
    return folder


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr("minivllm.config.resolve.find_device", lambda requested: GPU)


def wire(folder, **options):
    return resolve(EngineConfig(model=str(folder), skip_tokenizer_init=True, **options), Catalog.discover())


def changed(folder, path, tensors=None, **values):
    """Copy a checkpoint with other values in config.json.  ``tensors`` changes its tensors."""
    shutil.copytree(folder, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))
    if tensors is not None:
        write_tensors(path, tensors(read_tensors(path)))
    return path


def test_a_gpu_uses_the_head_of_a_checkpoint(model, gpu, tmp_path):
    found = wire(model)
    assert found.parts["drafter"].name == MTP and found.wiring.speculation.num_speculative_tokens == 4
    assert f"{FOUND}; drafter=auto uses it, drafter=none does not" in found.explain()
    assert found.config.drafter == auto_drafter.AUTO and found.without_head.parts["drafter"].name == NONE
    assert found.wiring == wire(model, drafter="mtp").wiring
    for drafter in ("none", "ngram", {"name": "auto", "prefer": ["none"]}):
        other = wire(model, drafter=drafter)
        assert other.parts["drafter"].name in (NONE, "minivllm/ngram") and FOUND not in other.explain()
    plain = wire(tiny_dir(tmp_path / "plain", "qwen3")[0])
    assert plain.parts["drafter"].name == NONE and FOUND not in plain.explain()


def test_a_cpu_uses_no_head_unless_it_is_named(model):
    found = wire(model, device="cpu")
    assert found.parts["drafter"].name == NONE
    assert f"{FOUND}, which drafter=auto does not use: on a CPU" in found.explain()
    assert wire(model, device="cpu", drafter="mtp").parts["drafter"].name == MTP


WITHOUT_NORM = {"tensors": lambda found: {name: x for name, x in found.items() if name != "mtp.norm.weight"}}
# changes of the checkpoint, options and the reason; the options are refused beside drafter=mtp
REFUSED = {
    "several devices": ({}, {"tensor_parallel_size": 2}, "tensor_parallel_size=2: its layers run on one device"),
    "sampler": ({}, {"sampler": "mirostat"}, "feature 'multi_position' not declared"),
    "compressor": ({}, {"compressor": "streaming", "kv_budget": 32}, "drafter=mtp needs all tokens"),
    "a part of the head": (WITHOUT_NORM, {}, "has no tensor mtp.norm"),
    "several layers": ({"mtp_num_hidden_layers": 2}, {}, "the head has several layers"),
    "a model without a table": ({}, {"model_impl": "transformers"}, "has no table of layers"),
    "windows": (
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
        {},
        "the last layer with attention has a sliding window",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_of_mtp_leaves_auto_without_drafts(model, gpu, tmp_path, case):
    changes, options, reason = REFUSED[case]
    folder = changed(model, tmp_path / "changed", **changes)
    with pytest.raises(MinivllmError) as refusal:
        wire(folder, drafter="mtp", **options)
    assert reason in str(refusal.value)
    found, plain = wire(folder, **options), wire(folder, drafter="none", **options)
    assert found.wiring == plain.wiring and found.parts == plain.parts
    notes = dict(found.notes)
    assert notes.pop("drafter.head").startswith(f"{FOUND}, which drafter=auto does not use: ")
    assert reason in found.explain("drafter") and notes == dict(plain.notes)


def test_auto_keeps_executors_and_images_that_serve_no_drafts(model, gpu, tmp_path):
    found = wire(model, executor="sim")
    assert found.parts["drafter"].name == NONE and "executor=minivllm/sim may compute no drafts" in found.explain()
    folder = tmp_path / "images"
    tiny_images.make(folder, "qwen3_5")
    write_tensors(folder, {**read_tensors(folder), "mtp.fc.weight": torch.zeros(2, 2)})
    found = wire(folder)
    assert found.wiring.images.max_images and found.parts["drafter"].name == NONE
    reason = "images are not implemented with a drafter that has a model; max_images=0 serves text only"
    assert reason in found.explain("drafter")


def test_errors_of_other_options_are_those_without_drafts(model, gpu):
    for options in ({"max_model_len": 1 << 20}, {"captured_drafts": True}, {"attention": "nothing"}):
        with pytest.raises(MinivllmError) as plain:
            wire(model, drafter="none", **options)
        with pytest.raises(MinivllmError) as found:
            wire(model, **options)
        assert str(found.value) == str(plain.value)


def test_warnings_of_the_choice_are_logged_once(model, gpu, caplog):
    assert wire(model, scheduler={"name": "auto", "prefer": ["nowhere", "fcfs"]}).parts["drafter"].name == MTP
    messages = [record.message for record in caplog.records]
    assert messages.count("scheduler.prefer: 'nowhere' is not installed, and is skipped") == 1


def test_an_engine_drafts_with_the_head_or_starts_without_it(model, monkeypatch, caplog):
    """Weights of a head that cannot be loaded stop no engine whose drafter was chosen automatically."""
    prompts, params = [[5, 9, 4, 9], [7] * 20], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def answers(**options):
        with LLM(str(model), **SMALL, speculate="always", **options) as llm:
            outs = [out.tokens for out in llm.generate(prompts, params, use_tqdm=False)]
            llm.check()
            return outs, llm.stats().get("speculation", {}).get("proposed", 0), llm.resolved

    want, none, _ = answers(drafter="none")
    monkeypatch.setattr(auto_drafter, "_excluded", lambda plain: "")
    monkeypatch.setattr(NativeDrafts, "least", 0.0)  # otherwise native steps end the drafts of a random head at once
    found, proposed, resolved = answers()
    assert found == want and proposed > 20 and none == 0 and resolved.parts["drafter"].name == MTP

    for error in (ModelError("the head is broken"), MemoryError("the head is broken")):

        def broken(*args, error=error):
            raise error

        monkeypatch.setattr(build, "_load_head", broken)
        found, proposed, resolved = answers()
        assert found == want and proposed == 0 and resolved.parts["drafter"].name == NONE
        assert f"{FOUND}, which drafter=auto does not use: " in resolved.explain()
        assert "the head is broken" in dict(resolved.notes)["drafter.head"]
        assert "starts again without the drafter mtp, which drafter=auto chose: " in caplog.text
        with pytest.raises(type(error), match="the head is broken"):
            answers(drafter="mtp")
        caplog.clear()
