"""The sampler under the kit, its tournament against plain Python, and that the detector finds what it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from minivllm_synthid.sampler import SynthId, limited
from minivllm_synthid.tournament import context_hash, detect, g_bits, tournament

from minivllm import LLM, SamplingParams
from minivllm.plugin import Rows, SamplingContext
from minivllm.testing import SamplerConformance

KEY = 0x5EED


class TestSynthId(SamplerConformance):
    plugin = "minivllm-synthid/synthid"
    options = {"remember": 64}  # the kit makes 32,768 slots at once; all else is the same

    def params(self, vocab):
        return [{"watermark": True}, {"watermark": True, "temperature": 0.7, "top_p": 0.9}]

    def wrong_params(self, vocab):
        return [{"watermark": value} for value in (1, "yes", [])]


def test_a_layer_is_the_formula_of_the_paper():
    rng = np.random.default_rng(0)
    prob = torch.tensor(rng.dirichlet(np.ones(40), 6), dtype=torch.float64)
    context = torch.arange(1, 7) * 12345
    got = tournament(prob, context, 30)
    for row, c in enumerate(context):
        p = prob[row].tolist()
        bits = [int(g_bits(c, torch.tensor(x))) for x in range(40)]
        for layer in range(30):
            g = [bits[x] >> layer & 1 for x in range(40)]
            mean = sum(a * b for a, b in zip(p, g, strict=True))
            p = [a * (1 + b - mean) for a, b in zip(p, g, strict=True)]
        assert torch.allclose(got[row], torch.tensor(p, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(got.sum(1), torch.ones(6, dtype=torch.float64))


def test_in_float32_no_probability_falls_below_0():
    prob = torch.softmax(torch.randn(500, 300, generator=torch.Generator().manual_seed(3)) * 8, dim=1)
    got = tournament(prob, context_hash(torch.arange(2000).view(500, 4), KEY), 30)
    assert (got >= 0).all() and (got.sum(1) - 1).abs().max() < 1e-5


def test_the_mean_over_contexts_is_the_distribution_itself():
    """What makes it invisible: each context bends the probabilities its own way, all together leave them."""
    prob, n = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64), 40_000
    contexts = context_hash(torch.arange(4 * n).view(n, 4), KEY)
    got = tournament(prob.expand(n, -1), contexts, 8)
    assert (got.mean(0) - prob).abs().max() < 4 * float(got.std(0).max()) / n**0.5
    assert got.std(0).min() > 0.1, "and one alone bends them a lot"


def test_g_values_are_fair_coins_in_each_layer_and_between_layers():
    contexts = context_hash(torch.arange(4 * 5000).view(5000, 4), KEY)
    bits = g_bits(contexts[:, None], torch.arange(40))
    ones = torch.stack([(bits >> layer & 1).double().flatten() for layer in range(32)])
    assert (ones.mean(1) - 0.5).abs().max() < 5 * 0.5 / 200_000**0.5
    assert (torch.corrcoef(ones) - torch.eye(32)).abs().max() < 5 / 200_000**0.5


def test_a_context_marks_once_in_a_sequence_and_again_in_another():
    sampler, vocab = SynthId(None, SamplingContext(50, 64, ())), 50
    row = sampler.bind(SamplingParams(watermark=True), 4)
    state = {
        name: torch.full((2, *column.shape), column.fill, dtype=getattr(torch, column.dtype))
        for name, column in sampler.columns().items()
    }
    for name, value in row.values.items():
        state[name][:] = value
    tokens = torch.zeros(2, 64, dtype=torch.int32)
    tokens[:, :9] = torch.tensor([1, 2, 3, 4, 9, 1, 2, 3, 4])
    both = torch.tensor([0, 1])
    rows = lambda at: Rows(both, both * 0 + at, both * 0 + 4, both, both, row.variant, tokens, 64)  # noqa: E731
    flat = torch.zeros(2, vocab)
    first = sampler._marked(flat, rows(4), state)
    assert not torch.equal(first, flat)
    sampler.commit(torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3]]), torch.tensor([4, 0]), rows(4), state)
    again = sampler._marked(flat, rows(9), state)
    assert torch.equal(again[0], flat[0]), "1 2 3 4 has marked in this sequence"
    assert torch.equal(again[1], first[1]), "and not yet in the other, whose tokens were rejected"
    assert state["count"].tolist() == [4, 0]


def test_more_contexts_than_are_remembered_leave_the_last_ones():
    sampler = SynthId(None, SamplingContext(50, 4096, ()))
    seen = torch.zeros(1, 1024 + 1, dtype=torch.int64)
    state = {"seen": seen, "count": torch.zeros(1, dtype=torch.int64), "marked": torch.ones(1, dtype=torch.bool)}
    tokens = torch.randint(0, 50, (1, 2000))
    one = torch.zeros(1, dtype=torch.int64)
    rows = Rows(one, one + 4, one, one, one, 0, torch.zeros(1, 4096, dtype=torch.int32), 4096)
    sampler.commit(tokens, one + 2000, rows, state)
    before = torch.cat([torch.zeros(1, 4, dtype=torch.int64), tokens[:, :-1]], 1)
    want = context_hash(before.unfold(1, 4, 1), KEY)[0, -1024:]
    assert set(seen[0, :-1].tolist()) == set(want.tolist()) and seen[0, -1] == 0


def test_limits_at_their_edges():
    x = torch.tensor([[0.0, -1.0, -2.0, -30.0]] * 3)
    got = limited(x, torch.tensor([0, 2, 0], dtype=torch.int32), torch.tensor([1.0, 1.0, 0.5]))
    assert [int(row.isfinite().sum()) for row in got] == [4, 2, 1]


def stories(**more):
    """Token ids of ten hot stories (a watermark needs choices), every second one marked; how many were preempted."""
    torch.set_num_threads(1)  # the model is small
    options = dict(model="pocket", dtype="float32", device="cpu", max_num_seqs=8, max_model_len=512)
    params = [
        SamplingParams(max_tokens=150, temperature=2.0, seed=i, ignore_eos=True, watermark=i % 2 == 1)
        for i in range(10)
    ]
    with LLM(**options, **more, sampler="minivllm-synthid/synthid") as llm:
        out = llm.generate(["Once upon a time"] * len(params), params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in out], llm.stats()["preemptions"]


@pytest.fixture(scope="module")
def texts():
    return stories()[0]


def test_the_detector_finds_marked_texts_and_no_others(texts):
    z = [detect(list(text), KEY)[0] for text in texts]
    marked, plain = (sum(part) / 5**0.5 for part in (z[1::2], z[0::2]))
    assert marked > 8 and abs(plain) < 3 and min(z[1::2]) > max(z[0::2]), z
    assert max(abs(detect(list(text), KEY + 1)[0]) for text in texts) < 4, "who has another key finds nothing"


def test_a_preempted_sequence_goes_on_with_the_same_text(texts):
    """Its columns are made again from its tokens."""
    again, preempted = stories(num_kvcache_blocks=40)
    assert preempted > 0
    assert again == texts
