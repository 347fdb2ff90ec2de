"""The processor under the kit, and whole engines against both models of transformers, which read each sequence anew."""

from __future__ import annotations

import math

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.plugin import ConfigError
from minivllm.testing import ProcessorConformance
from minivllm.testing.tiny import tiny_dir

BETA, ALPHA = 0.5, 0.1  # of the options, unless a request says


class TestContrast(ProcessorConformance):
    plugin = "minivllm-contrast/contrast"

    def params(self, vocab):
        both = [{"contrast_beta": 1.5, "contrast_alpha": 0.03}, {"contrast_beta": 0.0, "contrast_alpha": 1.0}]
        return [{"contrast_beta": 0.5}, {"contrast_alpha": 0.4}, *both]

    def wrong_params(self, vocab):
        return [{"contrast_beta": -1}, {"contrast_beta": "a"}, {"contrast_alpha": 0}, {"contrast_alpha": 1.5}]

    def reference(self, params, logits, prompt, output):
        if params.contrast_beta is None and params.contrast_alpha is None:
            return logits
        small = self.own_logits([*prompt, *output], len(logits)).double()
        return contrasted(logits, small, params.contrast_beta, params.contrast_alpha)


def contrasted(large, small, beta=None, alpha=None):
    """Return the contrasted logits [V] of one row, as in the paper."""
    beta, alpha = BETA if beta is None else beta, ALPHA if alpha is None else alpha
    likely = large.softmax(0) >= alpha * large.softmax(0).max() * (1 - 1e-6)  # equal ones may round apart
    return torch.where(likely, (1 + beta) * large - beta * small, -math.inf)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return two tiny models with sharp distributions, whose few plausible tokens differ."""
    found = []
    for name, layers, seed in (("large", 2, 1), ("small", 1, 5)):
        folder, _, model = tiny_dir(tmp_path_factory.mktemp(name), num_hidden_layers=layers, seed=seed, eos_token_id=60)
        found.append((folder, model))
    return found


REQUESTED = [
    {"contrast_beta": 0.5},
    {},
    {"contrast_beta": 2.0, "contrast_alpha": 0.02},
    {"contrast_alpha": 0.3},
    {"repetition_penalty": 1.3},
    {"contrast_beta": 1.0, "n": 2},
    {"contrast_beta": 0.0, "contrast_alpha": 1.0},
]


def llm(pair, **more):
    (large, _), (small, _) = pair
    contrast = {"name": "minivllm-contrast/contrast", "options": {"model": str(small)}}
    options = {
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_model_len": 128,
        "kvcache_block_size": 4,
        "num_kvcache_blocks": 120,
        "max_num_batched_tokens": 24,
        "processors": [contrast, "penalties"],
        **more,
    }
    return LLM(str(large), **options)


def prompts(n=7):
    """Return prompts with 17 common tokens, so that most of each prompt is a prefix hit."""
    return [[(7 * j) % 60 for j in range(17)] + [(i * i + 5 * j) % 60 for j in range(3 * i + 2)] for i in range(n)]


def parameters(**more):
    return [
        SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **p, **more}) for p in REQUESTED
    ]


@torch.inference_mode()
def reference(pair, prompt, params, tokens):
    """Return greedy tokens of both models over the whole sequence, and the lead of each over the next best token."""
    (_, large), (_, small) = pair
    ids, leads = list(prompt), []
    for _ in range(tokens):
        logits, other = (model(torch.tensor([ids])).logits[0, -1].double() for model in (large, small))
        if "contrast_beta" in params or "contrast_alpha" in params:
            logits = contrasted(logits, other, params.get("contrast_beta"), params.get("contrast_alpha"))
        if by := params.get("repetition_penalty"):
            seen = sorted(set(ids))
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / by, logits[seen] * by)
        best = logits.topk(2)
        leads.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], leads


@pytest.fixture(scope="module")
def want(pair):
    found = [reference(pair, prompt, p, 20) for prompt, p in zip(prompts(), REQUESTED, strict=True)]
    assert min(min(leads) for _, leads in found) > 1e-4, "a near tie: another seed makes this a sharper test"
    return [tokens for tokens, _ in found]


def tokens_of(outs):
    return [[list(c.token_ids) for c in out.outputs] for out in outs]


def test_the_reference_differs_from_the_model_alone(pair, want):
    plain = [reference(pair, prompt, {}, 20)[0] for prompt in prompts()]
    differ = [a != b for a, b in zip(plain, want, strict=True)]
    assert differ[0] and differ[2] and differ[5] and not differ[1]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_kvcache_blocks": 34},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 8},
        {"batch_invariant": True},
        {"executor": "process"},
        {"drafter": "ngram", "speculate": "always"},
    ],
    ids=lambda more: ",".join(more) or "plain",
)
def test_greedy_tokens_are_those_of_both_models_over_the_whole_sequence(pair, want, more):
    """Beside rows that do not ask, in chunks, preempted, after prefix hits, with two branches of one prompt, and beside
    rows that speculate."""
    with llm(pair, **more) as engine:
        first = tokens_of(engine.generate(prompts(), parameters(), use_tqdm=False))
        again = tokens_of(engine.generate(prompts()[::-1], parameters()[::-1], use_tqdm=False))[::-1]
        stats = engine.stats()
    for found in (first, again):
        for got, tokens in zip(found, want, strict=True):
            assert all(branch == tokens for branch in got)
    assert len(first[5]) == 2
    if "num_kvcache_blocks" in more:
        assert stats["preemptions"] > 0


def test_a_second_model_as_drafter_stands_beside_it(pair, want):
    drafter = {"name": "model", "options": {"model": str(pair[1][0])}}
    with llm(pair, drafter=drafter, speculate="always") as engine:
        outs = engine.generate(prompts(), parameters(), use_tqdm=False)
    assert [branches[0] for branches in tokens_of(outs)] == want
    assert outs[0].metrics.drafted_tokens == 0 < outs[1].metrics.drafted_tokens, "such a row goes token by token"


def test_draws_are_the_same_alone_and_preempted(pair):
    params = parameters(temperature=1.0, seed=3, n=2)
    with llm(pair, batch_invariant=True) as engine:
        alone = [
            tokens_of(engine.generate([p], [q], use_tqdm=False))[0] for p, q in zip(prompts(), params, strict=True)
        ]
    with llm(pair, batch_invariant=True, num_kvcache_blocks=34) as engine:
        together = tokens_of(engine.generate(prompts(), params, use_tqdm=False))
        assert engine.stats()["preemptions"] > 0
    assert together == alone


@torch.inference_mode()
def beams(pair, prompt, width, tokens):
    """Return the ``width`` best sequences of so many tokens by the sum of their contrasted log-probabilities."""
    live = [(0.0, list(prompt))]
    for _ in range(tokens):
        grown = []
        for total, ids in live:
            logits = contrasted(*(model(torch.tensor([ids])).logits[0, -1].double() for _, model in pair), 1.0)
            best = logits.log_softmax(0).topk(width)
            grown += [
                (total + x, [*ids, token]) for x, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        live = sorted(grown, reverse=True)[:width]
    return [ids[len(prompt) :] for _, ids in live]


def test_beams_go_by_the_scores_of_both_models(pair):
    """Compare beams with a search in torch: the smaller model computes the blocks of a beam again after it moved."""
    params = SamplingParams(beam_width=3, n=3, max_tokens=8, ignore_eos=True, length_penalty=0.0, contrast_beta=1.0)
    with llm(pair, logprobs_mode="processed_logprobs", strategies=["single", "beam"]) as engine:
        outs = engine.generate(prompts(3), params, use_tqdm=False)
    for prompt, found in zip(prompts(3), tokens_of(outs), strict=True):
        assert found == beams(pair, prompt, 3, 8)


def test_a_model_with_another_vocabulary_is_refused(pair, tmp_path):
    other, _, _ = tiny_dir(tmp_path / "other", vocab_size=77)
    with pytest.raises(ConfigError, match=r"the model of minivllm-contrast/contrast, .*vocab_size=77; expected 61"):
        llm([pair[0], (other, None)])
