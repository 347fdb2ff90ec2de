"""Compare processors and samplers with references in float64, in about a minute on a CPU.

    python benchmarks/decoders.py [--rows 400] [--draws 262144] [--device cpu]

The tables show the largest error of a logit over random rows, and chi-square of draws with the smallest difference that
this number of draws detects.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np
import torch

from minivllm import SamplingParams
from minivllm.testing.chisquare import POWER, detectable, pooled, survival
from minivllm.testing.processor import ProcessorConformance
from minivllm.testing.sampler import SamplerConformance
from minivllm.testing.sampling_reference import standard_reference
from minivllm.testing.sampling_rows import SCHEDULES, SampledSeq, Stage

LEVEL = 1e-3  # level of the test whose power is stated
VOCAB, HISTORY = 503, 40


def choices(rng: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Return random parameters of one row, by the compared function."""
    ids = lambda k: rng.integers(0, 40, k).tolist()  # noqa: E731
    number = lambda low, high: float(rng.uniform(low, high))  # noqa: E731
    return {
        "penalties: repetition": {"repetition_penalty": number(0.5, 3)},
        "penalties: presence, frequency": {"presence_penalty": number(-2, 2), "frequency_penalty": number(-2, 2)},
        "penalties: all three": {
            "repetition_penalty": number(0.5, 3), "presence_penalty": number(-2, 2), "frequency_penalty": number(-2, 2),
        },
        "logit_bias": {"logit_bias": {i: number(-100, 100) for i in ids(30)}},
        "bad_words": {"bad_words": [ids(int(rng.integers(1, 4))) for _ in range(40)]},
        "allowed_tokens": {"allowed_token_ids": ids(30)},
        "no_repeat_ngram": {"no_repeat_ngram_size": int(rng.integers(1, 5))},
        "temperature_schedule: linear, cosine": {"temperature_schedule": SCHEDULES[int(rng.integers(0, 3))]},
        "temperature_schedule: entropy": {"temperature_schedule": SCHEDULES[int(rng.integers(3, 5))]},
    }  # fmt: skip


def errors(count: int, device: str) -> None:
    """Print |logit - float64 reference|, absolute and relative to the row's largest number.

    Bans must agree exactly.
    """
    print(f"{'processor':40}{'rows':>6}{'changed':>9}{'max abs error':>15}{'of the row':>12}{'bans differ':>13}")
    for name in choices(np.random.default_rng(0)):
        rng, suite = np.random.default_rng(1), ProcessorConformance()
        suite.plugin, suite.vocab, suite.device = name.partition(":")[0], VOCAB, device
        seqs = []
        for _ in range(count):
            tokens = rng.integers(0, 40, HISTORY)
            cut = int(rng.integers(1, HISTORY))
            logits = torch.tensor(rng.normal(0, 4, VOCAB), dtype=torch.float32)
            prompt, output = tuple(tokens[:cut].tolist()), tuple(tokens[cut:].tolist())
            seqs.append(SampledSeq(SamplingParams(**choices(rng)[name]), prompt, output, logits))
        stage = Stage(suite, count)
        stage.join(range(count), seqs)
        got = stage.apply(range(count), torch.stack([s.logits for s in seqs])).cpu().double()
        changed = bans = 0
        worst = share = 0.0
        for row, s in zip(got, seqs, strict=True):
            want = standard_reference(suite.reads, s.params, s.logits.double(), s.prompt, s.output)
            changed += not torch.equal(want, s.logits.double())
            bans += int((row.isneginf() != want.isneginf()).sum())
            alive = want.isfinite()
            off = float((row - want)[alive].abs().max())
            worst, share = max(worst, off), max(share, off / max(1.0, float(want[alive].abs().max())))
        print(f"{name:40}{count:6}{changed:9}{worst:15.2e}{share:12.1e}{bans:13}")


