"""Low-rank products of adapters in the native steps of a CPU, compared with torch and with PEFT."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")

import numpy as np
import torch
from adapters import VOCAB, engine, expected, lora, write_adapter, write_ia3

from minivllm import SamplingParams
from minivllm.device.native import library
from minivllm.plugins.adapter.lora_memory import LoraMemory
from minivllm.testing.tiny import tiny_dir

pytestmark = pytest.mark.skipif(library.load() is None, reason="no native part")
# q, k and v of one matrix, a bias, a layer of one matrix, an MLP without a gate, norms after products, recurrent states
FAMILIES = ["llama", "qwen2", "phi3", "gpt2", "gemma3", "qwen3_5", "lfm2"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=VOCAB)


def prompts_of(lengths):
    rng = np.random.default_rng(3)
    return [{"prompt_token_ids": rng.integers(3, VOCAB, n).tolist()} for n in lengths]


def play(folder, requested, lengths, graph="auto", **options):
    """Return (the outputs of requests with the adapters ``requested``, the forms of their steps)."""
    with engine(folder, **{"graph": graph, "max_num_batched_tokens": 60, **options}) as llm:
        outputs = llm.generate(prompts_of(lengths), PARAMS, False, lora_request=requested)
        assert [out.error for out in outputs] == [None] * len(outputs)
        return outputs, llm.stats()["forms"]


def same(first, second, bound=1e-4):
    for a, b in zip(first, second, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        for mine, other in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
            assert max(abs(mine[i].logprob - other[i].logprob) for i in range(VOCAB)) < bound


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Create (folder of a Llama, the model, requests of two adapters with ranks 3 and 6, and of factors)."""
    place = tmp_path_factory.mktemp("native")
    folder, _, model = tiny_dir(place / "model", "llama")
    paths = [write_adapter(model, place / name, seed=n + 1, r=(3, 6)[n]) for n, name in enumerate("ab")]
    return folder, model, [lora(path, n + 1) for n, path in enumerate(paths)], lora(write_ia3(model, place / "c"), 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_steps_have_the_results_of_separate_operations(tmp_path, family):
    folder, _, model = tiny_dir(tmp_path / "model", family)
    paths = [write_adapter(model, tmp_path / name, seed=n + 1, r=(3, 6)[n]) for n, name in enumerate("ab")]
    requested = [None, lora(paths[0], 1), lora(paths[1], 2), lora(paths[0], 1), lora(paths[1], 2)]
    lengths = [7, 12, 70, 3, 41]  # chunks of prompts beside decoding rows
    native, forms = play(folder, requested, lengths)
    separate, others = play(folder, requested, lengths, graph="off")
    assert set(forms) == {"native"} and set(others) == {"separate"}
    same(native, separate)
    assert len({tuple(out.outputs[0].token_ids) for out in native}) > 2


@pytest.mark.parametrize("threads", [1, 2])
def test_native_steps_have_the_logits_of_peft(made, threads):
    folder, model, (one, two), _ = made
    requested, before = [one, None, two, one], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        outputs, forms = play(folder, requested, [9, 9, 9, 30], max_loras=2)
    finally:
        torch.set_num_threads(before)
    assert set(forms) == {"native"}
    for out, request in zip(outputs, requested, strict=True):
        tokens = [*out.prompt_token_ids, *out.outputs[0].token_ids]
        reference = expected(model, request and request.lora_path, tokens)[len(out.prompt_token_ids) - 1 :]
        found = torch.tensor([[row[i].logprob for i in range(VOCAB)] for row in out.outputs[0].logprobs])
        torch.testing.assert_close(found.double(), reference[:-1], atol=1e-4, rtol=0)


def test_a_place_that_changes_its_adapter_needs_no_new_program(made):
    folder, _, (one, two), _ = made
    with engine(folder, max_loras=1, enable_prefix_caching=False) as llm:
        program = llm.engine.executor.runner.native.program
        first, second, third = (
            llm.generate(prompts_of([8]), PARAMS, False, lora_request=request) for request in (one, two, one)
        )
        assert llm.engine.executor.runner.native.program is program
        assert set(llm.stats()["forms"]) == {"native"}
    same(first, third, 1e-6)
    assert first[0].outputs[0].token_ids != second[0].outputs[0].token_ids


def test_16_bit_weights_have_16_bit_adapters(made):
    folder, _, (one, two), _ = made
    requested, lengths, options = [one, None, two], [9, 70, 41], {"dtype": "bfloat16", "max_num_batched_tokens": 200}
    native, forms = play(
        folder, requested, lengths, **options
    )  # the first step has more than 64 tokens if it is native
    assert "native" in forms
    separate, _ = play(folder, requested, lengths, graph="off", **options)
    for a, b in zip(native, separate, strict=True):
        mine, other = a.outputs[0].logprobs[0], b.outputs[0].logprobs[0]
        assert max(abs(mine[i].logprob - other[i].logprob) for i in range(VOCAB)) < 0.15


def test_steps_with_factors_leave_the_native_steps_and_others_stay(made):
    folder, _, (one, _), factors = made
    with engine(folder, adapters=["ia3", "lora"]) as llm:
        llm.generate(prompts_of([8, 8]), PARAMS, False, lora_request=[one, None])
        assert set(llm.stats()["forms"]) == {"native"}
        both = llm.generate(prompts_of([8, 8]), PARAMS, False, lora_request=[one, factors])
        assert set(llm.stats()["forms"]) == {"native", "separate"}
    separate, _ = play(folder, [one, factors], [8, 8], graph="off", adapters=["ia3", "lora"])
    same(both, separate)


def test_a_subclass_without_low_rank_products_runs_as_separate_operations(made, monkeypatch):
    """An inherited method may not describe what the subclass computes."""
    folder, _, (one, _), _ = made

    class Other(LoraMemory):
        pass

    monkeypatch.setattr("minivllm.plugins.adapter.lora_memory.LoraMemory", Other)
    with engine(folder) as llm:
        assert type(llm.engine.executor.runner.adapters.memories[0]) is Other
        llm.generate(prompts_of([8]), PARAMS, False, lora_request=one)
        assert set(llm.stats()["forms"]) == {"separate"}
        llm.generate(prompts_of([8]), PARAMS, False)
        assert set(llm.stats()["forms"]) == {"native", "separate"}


def test_drafts_of_adapted_rows_are_verified_natively(made):
    folder, _, (one, two), _ = made
    repeated = [{"prompt_token_ids": [7, 8, 9, 10] * 5}, {"prompt_token_ids": [20, 21, 22] * 6}]
    found = {}
    for graph in ("auto", "off"):
        with engine(folder, drafter="ngram", speculate="always", graph=graph) as llm:
            found[graph] = llm.generate(repeated, PARAMS, False, lora_request=[one, two])
            assert llm.stats()["speculation"]["proposed"]
            assert ("native" in llm.stats()["forms"]) == (graph == "auto")
    same(found["auto"], found["off"])


def test_the_comparison_of_log_probabilities_sees_a_missing_adapter(made):
    """The bound of these tests is far below the effect of an adapter."""
    _, model, (one, _), _ = made
    tokens = prompts_of([12])[0]["prompt_token_ids"]
    base, adapted = expected(model, None, tokens), expected(model, one.lora_path, tokens)
    assert (base - adapted).abs().max() > 0.1
