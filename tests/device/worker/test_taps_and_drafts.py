"""Taps where other rows speculate: rows for which the drafter has nothing leave the step before it runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import DEVICE
from greedy import GREEDY, prompts

from minivllm import LLM, SamplingParams, Tap
from minivllm.core.engine import publisher
from minivllm.device.worker import drafting
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)
SMALL = {"device": DEVICE, "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 96}
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
    assert sum(behind) > len(POINTS) or DEVICE != "cpu"  # a GPU's steps keep their rows
    for a, b in zip(plain, drafted, strict=True):
        assert (a.error, b.error) == (None, None) and a.tokens == b.tokens
        for point in POINTS if a.taps else ():
            assert b.taps[point].shape == a.taps[point].shape, point
            assert np.abs(b.taps[point] - a.taps[point]).max() <= 1e-4, point


DRAFTERS = ["ngram", "suffix", {"name": "model", "options": {}}]
ADDED = np.random.default_rng(2).standard_normal(32).astype(np.float32)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=["ngram", "suffix", "model"])
@pytest.mark.parametrize("options", [{}, {"num_kvcache_blocks": 21}, {"batch_invariant": True, "graph": "off"}])
def test_rows_with_taps_speculate_and_read_each_position_once(folder, drafter, options):
    """Reads and additions, accepted and rejected drafts, chunks, branches and preemption."""
    g = np.random.default_rng(5)
    items = [g.integers(3, 61, n).tolist() * 3 for n in (2, 3, 5, 4, 7, 1)]
    read = [Tap(p, read=True) for p in POINTS]
    taps = [read, [Tap("layers.0.residual", add=ADDED, read=True)], [], [Tap("norm", add=ADDED)], read[1:], read[:1]]
    ways = [SamplingParams(**{**GREEDY, "max_tokens": 24}, n=1 + (i == 4)) for i in range(len(items))]

    def outputs(**more):
        with LLM(folder, **{**SMALL, **options, **more}) as llm:
            found = llm.generate(items, ways, False, taps)
            llm.check()
            return found, llm.stats()

    plain, _ = outputs(drafter="none")
    if isinstance(drafter, dict):
        drafter = {"name": "model", "options": {"model": folder}}
    drafted, stats = outputs(drafter=drafter, speculate="always", num_speculative_tokens=3)
    assert stats["speculation"]["failed"] is None
    assert sum(out.metrics.accepted_tokens for out in drafted) > 8
    for a, b in zip(plain, drafted, strict=True):
        assert (a.error, b.error) == (None, None)
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert x.token_ids == y.token_ids
            assert (x.taps or {}).keys() == (y.taps or {}).keys()
            for point, values in (x.taps or {}).items():
                assert y.taps[point].shape == values.shape, point
                assert np.abs(y.taps[point] - values).max() <= 1e-3, point


def test_kept_values_of_rejected_drafts_are_found(monkeypatch):
    """A planted fault, which the comparison of values catches."""
    monkeypatch.setattr(publisher, "rejected_drafts", lambda plan, result: None)
    params, taps = SamplingParams(**{**GREEDY, "max_tokens": 24}), [Tap("norm", read=True)]
    found = []
    for drafter in ("none", {"name": "model", "options": {"model": "pocket-draft"}}):
        with LLM("pocket", drafter=drafter, speculate="always", **{**SMALL, "max_num_batched_tokens": 64}) as llm:
            (out,) = llm.generate([[5, 6, 7, 8, 9]], params, False, taps)
            found.append(out)
    assert found[0].tokens == found[1].tokens
    values, wrong = (out.taps["norm"] for out in found)
    assert values.shape != wrong.shape or np.abs(values - wrong).max() > 1e-3
