"""Adapters (LoRA) compared with PEFT on tiny random models."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")

from adapters import PROMPT, all_scores, difference, engine, expected, lora, write_adapter

from minivllm.testing.tiny import tiny_dir

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3", "phi3", "gpt2", "cohere2", "mpt", "falcon", "qwen3_5", "lfm2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_a_batch_have_the_logits_and_tokens_of_peft(tmp_path, family):
    folder, _, model = tiny_dir(tmp_path / "model", family)
    paths = [write_adapter(model, tmp_path / name, seed=n + 1) for n, name in enumerate("ab")]
    requested = [None, lora(paths[0], 1), lora(paths[1], 2), lora(paths[0], 1)]
    prompts = [PROMPT, PROMPT, PROMPT, PROMPT[3:9]]
    with engine(folder) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], all_scores(), False, lora_request=requested)
    texts = [prompt + out.outputs[0].token_ids for prompt, out in zip(prompts, outputs, strict=True)]
    for path, out, tokens in zip([None, *paths, paths[0]], outputs, texts, strict=True):
        assert out.error is None
        reference = expected(model, path, tokens)
        assert reference[len(out.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == out.outputs[0].token_ids
        assert difference(out, reference, tokens) < 1e-4
    base, first, second = (expected(model, path, PROMPT) for path in (None, *paths))
    assert min((base - first).abs().max(), (first - second).abs().max()) > 0.1, "adapters change logits"
