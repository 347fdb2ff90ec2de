"""Speculative decoding changes the number of steps and no token.

This is checked in the engine without a model, bit for bit with small models, and as a distribution.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from minivllm import LLM, ConfigError, EngineDeadError, SamplingParams
from minivllm.core.engine.flight import Flight
from minivllm.core.engine.speculation import ENOUGH, FIRST_WAIT, TRIES, Speculation, class_of
from minivllm.core.interfaces.sampling import Column, Row
from minivllm.device.worker.running import Running
from minivllm.plugins.drafter.ngram import NGram
from minivllm.plugins.drafter.options import NGramOptions
from minivllm.plugins.processor.logit_bias import LogitBias
from minivllm.registration.spec import ANY, Spec
from minivllm.testing import chisquare
from minivllm.testing.drafter import DrafterConformance
from minivllm.testing.sim import SimExecutor, answer, at_rest, outputs, request, run, sim_engine
from minivllm.testing.tiny import quiet, tiny_dir

torch.set_num_threads(1)  # with tiny tensors, threads only wait for each other

# ---- the engine without a model ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(24))
def test_no_token_and_no_block_is_lost_whatever_is_rejected(seed):
    """One engine, whose device checks every KV slot that is read, has preemptions, prefix hits, windows, forks, steps
    in flight, chunks and rows without drafts.
    """
    rng = random.Random(seed)
    engine = sim_engine(
        slots=rng.choice([2, 4, 8]),
        blocks=rng.choice([34, 40, 64]),
        block=rng.choice([2, 4]),
        windows=rng.choice([(None,), (None, 8)]),
        depth=rng.choice([0, 0, 1, 2]),
        budget=rng.choice([8, 16, 64]),
        drafts=rng.choice([1, 3, 5]),
        max_len=40,
    )
    engine.executor.options.drafts_accepted = rng.choice([0, 0.5, 0.9, 1])
    made = []
    for i in range(12):
        prompt = [rng.randrange(5) for _ in range(rng.randrange(1, 20))]
        params = {"max_tokens": rng.randrange(1, 20), "n": rng.choice([1, 1, 2]) if engine.slots.block == 4 else 1}
        params |= {"stop_token_ids": [rng.randrange(50)]} if rng.random() < 0.3 else {}
        params |= {"min_tokens": min(params["max_tokens"], 4)} if rng.random() < 0.3 else {}
        params |= {"allowed_tokens_fn": lambda ids: range(50)} if rng.random() < 0.2 else {}
        made.append(request(engine, str(i), prompt, **params))
        for _ in range(rng.randrange(4)):
            engine.step()
            engine.cache.check()
    run(engine, check=True)
    at_rest(engine)
    for r in made:
        want = [answer(r.prompt, r.params, sample, 40) for sample in range(r.params.n)]
        assert outputs(r) == want
    assert engine.stats()["speculation"]["proposed"] > 5


@pytest.mark.parametrize("luck", [0, 1])
def test_a_step_gives_a_row_one_token_and_one_for_each_right_draft(luck):
    engine = sim_engine(drafts=3)
    engine.executor.options.drafts_accepted = luck
    r = request(engine, "a", [1, 2, 3], max_tokens=17, ignore_eos=True)
    run(engine)
    steps = 1 + (16 if not luck else 4)
    assert engine.stats()["steps"] == steps and outputs(r)[0][1] == "length"
    assert r.accepted == (12 if luck else 0) and (r.drafted == 12 or not luck)
    assert engine.stats()["speculation"]["tokens_per_row"] == (4.0 if luck else 1.0)


@pytest.mark.parametrize("luck", [0, 0.6, 1])
def test_rows_with_drafts_run_ahead_of_their_results(luck):
    """All steps but the last ones are planned while the step before is in flight."""
    engine = sim_engine(drafts=3, depth=1, slots=2)
    engine.executor.options.drafts_accepted = luck
    plans, submit = [], engine.executor.submit
    engine.executor.submit = lambda plan: (plans.append(plan), submit(plan))
    made = [request(engine, str(i), [1, 2, 3 + i], max_tokens=60, ignore_eos=True) for i in range(2)]
    run(engine, check=True)
    at_rest(engine)
    assert [outputs(r) for r in made] == [[answer(r.prompt, r.params)] for r in made]
    drafted = [plan for plan in plans if len(plan.draft)]
    assert sum(len(plan.slack) > 0 for plan in drafted) >= 0.6 * len(drafted) > 5
    assert not engine.slots.slack.any() or not len(engine.slots.running)


def test_a_result_that_is_not_moved_to_its_position_is_noticed(monkeypatch):
    monkeypatch.setattr(Flight, "settle", lambda self, slots, live: None)
    with pytest.raises((AssertionError, IndexError, EngineDeadError)):
        test_rows_with_drafts_run_ahead_of_their_results(0.6)


def test_prefills_come_before_drafts_in_the_token_budget():
    engine = sim_engine(drafts=5, budget=8, slots=4)
    request(engine, "a", [1, 2], max_tokens=30, ignore_eos=True)
    engine.step()
    request(engine, "b", list(range(20)), max_tokens=2)
    while engine.slots.computed[1] < 19:
        before = int(engine.slots.computed[1])
        engine.step()
        assert engine.slots.computed[1] >= min(before + 7, 19)
    run(engine)
    assert engine.executor.max_tokens <= 8


# ---- when it pays --------------------------------------------------------------------------------------------------


def serve(
    spec: Speculation, rows: int, plain: float, drafted: float, per_row: float, steps: int, chance=None, slope=0.0
) -> int:
    """Return the steps of a batch under a simulated clock, and how many of them had drafts.

    A step with drafts takes ``drafted``, and ``slope`` more for each draft.  Each draft is accepted with probability
    ``chance`` if the drafts before it are, or all steps give ``per_row`` tokens.
    """
    now, with_drafts, rng = 0.0, 0, np.random.default_rng(1)
    for _ in range(steps):
        k = spec.most_drafts(rows)
        with_drafts += k > 0
        ms = drafted + slope * k if k else plain
        if chance is None:
            taken = np.minimum(np.array([int(per_row - 1 + i / rows) for i in range(rows)]), k)
        else:
            taken = (rng.random((rows, k)) < chance).cumprod(1).sum(1)
        now += ms / 1e3
        spec.time(class_of(rows, 0), k, taken if k else taken[:0], rows, now, False)
    return with_drafts


def test_it_stays_on_where_it_wins():
    spec = Speculation(4, "x")
    assert serve(spec, 2, plain=1.0, drafted=1.5, per_row=2.5, steps=1000) > 900
    (c,) = spec.summary()["batch"].values()
    assert c["on"] and c["gain"] == pytest.approx(2.5 / 1.5, rel=0.01)


def test_it_goes_off_where_it_loses_and_says_so(caplog):
    spec = Speculation(4, "x")
    with caplog.at_level("INFO", "minivllm"):
        few = serve(spec, 64, plain=1.0, drafted=3.0, per_row=2.0, steps=2000)
    assert ENOUGH <= few < 100, "it is tried again, ever more rarely"
    assert "speculation is off for batches of about 64 rows" in caplog.text
    assert not spec.summary()["batch"]["33-64"]["on"]


@pytest.mark.parametrize(("drafted", "per_row"), [(3.0, 2.0), (25.0, 3.5), (1.3, 1.2), (8.0, 1.0)])
def test_where_it_loses_the_trials_cost_a_tenth_at_most(drafted, per_row):
    spec = Speculation(4, "x")
    few = serve(spec, 64, plain=1.0, drafted=drafted, per_row=per_row, steps=5000)
    wanted = 5000 - few + few * per_row  # milliseconds for the same tokens without drafts
    assert few >= ENOUGH and 5000 - few + few * drafted < 1.1 * wanted


def test_batches_of_other_sizes_are_judged_apart():
    spec = Speculation(4, "x")
    serve(spec, 1, plain=1.0, drafted=1.2, per_row=3.0, steps=300)
    serve(spec, 64, plain=1.0, drafted=3.0, per_row=2.0, steps=TRIES * 3 + 2)
    assert spec.most_drafts(1) and not spec.most_drafts(64)


def test_where_it_begins_to_win_it_is_noticed():
    spec = Speculation(4, "x")
    serve(spec, 8, plain=1.0, drafted=3.0, per_row=1.5, steps=100)
    assert serve(spec, 8, plain=1.0, drafted=1.0, per_row=4.0, steps=1500) > 1500 - 16 * FIRST_WAIT


@pytest.mark.parametrize("most", [4, 8])
@pytest.mark.parametrize("fixed, slope", [(0.1, 0.05), (0.1, 0.2), (0.6, 0.05), (0.3, 0.4), (2.0, 0.1)])
@pytest.mark.parametrize("chance", [0.3, 0.5, 0.65, 0.8, 0.9])
def test_the_number_of_drafts_is_about_the_best_one(most, fixed, slope, chance):
    """Check the number from no drafts to all, for several acceptance rates and for fixed and growing parts of
    the time.
    """
    spec = Speculation(most, "x")
    with_drafts = serve(spec, 2, 1.0, 1.0 + fixed, 0, 3000, chance, slope)
    gains = [1.0] + [(1 - chance ** (k + 1)) / (1 - chance) / (1 + fixed + slope * k) for k in range(1, most + 1)]
    c = spec.summary()["batch"]["2"]
    chosen = c["k"] if c["on"] else 0
    assert gains[chosen] > 0.94 * max(gains) or max(gains) < 1.1
    if max(gains) < 0.98:
        assert with_drafts < 0.1 * 3000
    elif max(gains) > 1.3:
        assert with_drafts > 0.9 * 3000


class Paced(SimExecutor):
    """A device on a clock.  ``table`` gives the milliseconds of a step of (decoding rows, drafts, prompt tokens)."""

    def start(self, wiring):
        self.at = self.free = 0.0  # now, and the end of all submitted steps, in milliseconds
        self.ends, self.table, self.steps, self.drafted = deque(), None, 0, 0
        return super().start(wiring)

    def submit(self, plan):
        rows = plan.q_len[plan.draft == 0] if len(plan.draft) else plan.q_len
        decodes, k = int((rows == 1).sum()), int(plan.draft.max(initial=0))
        self.steps, self.drafted = self.steps + 1, self.drafted + (k > 0)
        self.free = max(self.at, self.free) + self.table(decodes, k, int(rows.sum()) - decodes)
        self.ends.append(self.free)
        super().submit(plan)

    def collect(self, in_flight):
        found = super().collect(in_flight)
        for _ in found:
            self.at = max(self.at, self.ends.popleft())
        return found


def paced(rows, table, host, speculate, k=4, accepted=0.77, tokens=100, requests=0, prompt=3, ahead=True):
    """Return the tokens per second of ``rows`` rows at a time, and the engine.

    Each turn of the loop takes ``host(running rows)`` milliseconds before its step is planned.  Without a number of
    ``requests`` all arrive at once, else a request arrives when another one has ended.  Steps with drafts run ahead of
    the host only with ``ahead``."""
    made = []
    sizes = {
        "slots": rows,
        "blocks": rows * (tokens + prompt + 20) // 4 + 2,
        "max_len": tokens + prompt + 8,
        "budget": 2048,
    }
    drafts = 0 if speculate == "none" else k
    engine = sim_engine(
        **sizes, depth=1, drafts=drafts, prefix=False, device=Paced, now=lambda: made[0].at / 1e3 if made else 0.0
    )
    made.append(sim := engine.executor)
    sim.options.check, sim.options.drafts_accepted, sim.table = False, accepted, table
    if drafts:
        engine.speculation.always, engine.speculation.ahead = speculate == "always", ahead
    waiting = list(range(requests or rows))
    while waiting or engine.busy:
        while waiting and len(engine.requests) < rows:
            number = waiting.pop()
            request(engine, str(number), [number % 5] * prompt, max_tokens=tokens, ignore_eos=True)
        sim.at += host(len(engine.slots.running))
        engine.step()
    return engine.publisher.tokens / sim.at * 1e3, engine


def of_8b(rows, k, prompt):
    """Milliseconds like those of an 8B model with a head on an H200: products of k + 1 tokens a row, k passes."""
    return 4.0 + 0.012 * rows * (k + 1) + 0.3 + 0.01 * prompt + (0.26 * k + 0.0008 * rows * k)


@pytest.mark.parametrize(("rows", "wins"), [(1, True), (8, True), (64, True), (256, False)])
def test_drafts_are_used_where_they_win_with_the_host_between_two_steps(rows, wins):
    """Steps without drafts run ahead of the host, which takes 0.85 to 3.4 ms; steps with drafts wait for it."""
    host = lambda n: 0.85 + 0.01 * n  # noqa: E731
    plain, _ = paced(rows, of_8b, host, "none")
    each = {k: paced(rows, of_8b, host, "always", k, ahead=False)[0] for k in (1, 2, 3, 4)}
    assert (max(each.values()) > plain) == wins, "the costs are those that the test is about"
    found, engine = paced(rows, of_8b, host, "auto", tokens=400, ahead=False)
    assert found > 0.93 * max(plain, *each.values())
    if not wins:
        assert engine.executor.drafted < 0.06 * engine.executor.steps


def test_steps_in_which_captures_are_made_decide_nothing():
    """A capture takes 300 ms when its shape first occurs, here in the first and the third step with drafts."""
    seen = []

    def table(rows, k, prompt):
        seen.append(k)
        return of_8b(rows, k, prompt) + (300 if k and seen.count(k) in (1, 3) else 0)

    _, engine = paced(8, table, lambda n: 1.2, "auto", tokens=400)
    assert engine.speculation.classes[class_of(8, 0)].gain > 1.5 and engine.executor.drafted > 60


@pytest.mark.parametrize(("more", "wins"), [(0.0, True), (20.0, False)])
def test_steps_with_prompts_are_judged_by_their_own_times(more, wins):
    """Requests of 100 tokens arrive all the time, and drafts beside prompts cost ``more`` milliseconds."""

    def table(rows, k, prompt):
        return of_8b(rows, k, prompt) + (more if k and prompt else 0.0)

    requested = {"tokens": 12, "requests": 300, "prompt": 100}
    plain, _ = paced(8, table, lambda n: 0.9, "none", **requested)
    found, engine = paced(8, table, lambda n: 0.9, "auto", **requested)
    always, _ = paced(8, table, lambda n: 0.9, "always", **requested)
    assert found > (1.15 if wins else 0.8) * plain and (wins or always < 0.6 * plain)
    assert any(kind.prompt for kind in engine.speculation.classes)


def test_always_means_always():
    spec = Speculation(4, "x", always=True)
    assert serve(spec, 64, plain=1.0, drafted=9.0, per_row=1.0, steps=50) == 50


# ---- drafters ------------------------------------------------------------------------------------------------------


class Lookup(DrafterConformance):
    """The tests use only its method ``drafts``."""

    plugin = "minivllm/ngram"


def look_up(rows, k, **options):
    suite = Lookup()
    return suite.drafts(NGram(NGramOptions(**options), suite.context()[0]), rows, k)


def plain_lookup(row, k, most, least):
    """Return the drafts of prompt lookup by a plain search."""
    for n in range(min(most, len(row) - 1), least - 1, -1):
        for end in range(len(row) - 2, n - 2, -1):
            if row[end - n + 1 : end + 1] == row[-n:]:
                out = list(row)
                while len(out) < len(row) + k:
                    out.append(out[end + 1 + len(out) - len(row)])
                return out[len(row) :]
    return []


def test_ngram_finds_the_longest_latest_match_and_goes_on_in_its_period():
    assert look_up([[1, 2, 3, 4, 9, 1, 2]], 3) == [[3, 4, 9]]
    assert look_up([[5, 1, 2, 7, 1, 2, 8, 1, 2]], 1) == [[8]], "the latest"
    assert look_up([[5, 1, 2, 7, 1, 2, 8, 5, 1, 2]], 1) == [[7]], "the longest before the latest"
    assert look_up([[1, 2, 3, 3, 3]], 4) == [[3, 3, 3, 3]]
    assert look_up([[1, 2, 3, 4, 1]], 2, prompt_lookup_min=2) == [[]], "one token is no match"
    rng = random.Random(0)
    for _ in range(150):
        rows = [[rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(3)]
        most = rng.randrange(1, 6)
        least, k = rng.randrange(1, most + 1), rng.randrange(1, 7)
        want = [plain_lookup(row, k, most, least) for row in rows]
        assert look_up(rows, k, prompt_lookup_max=most, prompt_lookup_min=least) == want


# ---- with models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Return a tiny model, and a draft model that is a noisy copy of it and often right."""
    folder, _, model = tiny_dir(tmp_path_factory.mktemp("model"), eos_token_id=60)
    with torch.no_grad():
        torch.manual_seed(1)
        for p in model.parameters():
            p += 0.08 * torch.randn_like(p)
    draft = tmp_path_factory.mktemp("draft")
    with quiet():
        model.save_pretrained(draft)
    return folder, draft


