"""Typical and mirostat: against the published ways of doing it, and state that a preemption does not lose."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from minivllm import LLM, RequestError, SamplingParams
from minivllm.core.interfaces.sampling import SamplingContext
from minivllm.device.worker.sampling import gumbel
from minivllm.plugins.sampler.mirostat import MirostatSampler
from minivllm.plugins.sampler.typical import TypicalSampler
from minivllm.testing.sampler import SamplerConformance
from minivllm.testing.sampling_rows import SampledSeq, Stage
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other

CTX = SamplingContext(67, 24, ())
SMALL = dict(skip_tokenizer_init=True, dtype="float32", max_num_seqs=8, max_num_batched_tokens=64)


def suite(plugin, vocab):
    made = SamplerConformance()
    made.plugin, made.vocab = plugin, vocab
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_dir(folder, "qwen3", vocab_size=131)
    return str(folder)


@pytest.mark.parametrize("mass", [0.2, 0.55, 0.9])
def test_typical_leaves_the_tokens_that_transformers_leaves(mass):
    from transformers import TypicalLogitsWarper

    for seed, scale in ((0, 0.5), (1, 2.0), (2, 5.0)):
        logits = torch.randn(500, generator=torch.Generator().manual_seed(seed)) * scale
        want = TypicalLogitsWarper(mass)(None, logits[None].clone())[0] > -torch.inf
        got = TypicalSampler(None, SamplingContext(500, 24, ()))
        row = got.bind(SamplingParams(typical_p=mass), 1)
        left = logits[None].clone()
        state = {name: torch.tensor([value]) for name, value in row.values.items()}
        from minivllm.plugins.sampler.typical import _restrict

        _restrict(left, state["temperature"].float(), state["typical_p"].float())
        assert torch.equal(left[0] > -torch.inf, want), (mass, scale)


def mirostat_by_hand(rows, tau, eta, temperature, seed):
    """Algorithm 2 of the paper in float64, with the engine's noise; rows of logits, one a step."""
    mu, out, mus = 2 * tau, [], []
    for t, logits in enumerate(rows):
        x = logits.double() / temperature
        bits = -torch.log_softmax(x, 0) / math.log(2)
        allowed = bits <= mu
        allowed[int(x.argmax())] = True
        one = lambda value: torch.tensor([value])  # noqa: E731
        noise = gumbel(one(seed), one(t + 1), one(0), len(logits))[0].double()
        token = int(torch.where(allowed, x, -torch.inf).add(noise).argmax())
        mu -= eta * (float(bits[token]) - tau)
        out.append(token)
        mus.append(mu)
    return out, mus


@pytest.mark.parametrize(("tau", "eta", "temperature"), [(1.0, 0.1, 1.0), (3.0, 0.5, 1.7), (4.5, 1.0, 0.6)])
def test_mirostat_is_the_algorithm_of_the_paper(tau, eta, temperature):
    rows = torch.randn(20, 67, generator=torch.Generator().manual_seed(7)) * 2
    params = SamplingParams(mirostat_tau=tau, mirostat_eta=eta, temperature=temperature)
    stage = Stage(suite("mirostat", 67), 1)
    stage.join([0], [SampledSeq(params, (0,), (), rows[0], seed=11)])
    tokens, mus = [], []
    for logits in rows:
        token = int(stage.draw([0], logits[None])[0])
        stage.accept([0], [[token]])
        tokens.append(token)
        mus.append(float(stage.state.columns["mu"][0]))
    want, want_mus = mirostat_by_hand(rows, tau, eta, temperature, 11)
    assert tokens == want
    np.testing.assert_allclose(mus, want_mus, atol=2e-5)


def test_mirostat_holds_the_surprise_at_its_target():
    """Mean surprise of 400 tokens from a broad distribution: whatever the tau, that is the mean."""
    gen = torch.Generator().manual_seed(3)
    for tau in (2.0, 3.5):
        stage = Stage(suite("mirostat", 400), 1, vocab=400, max_len=500)
        params = SamplingParams(mirostat_tau=tau, mirostat_eta=0.2)
        stage.join([0], [SampledSeq(params, (0,), (), torch.zeros(400), seed=5)])
        bits = []
        for _ in range(400):
            logits = torch.randn(400, generator=gen) * 2.5
            token = int(stage.draw([0], logits[None])[0])
            bits.append(-float(torch.log_softmax(logits.double(), 0)[token]) / math.log(2))
            stage.accept([0], [[token]])
        assert abs(np.mean(bits[50:]) - tau) < 0.25, (tau, np.mean(bits[50:]))


def test_without_their_parameters_they_are_the_default_sampler():
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 67, generator=rng) * 2
    requested = [
        {},
        {"temperature": 0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 0.6, "top_p": 0.9},
    ]
    got = []
    for plugin in ("default", "typical", "mirostat"):
        stage = Stage(suite(plugin, 67), 6)
        stage.join(range(6), [SampledSeq(SamplingParams(**a), (0,), (), logits[i], i) for i, a in enumerate(requested)])
        got.append(stage.draw(range(6), logits).tolist())
    assert got[0] == got[1] == got[2]


@pytest.mark.parametrize(("run_ahead", "n"), [(0, 1), (2, 2)])
def test_what_mirostat_has_learnt_survives_preemption(folder, run_ahead, n):
    """Its mu is made of probabilities: without ``kept`` the tokens differ, see the last lines."""
    items = [[i + 1] * (3 + 5 * i) for i in range(4)]
    params = SamplingParams(mirostat_tau=4.0, mirostat_eta=0.4, seed=2, max_tokens=28, ignore_eos=True, n=n)

    def run(sampler="mirostat", blocks=120, **more):
        own = dict(sampler=sampler, num_kvcache_blocks=blocks, run_ahead=run_ahead, **more)
        with LLM(folder, **SMALL, **own) as llm:
            out = [[o.tokens for o in r.outputs] for r in llm.generate(items, params, use_tqdm=False)]
            return out, llm.stats()["preemptions"], len(llm.engine.executor.runner.state.saved)

    want, none, _ = run()
    got, preempted, left = run(blocks=8 + 4 * (n - 1))
    assert none == 0 < preempted and got == want
    assert left <= 1, "columns of sequences that ended are still put aside"
    forgets = dict(sampler="wrong.samplers_state:ForgetsMu", allow_targets=["wrong.samplers_state"])
    assert run(blocks=8 + 4 * (n - 1), **forgets)[0] != want, "the test is too weak: mu does not matter here"


@pytest.mark.parametrize(
    ("requested", "param"),
    [
        (dict(mirostat_tau=2.0, top_k=4), "mirostat_tau"), (dict(mirostat_tau=2.0, top_p=0.5), "mirostat_tau"),
        (dict(mirostat_tau=2.0, min_p=0.5), "mirostat_tau"), (dict(mirostat_tau=2.0, temperature=0), "mirostat_tau"),
        (dict(mirostat_tau=2.0, choose_fn=lambda x, ids: 1), "mirostat_tau"),
        (dict(mirostat_tau=2.0, beam_width=2), "mirostat_tau"), (dict(mirostat_eta=0.3), "mirostat_eta"),
    ],
)  # fmt: skip
def test_what_mirostat_would_ignore_is_refused(requested, param):
    with pytest.raises(RequestError) as e:
        MirostatSampler(None, CTX).bind(SamplingParams(**requested), 3)
    assert e.value.param == param
