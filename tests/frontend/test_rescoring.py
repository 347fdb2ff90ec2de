"""Log-probabilities of drawn tokens equal the log-probabilities of the same tokens as a prompt, over updates."""

from __future__ import annotations

import pytest
import torch
from native_runs import engine, prompt
from safetensors.torch import load_file

from minivllm import SamplingParams, Tap
from minivllm.testing.tiny import tiny_dir

UPDATES = 30
DRAWN = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0}
SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


def chosen(entries, ids):
    """Return the log-probabilities of tokens."""
    return [entry[token].logprob for entry, token in zip(entries, ids, strict=True)]


def test_rescoring_gives_equal_bits_over_updates(tmp_path):
    folder, _, _ = tiny_dir(tmp_path / "model", "qwen3", intermediate_size=64)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    prompts = [{"prompt_token_ids": prompt(n, n)} for n in (5, 29)]
    with engine(str(folder), batch_invariant=True, max_num_batched_tokens=24) as llm:
        for version in range(UPDATES):
            params = SamplingParams(temperature=version % 3 / 2, seed=version, **DRAWN)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            whole = [{"prompt_token_ids": o.prompt_token_ids + o.tokens} for o in outputs]
            warm = llm.generate(whole, SCORED, use_tqdm=False)
            llm.reset_prefix_cache()
            cold = llm.generate(whole[::-1], SCORED, use_tqdm=False)[::-1]
            for drawn, *scored in zip(outputs, warm, cold, strict=True):
                want = chosen(drawn.outputs[0].logprobs, drawn.tokens)
                for one in scored:
                    assert chosen(one.prompt_logprobs[-len(drawn.tokens) :], drawn.tokens) == want
                assert drawn.outputs[0].weights_versions == [version] * len(drawn.tokens)
            tensors = {name: t + 0.02 * torch.randn(t.shape) for name, t in tensors.items()}
            llm.update_weights(tensors)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_the_logprobs_of_drawn_tokens_are_of_the_logits_that_drew_them(tmp_path, mode):
    folder, _, _ = tiny_dir(tmp_path / "model", "qwen3", intermediate_size=64)
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=8, ignore_eos=True, logprobs=60)
    with engine(str(folder), logprobs_mode=mode, max_logprobs=61) as llm:
        want = llm.generate({"prompt_token_ids": prompt(9)}, params, use_tqdm=False)[0]
        taps = [Tap("logits", read=True)]
        got = llm.generate({"prompt_token_ids": prompt(9)}, params, use_tqdm=False, taps=taps)[0]
        assert got.tokens == want.tokens
        logits = torch.from_numpy(got.taps["logits"]).double()
        logits = logits if mode == "raw_logprobs" else logits / 0.5
        expected = logits.log_softmax(-1)
        found = [got.outputs[0].logprobs[i][token].logprob for i, token in enumerate(got.tokens)]
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected[range(8), got.tokens], atol=1e-5)
