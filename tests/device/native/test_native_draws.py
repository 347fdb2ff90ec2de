"""SAMPLE of a captured CPU step: it draws, accepts and writes what the default sampler and ``step.accept`` do."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from native_runs import ask, checkpoint, each_isa, engine, needs_library, prompt, watched

from minivllm.core.interfaces.plan import EOS, LENGTH, NAN, OVERSHOOT, STOP_ID, STOP_IDS, with_drafts
from minivllm.core.interfaces.sampling import Column, Draw, Row, SamplingContext
from minivllm.device.native.program import DRAW, LOGITS, Program, address
from minivllm.device.worker import sampling, step
from minivllm.device.worker.state import DeviceState, ProcessorState
from minivllm.errors import PluginError
from minivllm.plugins.sampler.default import DRAWN, GREEDY, DefaultSampler
from minivllm.registration.spec import ANY, Spec

pytestmark = needs_library
__all__ = ["each_isa"]
torch.set_num_threads(1)  # on tiny tensors threads only wait for each other

SLOTS, LONGEST = 24, 40
NUMBERS = ("known", "end", "min_end", "seed", "sample", "n_eos")


def columns(width: int, seed: int) -> tuple[DeviceState, DefaultSampler]:
    """Create slots in any state that drawing rows can have."""
    r = np.random.default_rng(seed)
    state = DeviceState(SLOTS, LONGEST, 1, 8, torch.device("cpu"))
    sampler = DefaultSampler(None, SamplingContext(width, LONGEST, ()))
    state.processors = [ProcessorState(sampler, SLOTS, state.device)]
    state.known.copy_(torch.from_numpy(r.integers(1, LONGEST - 1, SLOTS)))
    state.end.copy_(state.known + torch.from_numpy(r.integers(1, 3, SLOTS)))
    state.min_end.copy_(state.known + torch.from_numpy(r.integers(-2, 3, SLOTS)))
    state.seed.copy_(torch.from_numpy(r.integers(-(2**63), 2**63, SLOTS)))
    state.sample.copy_(torch.from_numpy(r.integers(0, 9, SLOTS)))
    state.n_eos.copy_(torch.from_numpy(r.integers(0, 3, SLOTS)))
    # ids behind the vocabulary too, which a shared tokenizer may have
    state.stop_ids[:, :5] = torch.from_numpy(r.integers(-1, max(width + 2, 8), (SLOTS, 5))).int()
    state.tokens.copy_(torch.from_numpy(r.integers(0, width, (SLOTS, LONGEST + 1))))
    state.stopped.copy_(torch.from_numpy(r.random(SLOTS) < 0.1))
    temperature = torch.from_numpy(r.choice([0.0, 1e-5, 0.3, 1.0, 7.0], SLOTS)).float()
    state.processors[0].columns["temperature"].copy_(temperature)
    return state, sampler


def native(
    state: DeviceState, logits: torch.Tensor, slots: np.ndarray, threads: int = 1, draft: np.ndarray | None = None
) -> np.ndarray:
    """Return i32 [3, N] of the rows of ``logits``; ``draft`` are their numbers of drafts, None means 0."""
    made = Program(
        threads,
        64,
        {
            "tokens": state.tokens,
            "longest": state.tokens.shape[1],
            "table": state.table,
            "slots": SLOTS,
            "blocks": state.table.shape[2],
            "block": 8,
            "stop_ids": state.stop_ids,
            "per_row": STOP_IDS,
            "rope_first": None,
            "stopped": state.stopped,
            "temperature": state.processors[0].columns["temperature"],
            **{name: getattr(state, name) for name in NUMBERS},
        },
    )
    x, out = logits.clone(), torch.zeros_like(logits)
    made.add("add", sampling=True, in_=made.register(x), out=made.register(out))
    n, known = len(slots), state.known[slots].numpy()
    draft = np.zeros(n, np.int64) if draft is None else draft
    box, packed = np.array([n, LOGITS | DRAW, *slots, *(known + draft), *draft], np.int64), np.empty((3, n), np.int32)
    made.sample(address(box), address(packed))
    made.close()
    return packed


def reference(
    state: DeviceState,
    sampler: DefaultSampler,
    logits: torch.Tensor,
    slots: np.ndarray,
    draft: np.ndarray | None = None,
) -> tuple[np.ndarray, torch.Tensor]:
    """Return the same by the sampler, and the scores that it compared."""
    logits, at = logits.clone(), torch.from_numpy(slots)
    position = state.known[at] + (0 if draft is None else torch.from_numpy(draft))
    rows = step.rows_of(state, at, position, LONGEST)
    sampling.suppress_stops(logits, rows.position, state.min_end[at], state.stop_ids[at])
    temperature = state.processors[0].columns["temperature"]
    rows.variant, out = GREEDY | DRAWN, Draw(torch.full((len(at),), -1))
    sampler.draw(logits, rows, {"temperature": temperature}, out)
    scores = sampler.drawn_from(logits, rows, {"temperature": temperature})
    noise = sampling.gumbel(rows.seed, rows.position, rows.sample, logits.shape[1])
    scores = torch.where(temperature[at][:, None] > 0, scores + noise, logits)
    bad = sampling.bad_rows(logits)
    tokens, count, flags = step.accept(state, rows, out.tokens, bad, logits.shape[1], draft=draft)
    return torch.stack([tokens.int(), count, flags]).numpy(), scores


def written(state: DeviceState) -> list[torch.Tensor]:
    return [state.tokens, state.known, state.stopped]


@pytest.mark.parametrize("width", [1, 7, 16, 61, 131, 1000])
def test_a_draw_is_that_of_the_default_sampler_and_so_is_what_is_accepted(each_isa, width):
    """Seeds, positions, samples, temperatures, stop ids before and behind ``min_tokens``, ends, rows that had ended."""
    torch.manual_seed(width)
    ties, flags = 0, 0
    for seed in range(40):
        state, sampler = columns(width, seed)
        slots = np.random.default_rng(seed).permutation(SLOTS)[: 1 + seed % SLOTS].astype(np.int64)
        logits = torch.randn(len(slots), width) * (1 + seed % 7)
        other = copy.deepcopy(state)
        got, (want, scores) = native(state, logits, slots), reference(other, sampler, logits, slots)
        same = torch.from_numpy(got[0] == want[0])
        if not same.all():  # noise is rounded in another place: only what is as good may be drawn
            best = scores.max(dim=1).values
            mine = scores.gather(1, torch.from_numpy(got[0]).long()[:, None])[:, 0]
            assert (best - mine).max() < 1e-4
            ties += int((~same).sum())
            continue
        assert np.array_equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(written(state), written(other), strict=True))
        flags |= int(np.bitwise_or.reduce(got[2]))
    assert ties <= 1
    met = EOS | STOP_ID | LENGTH | OVERSHOOT if width < 1000 else LENGTH | OVERSHOOT  # of so many few are stop ids
    assert flags & met == met, "the test has no power"


@pytest.mark.parametrize("width", [7, 61])
def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn(each_isa, width):
    """Two drafts in three are right; some sequences end before or behind a draft, or have ended."""
    accepted, flags = [], 0
    for seed in range(60):
        g, (state, sampler) = np.random.default_rng(seed), columns(width, seed)
        torch.manual_seed(seed)
        state.known.clamp_(max=LONGEST - 6)
        state.end.copy_(state.known + torch.randint(1, 7, state.end.shape))
        slots, _, draft = with_drafts(g.permutation(SLOTS)[:6], g.integers(0, 5, 6).astype(np.int32))
        slots, draft = slots.astype(np.int64), draft.astype(np.int64)
        logits = torch.randn(len(slots), width)
        logits[seed % len(slots), 0] = math.nan if seed % 5 == 0 else 0.0
        drawn = torch.from_numpy(native(copy.deepcopy(state), logits, slots, draft=draft)[0])
        right = torch.rand(len(slots)) < 0.67
        place = torch.from_numpy(slots)[right], (state.known[slots] + torch.from_numpy(draft))[right]
        state.tokens[place] = drawn[right]
        other = copy.deepcopy(state)
        got, (want, _) = native(state, logits, slots, draft=draft), reference(other, sampler, logits, slots, draft)
        if not np.array_equal(got[0], want[0]):  # a tie
            continue
        assert np.array_equal(got, want)
        assert all(torch.equal(a, b) for a, b in zip(written(state), written(other), strict=True))
        accepted += [int(got[1][i]) for i in np.flatnonzero(draft > 0)]
        flags |= int(np.bitwise_or.reduce(got[2]))
    met = EOS | STOP_ID | LENGTH | OVERSHOOT
    assert len(accepted) > 400 and 0.1 < np.mean(accepted) < 0.9 and flags & met == met, "the test has no power"


def test_thousands_of_draws_are_those_of_the_default_sampler(each_isa):
    torch.manual_seed(1)
    ties = 0
    for seed in range(150):
        state, sampler = columns(257, seed)
        state.min_end.zero_()
        slots, logits = np.arange(SLOTS), torch.randn(SLOTS, 257)
        want = reference(copy.deepcopy(state), sampler, logits, slots)[0][0]
        got = native(state, logits, slots)[0]
        ties += int((got != want).sum())
    assert ties <= 2, "of 3600"


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("width", [7, 16, 61, 131])
def test_rows_that_nothing_can_be_drawn_from_end_and_others_do_not(each_isa, width, threads):
    """NaN at any place, +inf, -inf throughout: wherever they stand, with and without a temperature."""
    state, sampler = columns(width, 3)
    slots = np.arange(SLOTS)
    logits = torch.randn(SLOTS, width, generator=torch.Generator().manual_seed(0))
    logits[0, 0] = logits[1, -1] = logits[2, width // 2] = math.nan
    logits[3, -1] = logits[4, 0] = math.inf
    logits[5] = -math.inf
    logits[6, :-1] = -math.inf  # one is left
    logits[7, -1], logits[7, 0] = math.nan, math.inf
    logits[8] = 1e38  # large, and all the same
    other = copy.deepcopy(state)
    got, (want, _) = native(state, logits, slots, threads), reference(other, sampler, logits, slots)
    assert np.array_equal(got[1:], want[1:])
    good = ~sampling.bad_rows(logits).numpy()
    assert np.array_equal(got[0][good], want[0][good])
    assert ((got[0] >= 0) & (got[0] < width)).all()
    live = ~other.stopped.numpy()
    assert all(torch.equal(a, b) for a, b in zip(written(state), written(other), strict=True))
    assert (want[2][[0, 1, 2, 3, 4, 5, 7]] & (NAN | OVERSHOOT)).all() and live.any()


def test_of_equal_logits_the_first_is_taken(each_isa):
    for width in (5, 16, 33, 131):
        state, _ = columns(width, 0)
        state.processors[0].columns["temperature"].zero_()
        state.min_end.zero_()
        logits = torch.zeros(SLOTS, width)
        for row in range(SLOTS):
            logits[row, row % width] = logits[row, (3 * row + 1) % width] = 2.0
        assert native(state, logits, np.arange(SLOTS))[0].tolist() == logits.argmax(dim=1).tolist()


# ---- in engines ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM", vocab_size=131)


PROMPTS = [prompt(5), prompt(9, 1), prompt(3, 2), prompt(12, 3)]
PLAIN = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "seed": 5},
    "min_tokens and stop ids": {
        "temperature": 0.9,
        "seed": 3,
        "min_tokens": 9,
        "stop_token_ids": list(range(0, 72, 3)),
    },
    "samples": {"temperature": 1.0, "seed": 2, "n": 3},
    "end of sequence": {"temperature": 1.5, "seed": 4, "ignore_eos": False},
}
REQUESTED = {
    "top-p": {"temperature": 0.9, "seed": 3, "top_p": 0.7},
    "top-k": {"temperature": 0.9, "seed": 3, "top_k": 5},
    "min-p": {"temperature": 0.9, "seed": 3, "min_p": 0.05},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "a bias": {"logit_bias": {7: 3.0}},
    "log-probabilities": {"logprobs": 2},
    "a function of the host": {"allowed_tokens_fn": lambda ids: range(40, 90)},
}


@pytest.mark.parametrize("params", PLAIN.values(), ids=PLAIN)
def test_plain_rows_are_drawn_natively_and_get_the_tokens_of_separate_operations(folder, params):
    with watched(compare=False) as seen, engine(folder) as llm:
        got = ask(llm, PROMPTS, **params)
    assert seen.draws and seen.draws == seen.steps
    with engine(folder, graph="off") as llm:
        assert ask(llm, PROMPTS, **params) == got


@pytest.mark.parametrize("params", REQUESTED.values(), ids=REQUESTED)
def test_rows_that_ask_for_more_are_drawn_by_torch_behind_native_layers(folder, params):
    with watched(compare=False) as seen, engine(folder) as llm:
        got = ask(llm, PROMPTS, **params)
    assert seen.steps and not seen.draws
    with engine(folder, graph="off") as llm:
        assert ask(llm, PROMPTS, **params) == got


def test_a_row_that_asks_for_more_does_not_change_those_beside_it(folder):
    with watched(compare=False) as seen, engine(folder) as llm:
        alone = ask(llm, PROMPTS[:3], max_tokens=12)
        assert seen.draws
        from minivllm import SamplingParams

        params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 3
        params.append(SamplingParams(temperature=0.8, top_p=0.5, seed=1, max_tokens=6, ignore_eos=True))
        outs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in outs[:3]] == [tokens[0] for tokens in alone]


class Last(DefaultSampler):
    """Draws the last token of the vocabulary, whatever is likely."""

    spec = Spec(f"{__name__}:Last", (1, 4), "the last token", limits={"device": ANY})

    def bind(self, params, prompt_len):
        return Row(super().bind(params, prompt_len).values)  # no variant bits

    def draw(self, logits, rows, state, out):
        out.tokens.fill_(logits.shape[1] - 1)


class LastByBit(Last):
    """The same by a bit that ``native`` does not name, or by none."""

    spec = Spec(f"{__name__}:LastByBit", (1, 4), "the last token", limits={"device": ANY})
    native = 3

    def bind(self, params, prompt_len):
        return Row(super().bind(params, prompt_len).values, 4 if prompt_len % 2 else 0)


class Counts(DefaultSampler):
    """Hears of each token."""

    spec = Spec(f"{__name__}:Counts", (1, 4), "counts", limits={"device": ANY})
    native = 3
    heard = 0

    def commit(self, tokens, count, rows, state):
        Counts.heard += int(count.sum())


class Cold(DefaultSampler):
    """Says that it may be replaced, and keeps its temperatures where nobody looks."""

    spec = Spec(f"{__name__}:Cold", (1, 4), "no temperature", limits={"device": ANY})
    native = 3

    def columns(self):
        return {"heat": Column()}


@pytest.mark.parametrize("sampler", ["Last", "LastByBit"])
def test_another_sampler_is_not_replaced_unless_it_says_so_of_the_rows(folder, sampler):
    with (
        watched(compare=False) as seen,
        engine(folder, sampler=f"{__name__}:{sampler}", allow_targets=[__name__]) as llm,
    ):
        assert ask(llm, PROMPTS, max_tokens=4) == [[[130] * 4]] * 4
    assert seen.steps and not seen.draws


def test_a_sampler_that_hears_of_tokens_hears_of_all(folder):
    Counts.heard = 0
    with engine(folder, sampler=f"{__name__}:Counts", allow_targets=[__name__]) as llm:
        ask(llm, PROMPTS, max_tokens=5)
    assert Counts.heard == 20


def test_a_sampler_that_may_be_replaced_has_a_column_of_temperatures(folder):
    with pytest.raises(PluginError, match="expected a column `temperature`"):
        engine(folder, sampler=f"{__name__}:Cold", allow_targets=[__name__])
