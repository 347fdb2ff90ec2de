"""Faults planted in the path of adapters: the comparison with merged weights must find each of them."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")

import numpy as np
import torch
from adapters import PROMPT, engine, lora, write_adapter

from minivllm import SamplingParams
from minivllm.core.engine import engine as engine_module
from minivllm.core.engine.adapter_set import ResidentSet
from minivllm.device.worker.adapters import Adapters
from minivllm.plugins.adapter.lora_config import LoraSettings
from minivllm.plugins.adapter.lora_memory import HostAdapter, LoraMemory
from minivllm.testing.tiny import quiet, save, tiny_dir

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
OTHER = [40, 41, 42, 43, 44, 45, 46, 47, 48]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Create (folder of the base model, folders of two adapters, tokens of merged weights by adapter and prompt)."""
    from peft import PeftModel

    place = tmp_path_factory.mktemp("faults")
    folder, _, model = tiny_dir(place / "base", "llama")
    paths, tokens = [], {}
    for n, name in enumerate(("one", "two")):
        paths.append(write_adapter(model, place / name, seed=n + 1, r=3, lora_alpha=9))
        with quiet():
            merged = PeftModel.from_pretrained(tiny_dir(place / "again", "llama")[2], paths[-1]).merge_and_unload()
        with engine(save(merged, place / f"merged {name}"), enable_lora=False) as llm:
            for prompt in (PROMPT, OTHER):
                out = llm.generate([{"prompt_token_ids": prompt}], GREEDY, False)[0]
                tokens[n, len(prompt)] = out.outputs[0].token_ids
    return folder, paths, tokens


def right(made):
    """Return whether requests of two adapters, in one batch and one after the other, have the right tokens."""
    folder, paths, tokens = made
    asks = [(0, PROMPT), (1, OTHER), (1, PROMPT), (0, OTHER)]
    with engine(folder, max_loras=1, max_cpu_loras=2) as small, engine(folder, max_loras=2) as large:
        for llm, groups in ((large, [asks, asks]), (small, [asks, asks[:1], asks[2:3]])):
            for group in groups:
                items = [{"prompt_token_ids": prompt} for _, prompt in group]
                requested = [lora(paths[n], n + 1) for n, _ in group]
                outputs = llm.generate(items, GREEDY, False, lora_request=requested)
                wanted = [tokens[n, len(prompt)] for n, prompt in group]
                if [out.outputs[0].token_ids for out in outputs] != wanted:
                    return False
    return True


def other_row(monkeypatch):
    """Give each row the adapter of another row."""
    set_rows = Adapters._set
    monkeypatch.setattr(Adapters, "_set", lambda self, slots, places: set_rows(self, slots, np.roll(places, 1)))


def place_taken_from_a_running_row(monkeypatch):
    evict = ResidentSet.evict
    monkeypatch.setattr(ResidentSet, "evict", lambda self, busy: evict(self, lambda one: False))


def scale_forgotten(monkeypatch):
    monkeypatch.setattr(LoraSettings, "scale_of", lambda self, module: 1.0)


def prefix_shared(monkeypatch):
    monkeypatch.setattr(engine_module, "salt_of", lambda request, wiring: request.params.salt)


def padding_read(monkeypatch):
    """Read A and B beyond the rank of an adapter, where the memory has other numbers."""
    store = LoraMemory.store

    def wrong(self, place, loaded):
        weights, ranks = loaded
        store(self, place, HostAdapter(torch.where(weights == 0, 0.3, weights), torch.full_like(ranks, 16)))

    monkeypatch.setattr(LoraMemory, "store", wrong)


def adapter_never_copied(monkeypatch):
    monkeypatch.setattr(LoraMemory, "store", lambda self, place, loaded: None)


FAULTS = [other_row, place_taken_from_a_running_row, scale_forgotten, prefix_shared, padding_read, adapter_never_copied]


def test_without_a_fault_the_tokens_are_those_of_merged_weights(made):
    assert right(made)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(made, monkeypatch, plant):
    plant(monkeypatch)
    assert not right(made)


def test_a_place_in_use_is_never_given_away(made):
    """The invariant itself: while rows run, no place changes its adapter."""
    folder, paths, _ = made
    with engine(folder, max_loras=2, max_cpu_loras=2, max_num_seqs=3) as llm:
        book, slots = llm.engine.adapters, llm.engine.slots
        before: dict[int, object] = {}

        def watch(plan):
            running = slots.running[slots.adapter[slots.running] >= 0]
            for slot in running.tolist():
                adapter = slots.at(slot).request.adapter
                assert book.by_place[slots.adapter[slot]] is adapter
                assert before.setdefault(id(slots.at(slot)), adapter) is adapter
            return submit(plan)

        submit, llm.engine.executor.submit = llm.engine.executor.submit, watch
        requested = [lora(paths[n % 2], n % 2 + 1) for n in range(9)]
        rng = np.random.default_rng(1)
        items = [{"prompt_token_ids": rng.integers(3, 61, 5 + n).tolist()} for n in range(9)]
        outputs = llm.generate(items, GREEDY, False, lora_request=requested)
    assert before and all(out.error is None for out in outputs)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_an_adapter_that_a_failed_step_did_not_copy_is_copied_before_its_next_use(made, monkeypatch, run_ahead):
    folder, paths, tokens = made
    store, calls = Adapters._store, []

    def fail_once(self, place, adapter):
        calls.append(place)
        if len(calls) == 2:
            raise RuntimeError("no copy today")
        store(self, place, adapter)

    monkeypatch.setattr(Adapters, "_store", fail_once)
    with engine(folder, max_loras=1, run_ahead=run_ahead) as llm:
        found = [
            llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, False, lora_request=[lora(paths[n], n + 1)])[0]
            for n in (0, 1, 1, 0)
        ]
    assert "no copy today" in found[1].error
    assert [out.error for out in found[2:]] == [None, None]
    assert [out.outputs[0].token_ids for out in found[2:]] == [tokens[1, len(PROMPT)], tokens[0, len(PROMPT)]]
