"""Router hooks: what a table's ``router_hook`` gives is what the experts are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from minivllm import LLM, SamplingParams, Tap
from minivllm.core.interfaces.decoder import Router
from minivllm.device.layers.experts import route
from minivllm.plugins.model.qwen3_moe import Qwen3Moe
from minivllm.plugins.model.spec import QWEN3_MOE
from minivllm.testing.tiny import tiny_dir

HERE = __name__
PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(24)]
SIZES = {"max_num_seqs": 4, "num_kvcache_blocks": 64, "max_model_len": 64, "device": "cpu", "skip_tokenizer_init": True}
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


class Hooked(Qwen3Moe):
    def hook(self, layer, logits, weights, ids):
        raise NotImplementedError

    def describe(self, cfg):
        return replace(super().describe(cfg), router_hook=self.hook)


class Prunes(Hooked):
    """Experts 0 to 2 of layer 1 are left out; how often each of the others is asked for is counted."""

    counts = torch.zeros(2, 6, dtype=torch.long)

    def hook(self, layer, logits, weights, ids):
        if layer == 1:
            gone = torch.arange(6) < 3
            weights, ids = route(logits.masked_fill(gone, -torch.inf), 2, Router())
        self.counts[layer] += ids.flatten().long().bincount(minlength=6)
        return weights, ids


class OutOfRange(Hooked):
    """Where the first choice is certain, which an added vector makes it, the id is no expert's."""

    spec = replace(QWEN3_MOE, impl=f"{HERE}:OutOfRange")

    def hook(self, layer, logits, weights, ids):
        return weights, torch.where(weights > 0.999, ids + 600, ids)


class OutOf32Bits(Hooked):
    """Likewise of an id that is an expert's in its lower 32 bits."""

    def hook(self, layer, logits, weights, ids):
        return weights, torch.where(weights > 0.999, ids.long() + 2**32, ids.long())


class Raises(Hooked):
    def hook(self, layer, logits, weights, ids):
        if (weights > 0.999).any():
            raise RuntimeError("no expert is good enough")
        return weights, ids


class GivesTooFew(Hooked):
    def hook(self, layer, logits, weights, ids):
        return weights[:, :1], ids[:, :1]


class GivesIds(Hooked):
    def hook(self, layer, logits, weights, ids):
        return ids


@pytest.fixture
def path(tmp_path):
    return str(tiny_dir(tmp_path, "qwen3_moe")[0])


def engine(path, name, **more):
    return LLM(model=path, model_arch=f"{HERE}:{name}", allow_targets=[HERE], dtype="float32", **SIZES, **more)


def test_experts_are_pruned_and_counted(path):
    Prunes.counts.zero_()
    taps = [Tap(f"layers.{i}.experts", read=True) for i in (0, 1)]
    with engine(path, "Prunes") as llm:
        (out,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False, taps=taps)
    read = [torch.from_numpy(out.taps[tap.point]).long() for tap in taps]
    assert read[1].min() >= 3 and read[0].min() < 3
    assert torch.equal(Prunes.counts, torch.stack([ids.flatten().bincount(minlength=6) for ids in read]))


SURE = [Tap("layers.0.router", add=[100.0, 0, 0, 0, 0, 0])]


@pytest.mark.parametrize(("name", "invariant"), [("OutOfRange", False), ("OutOfRange", True), ("OutOf32Bits", False)])
def test_of_a_step_only_the_request_fails_that_is_sent_to_no_expert(path, name, invariant):
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:7]}]
    with LLM(model=path, dtype="float32", batch_invariant=invariant, **SIZES) as llm:
        (want,) = llm.generate(prompts[1:], GREEDY, use_tqdm=False)
    with engine(path, name, batch_invariant=invariant) as llm:
        lost, kept = llm.generate(prompts, GREEDY, use_tqdm=False, taps=[SURE, []])
        assert lost.finish_reason == "error" and "the model gave NaN" in lost.error
        assert kept.finish_reason == "length" and kept.tokens == want.tokens
        (again,) = llm.generate(prompts[1:], GREEDY, use_tqdm=False)
        assert again.tokens == want.tokens


def test_a_hook_that_raises_ends_the_requests_of_its_step_and_no_others(path):
    with engine(path, "Raises") as llm:
        (lost,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False, taps=SURE)
        assert lost.finish_reason == "error" and "no expert is good enough" in lost.error and "\n" not in lost.error
        (kept,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
        assert kept.finish_reason == "length"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "GivesTooFew",
            "gave [24, 1] on cpu, [24, 1] on cpu for layers.0.mlp: expected (weights, ids), each [24, 2] on cpu",
        ),
        ("GivesIds", "gave Tensor for layers.0.mlp: expected (weights, ids)"),
    ],
)
def test_what_is_no_routing_is_refused_in_one_line(path, name, says):
    with engine(path, name) as llm:
        (out,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    assert out.finish_reason == "error" and says in out.error and "\n" not in out.error