OPTIONS = "minivllm.plugins.drafter.options:NGramOptions"


def llm(pair, drafter, **options):
    named = {"name": "model", "options": {"model": str(pair[1])}} if drafter == "model" else drafter
    base = dict(
        device="cpu",
        dtype="float32",
        skip_tokenizer_init=True,
        num_kvcache_blocks=60,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        kvcache_block_size=4,
        speculate="always",
        batch_invariant=True,
    )
    return LLM(str(pair[0]), drafter=named, **{**base, **options})


PROMPTS = [[3, 4, 5, 6] * 9, [7, 8, 9], [10] * 12, list(range(11, 40)), [3, 4, 5, 6] * 9 + [1], [2], [9, 8] * 20]
PARAMS = [
    {"temperature": 0.0, "max_tokens": 40},
    {"temperature": 0.7, "top_k": 9, "seed": 5, "max_tokens": 50, "logprobs": 3},
    {"temperature": 1.0, "top_p": 0.8, "seed": 6, "max_tokens": 40, "repetition_penalty": 1.2, "n": 3},
    {"temperature": 0.0, "max_tokens": 36, "min_tokens": 30, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 0.9, "min_p": 0.05, "seed": 8, "max_tokens": 40, "stop_token_ids": [5, 17], "logprobs": 0},
    {"temperature": 0.5, "seed": 9, "max_tokens": 60, "logit_bias": {3: 4.0}},
    {"temperature": 0.0, "max_tokens": 30, "allowed_tokens_fn": lambda ids: range(5, 50)},
]


