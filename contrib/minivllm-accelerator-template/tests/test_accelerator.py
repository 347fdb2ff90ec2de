"""The template under the kit: its failures are the list of work, and with the functions of the reference it passes."""

from __future__ import annotations

import pytest
import todo
import torch
from minivllm_accelerator.device import Device, Missing
from minivllm_accelerator.reference import Reference

from minivllm import LLM, PluginError, SamplingParams
from minivllm.testing import AttentionConformance, ExecutorConformance

ATTENTION, EXECUTOR = (plugin for plugin, _ in todo.ORDER.values())
FILLED = {"device": "reference"}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


class TestReferenceAttention(AttentionConformance):
    plugin = ATTENTION
    options = FILLED


class TestReferenceExecutor(ExecutorConformance):
    plugin = EXECUTOR
    options = FILLED


def test_the_failures_of_the_kit_are_the_documented_list_of_work():
    assert todo.render() == todo.FILE.read_text(encoding="utf-8")


def test_each_test_that_fails_is_listed_once():
    listed = [line.split("`")[1] for line in todo.FILE.read_text(encoding="utf-8").splitlines() if line[:5] == "- [ ]"]
    failing = [test for seam, (_, functions) in todo.ORDER.items() for test in todo.failures(seam, functions)]
    assert sorted(listed) == sorted(failing)
    assert len(listed) > 50


def tokens(**options):
    torch.set_num_threads(1)  # the model is small
    parts = {
        "attention": {"name": ATTENTION, "options": options},
        "executor": {"name": EXECUTOR, "options": options},
    }
    sizes = {"max_num_seqs": 8, "max_model_len": 256}
    with LLM(model="pocket", dtype="float32", device="cpu", **sizes, **parts) as llm:
        answers = llm.generate(["Once upon a time there was a fox", "One day", "A hen"], GREEDY, use_tqdm=False)
    for out in answers:
        if out.error:
            raise PluginError(out.error)
    return [out.tokens for out in answers]


def test_the_model_in_the_package_writes_what_it_writes_without_the_template():
    with LLM(model="pocket", dtype="float32", device="cpu", attention="sdpa", max_model_len=256) as llm:
        answers = llm.generate(["Once upon a time there was a fox", "One day", "A hen"], GREEDY, use_tqdm=False)
    assert tokens(**FILLED) == [out.tokens for out in answers]


def test_a_template_without_its_functions_is_refused_at_the_start():
    with pytest.raises(Missing, match=r"Device\.open is not written; write it in device\.py"):
        tokens()


@pytest.mark.parametrize("name", ["open", "wait", "store", "attend"])
def test_the_error_names_the_function_that_is_missing(name, monkeypatch):
    monkeypatch.setattr(Reference, name, getattr(Device, name))
    with pytest.raises(PluginError, match=rf"Device\.{name} is not written"):
        tokens(**FILLED)
