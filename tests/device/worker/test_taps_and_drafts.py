"""Taps where other rows speculate: rows for which the drafter has nothing leave the step before it runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from greedy import GREEDY, prompts

from minivllm import LLM, SamplingParams, Tap
from minivllm.device.worker import drafting
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)
SMALL = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96}
SMALL |= {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kvcache_block_size": 8}
POINTS = ["layers.0.q", "layers.1.residual", "norm", "logits"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_dir(tmp_path_factory.mktemp("model"))[0])


def test_values_belong_to_their_rows_where_rows_before_them_leave_the_step(folder, monkeypatch):
    """Prompts that are read come in chunks, which stand behind the rows of drafts."""
    items = prompts(61, [6, 5, 21, 7, 18, 4, 23, 16], seed=3)
    taps = [[Tap(p, read=True) for p in POINTS] if i in (2, 4, 6, 7) else [] for i in range(len(items))]
    without, behind = drafting.without, []

    def watched(plan, keep):
        behind.append(np.count_nonzero(plan.taps[:, 1] > np.flatnonzero(~keep)[0]))
        return without(plan, keep)

    def outputs(**options):
        with LLM(folder, **SMALL, **options) as llm:
            return llm.generate(items, SamplingParams(**{**GREEDY, "max_tokens": 20}), False, taps)

    plain = outputs()
    monkeypatch.setattr(drafting, "without", watched)
    drafted = outputs(drafter="ngram", speculate="always")
    assert sum(behind) > len(POINTS)
    for a, b in zip(plain, drafted, strict=True):
        assert (a.error, b.error) == (None, None) and a.tokens == b.tokens
        for point in POINTS if a.taps else ():
            assert b.taps[point].shape == a.taps[point].shape, point
            assert np.abs(b.taps[point] - a.taps[point]).max() <= 1e-4, point