def answers(engine):
    outs = engine.generate(PROMPTS, [SamplingParams(**p) for p in PARAMS], use_tqdm=False)
    assert not any(o.error for o in outs), [o.error for o in outs]
    return [[(c.token_ids, c.finish_reason, c.stop_reason, c.logprobs) for c in o.outputs] for o in outs], outs


@pytest.fixture(scope="module")
def want(pair):
    with llm(pair, "none") as engine:
        return answers(engine)[0]


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"num_kvcache_blocks": 42, "num_speculative_tokens": 7},
        {"apart": True},
        {"run_ahead": 1},
        {"run_ahead": 2, "num_kvcache_blocks": 42},
    ],
)
def test_every_token_is_the_one_without_drafts(pair, want, drafter, more, monkeypatch):
    """Tokens are equal bit for bit.

    The cases have sampling, every limit and penalty, chunked prompts, prefix hits, preemption, branches, stops and
    log-probabilities.  The drafts of a row are one row for attention, or rows of their own.
    """
    more = dict(more)
    apart = more.pop("apart", False)
    plans = []
    if "run_ahead" in more:  # results come as late as possible
        monkeypatch.setattr(Running, "finished", lambda self: False)
        settle = Running.settle
        monkeypatch.setattr(Running, "settle", lambda self, state: plans.append(self.plan.slack) or settle(self, state))
    with llm(pair, drafter, **more) as engine:
        if apart:
            engine.engine.executor.runner.merges = False
        got, outs = answers(engine)
        engine.check()
        stats = engine.stats()
    assert got == want
    assert stats["speculation"]["accepted"] > 20 and stats["speculation"]["failed"] is None
    assert "num_kvcache_blocks" not in more or stats["preemptions"] > 0
    assert sum(map(len, plans)) > 50 or "run_ahead" not in more
    assert stats["prefix_hits"] > 0, "a prompt that two requests share came from the cache"
    metrics = outs[0].metrics
    assert 0 <= metrics.accepted_tokens <= metrics.drafted_tokens and outs[-1].metrics.drafted_tokens == 0


