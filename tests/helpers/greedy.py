"""Greedy tokens of transformers and of minivllm for the same prompts."""

from __future__ import annotations

import numpy as np
import torch

from minivllm import SamplingParams

GREEDY = dict(temperature=0, max_tokens=32, ignore_eos=True)


def hf_greedy(model, prompt, n=32):
    ids = torch.tensor([prompt])
    all_real = torch.ones_like(ids)  # otherwise token 0 would count as padding
    out = model.generate(
        ids, attention_mask=all_real, max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def prompts(vocab, sizes, seed=0):
    r = np.random.default_rng(seed)
    return [r.integers(0, vocab, n).tolist() for n in sizes]


def tokens(llm, items, **params):
    return [o.tokens for o in llm.generate(items, SamplingParams(**{**GREEDY, **params}), use_tqdm=False)]