DRAWS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("default", {}), ("default", {"temperature": 0.6}), ("default", {"top_k": 20}), ("default", {"top_p": 0.8}),
    ("default", {"min_p": 0.1}), ("default", {"temperature": 1.5, "min_p": 0.02, "top_k": 40, "top_p": 0.9}),
    ("typical", {"typical_p": 0.3}), ("typical", {"typical_p": 0.8}),
    ("typical", {"typical_p": 0.8, "temperature": 1.5, "top_k": 20, "top_p": 0.9}),
    ("mirostat", {"mirostat_tau": 2.2}), ("mirostat", {"mirostat_tau": 2.5, "temperature": 1.6}),
)  # fmt: skip


def frequencies(n: int, device: str) -> None:
    """Print chi-square of draws from 64 tokens.

    ``w`` is the smallest sqrt(sum((q - p)**2 / p)) of a faulty distribution q that n draws detect.
    """
    print(f"\n{n} draws each; w: what they find at level {LEVEL:g} with power {POWER}")
    print(f"{'sampler':10}{'parameters':60}{'kept':>6}{'chi-square':>12}{'df':>5}{'p':>8}{'w':>9}")
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 1.5
    for sampler, requested in DRAWS:
        suite = SamplerConformance()
        suite.plugin, suite.vocab, suite.device = sampler, 64, device
        prob = suite.must_and_may(SamplingParams(**requested), logits)[2]
        if prob is None:
            print(f"{sampler:10}{requested!s:60} ties leave the probabilities open")
            continue
        tokens = suite.draws(SamplingParams(**requested), logits, suite.keys(n, 1000)).cpu()
        report(f"{sampler:10}{requested!s:60}", tokens, prob)
    report(f"{'mirostat':10}{'10th token of a sequence, tau 2.9, given the first nine':60}", *tenth(n, device))


def tenth(n: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens, probabilities) of mirostat's tenth draw, after nine accepted tokens have changed mu."""
    suite = SamplerConformance()
    suite.plugin, suite.vocab, suite.device = "mirostat", 64, device
    gen, tau, eta, mu = torch.Generator().manual_seed(5), 2.9, 0.4, 5.8
    params = SamplingParams(mirostat_tau=tau, mirostat_eta=eta)
    batch = 4096
    stage = Stage(suite, batch, max_len=64)
    stage.join([0], [SampledSeq(params, (0,), (), torch.zeros(64), seed=9)])
    for _ in range(9):
        logits = torch.randn(64, generator=gen) * 1.5
        token = int(stage.draw([0], logits[None])[0])
        stage.accept([0], [[token]])
        mu -= eta * (-float(torch.log_softmax(logits.double(), 0)[token]) / math.log(2) - tau)
    for slot in range(1, batch):
        stage.fork(0, slot)
    logits = torch.randn(64, generator=gen) * 1.5
    prob = torch.softmax(logits.double(), 0)
    prob = torch.where((-prob.log2() <= mu) | (prob == prob.max()), prob, 0.0)
    out = []
    for i in range(0, n, batch):
        stage.seed[:] = np.arange(i, i + batch)
        out.append(stage.draw(range(batch), logits.expand(batch, -1)).cpu())
    return torch.cat(out)[:n], prob / prob.sum()


def report(what: str, tokens: torch.Tensor, prob: torch.Tensor) -> None:
    count = torch.bincount(tokens, minlength=len(prob)).double()
    outside = int(count[prob == 0].sum())
    bins, k = pooled(prob, len(tokens))
    got = torch.zeros(k, dtype=torch.float64).index_add_(0, bins, count)
    want = torch.zeros(k, dtype=torch.float64).index_add_(0, bins, prob * len(tokens))
    chi = float(((got - want) ** 2 / want).sum())
    tail = f"   {outside} OUTSIDE" if outside else ""
    w, p = detectable(len(tokens), k - 1, LEVEL), survival(chi, k - 1)
    print(f"{what}{int((prob > 0).sum()):6}{chi:12.1f}{k - 1:5}{p:8.3f}{w:9.4f}{tail}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--draws", type=int, default=1 << 18)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    errors(given.rows, given.device)
    frequencies(given.draws, given.device)