def joint(model, prompt, p):
    """Return the probabilities f64 [V * V] of the first two tokens with temperature, top-k, top-p and presence
    penalty.
    """

    def dist(ids):
        x = model(torch.tensor([prompt + ids])).logits[0, -1].double()
        for t in set(ids):
            x[t] -= p["presence_penalty"]
        x = x / p["temperature"]
        x[x < x.topk(p["top_k"]).values[-1]] = -torch.inf
        probs, order = x.softmax(0).sort(descending=True)
        probs[probs.cumsum(0) - probs >= p["top_p"]] = 0
        return torch.zeros_like(x).scatter_(0, order, probs / probs.sum())

    with torch.no_grad():
        first = dist([])
        return torch.stack([f * (dist([i]) if f > 0 else first) for i, f in enumerate(first.tolist())]).flatten()


class Guess(NGram):
    """A drafter that proposes the same token at every place."""

    spec = Spec(f"{__name__}:Guess", (1, 0), "guesses", limits={"device": ANY}, options=OPTIONS)
    token = 0

    def propose(self, ask):
        count = torch.full_like(ask.rows.slots, ask.k)
        return torch.full((len(count), ask.k), Guess.token), count


@pytest.mark.parametrize("drafter", [f"{__name__}:Guess", "model"])
def test_pairs_of_tokens_come_with_the_models_probabilities(pair, drafter):
    """Draw 2,048 pairs of tokens, the second behind a draft.

    The chi-square test detects w = 0.24 (one probability of 0.2 that is off by 0.6 of it) with power 0.999.
    """
    p = {"temperature": 0.9, "top_k": 5, "top_p": 0.95, "presence_penalty": 0.5}
    prompt, n = [3, 4, 5, 6] * 3, 2048
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    probs = joint(model, prompt, p)
    Guess.token = int(probs.view(61, 61).sum(0).argmax())
    options = {"max_num_seqs": 128, "num_kvcache_blocks": 900, "max_num_batched_tokens": 1024}
    with llm(pair, drafter, allow_targets=[__name__], **options) as engine:
        params = [SamplingParams(**p, n=128, seed=s, max_tokens=3, ignore_eos=True) for s in range(n // 128)]
        outs = engine.generate([prompt] * len(params), params, use_tqdm=False)
        spec = engine.stats()["speculation"]
    tokens = torch.tensor([c.token_ids[0] * 61 + c.token_ids[1] for o in outs for c in o.outputs])
    chisquare.check_draws(tokens, probs, f"pairs with drafts of {drafter}")
    _, cells = chisquare.pooled(probs, n)
    assert chisquare.detectable(n, cells - 1) < 0.24
    share = spec["accepted"] / spec["proposed"]
    assert 0.02 < share < 0.98, "drafts are accepted and rejected"


class Fails(NGram):
    spec = Spec(f"{__name__}:Fails", (1, 0), "raises", limits={"device": ANY}, options=OPTIONS)

    def propose(self, ask):
        raise RuntimeError("no idea")


def test_a_drafter_that_raises_costs_its_drafts_and_nothing_else(pair, want, caplog):
    with llm(pair, f"{__name__}:Fails", allow_targets=[__name__]) as engine:
        assert answers(engine)[0] == want
        stats = engine.stats()["speculation"]
    assert stats["accepted"] == 0 and "no idea" in stats["failed"] and "no idea" in caplog.text


class Counts(LogitBias):
    """A processor that forbids the last accepted token, so its state depends on each token."""

    reads = frozenset({"logit_bias"})
    spec = Spec(f"{__name__}:Counts", (1, 0), "by commit", limits={"device": ANY})

    def columns(self):
        return {"last": Column(dtype="int64", fill=-1)}

    def bind(self, params, prompt_len):
        return Row() if params.logit_bias else None

    def apply(self, logits, rows, state):
        last = state["last"][rows.slots]
        logits.scatter_add_(1, last.clamp(min=0)[:, None], torch.where(last >= 0, -torch.inf, 0.0)[:, None])

    def commit(self, tokens, count, rows, state):
        at = (count - 1).clamp(min=0).long()
        new = tokens.gather(1, at[:, None])[:, 0]
        state["last"][rows.slots] = torch.where(count > 0, new, state["last"][rows.slots])


def test_rows_whose_processor_goes_token_by_token_do_not_speculate(pair):
    target = f"{__name__}:Counts"
    options = {"processors": ["penalties", target], "allow_targets": [__name__]}
    params = [SamplingParams(temperature=0, max_tokens=30, logit_bias={1: 1.0}), SamplingParams(temperature=0)]
    found = []
    for drafter in ("none", "model"):
        with llm(pair, drafter, **options) as engine:
            outs = engine.generate([PROMPTS[0]] * 2, params, use_tqdm=False)
            found.append([o.tokens for o in outs])
    assert found[0] == found[1]
    assert outs[0].metrics.drafted_tokens == 0 < outs[1].metrics.drafted_tokens


@pytest.fixture
def simulated_clock(monkeypatch):
    """Set the times of steps for speculation: 1 ms, and 3 ms with drafts, independent of this machine."""
    measure, seconds = Speculation.time, [0.0]

    def time(self, kind, drafts, taken, rows, now, fresh):
        seconds[0] += 3e-3 if drafts else 1e-3
        measure(self, kind, drafts, taken, rows, seconds[0], fresh)

    monkeypatch.setattr(Speculation, "time", time)


def test_where_guesses_are_wrong_the_engine_stops_guessing_and_says_so(pair, caplog, simulated_clock):
    """Tokens have no pattern, so short n-grams match only by chance, and a step with drafts costs more and gains
    nothing.

    The log and ``stats`` report that speculation is off.  The tokens equal the tokens of an engine without a drafter.
    """
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 60) for _ in range(30)] for _ in range(8)]
    params = [SamplingParams(temperature=2.0, seed=i, max_tokens=180, ignore_eos=True) for i in range(8)]
    ngram = {"name": "ngram", "options": {"prompt_lookup_min": 1}}
    options = dict(num_kvcache_blocks=500, speculate="auto", num_speculative_tokens=12, max_num_batched_tokens=256)
    found = []
    with caplog.at_level("INFO", "minivllm"):
        for drafter in ("none", ngram):
            with llm(pair, drafter, **options) as engine:
                found.append([o.tokens for o in engine.generate(prompts, params, use_tqdm=False)])
                stats = engine.stats()
    assert found[0] == found[1]
    spec = stats["speculation"]
    assert 0 < spec["steps"] < stats["steps"] / 2, (spec, stats["steps"])
    assert "speculation is off for batches of about 8 rows" in caplog.text
    assert 0 < spec["batch"]["5-8"]["gain"] < 1 and spec["accepted"] < 0.2 * spec["proposed"]


def test_a_draft_model_that_does_not_fit_is_refused_by_name(pair, tmp_path):
    other, _, _ = tiny_dir(tmp_path / "other", vocab_size=77)
    short, _, _ = tiny_dir(tmp_path / "short", max_position_embeddings=64)
    with pytest.raises(ConfigError, match=r"other has vocab_size=77; expected 61, the size of the served model"):
        llm((pair[0], other), "model")
    with pytest.raises(ConfigError, match=r"short has max_position_embeddings=64; expected at least max_model_len=256"):
        llm((pair[0], short), "model")


def test_stop_strings_end_a_text_inside_a_step_with_several_tokens():
    chat = [{"role": "user", "content": "Tell me a story about a fox."}]
    found = []
    for drafter in ("none", "model"):
        with LLM(
            "pocket",
            device="cpu",
            dtype="float32",
            drafter=drafter,
            speculate="always",
            max_num_seqs=2,
            num_kvcache_blocks=40,
            num_speculative_tokens=6,
        ) as engine:
            params = SamplingParams(temperature=0, max_tokens=60, stop=[" the ", "fox "], logprobs=1)
            (out,) = engine.chat(chat, params, use_tqdm=False)
            pieces = list(engine.chat_stream(chat, params))
            found.append((out.text, out.tokens, out.finish_reason, out.stop_reason, len(out.outputs[0].logprobs)))
            assert "".join(p.delta for p in pieces) == out.text and pieces[-1].output.tokens == out.tokens
    assert found[0] == found[1] and found[0][2] == "stop"
