"""Captured steps with drafts on a CPU against the same steps as separate launches; run by device/worker/test_graphs.py.

``captured_steps`` explains the recordings.  Drafts of heads are compared with a reference of the head.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from captured_steps import columns, compare, engine, requested
from cpu_captures import cpu_captures
from greedy import prompts
from prediction_heads import Eagle3Reference, MTPReference, watch_drafts
from transformers import AutoModelForCausalLM

from minivllm import SamplingParams
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.plan import StepPlan, merged, rows_with_drafts, with_drafts
from minivllm.device.kernels import drafts
from minivllm.device.kernels.peaks import best_of_tiles
from minivllm.device.worker import captured, sampling, step
from minivllm.device.worker.captured_proposals import CapturedPasses, CapturedProposals
from minivllm.device.worker.drafted_steps import DraftedCalls, DraftedSteps, draft_table
from minivllm.device.worker.head_model import HeadModel
from minivllm.device.worker.recurrent import StateMemory
from minivllm.device.worker.running import Running
from minivllm.device.worker.target_states import TargetStates
from minivllm.testing import chisquare
from minivllm.testing.tiny import quiet, tiny_dir

torch.set_num_threads(1)
# few captures, because interpreted kernels are slow
ALWAYS = {"captured_drafts": True, "speculate": "always", "num_speculative_tokens": 2, "run_ahead": 1}
ALWAYS |= {"graph": "decode", "max_num_seqs": 2}
GREEDY = requested(*[{"temperature": 0}] * 3, max_tokens=9, ignore_eos=True)


@pytest.fixture(autouse=True, params=[False, True], ids=["soon", "late"])
def ahead(request, monkeypatch):
    """Return results as soon as they are there, or as late as possible, so that rows with drafts run ahead of them.

    The fixture lists the captured proposals for rows whose lengths the host has not learned; it is None for results
    that are not late."""
    if not request.param:
        return None
    made, propose = [], CapturedProposals.propose

    def noted(self, slots, known, k, slack):
        found = propose(self, slots, known, k, slack)
        if found is not None and slack.any():
            made.append(slack)
        return found

    monkeypatch.setattr(Running, "finished", lambda self: False)
    monkeypatch.setattr(CapturedProposals, "propose", noted)
    return made


class Headed:
    """A tiny model with a head for next-token prediction, or with an EAGLE-3 head, and the reference of the head."""

    def __init__(self, folder, family, eagle=False):
        more = {"num_hidden_layers": 4} if eagle else {}
        self.folder, _, model = tiny_dir(folder / "model", family, **more)
        if eagle:
            self.head = Eagle3Reference(model, (1, 2, 3))
            self.drafter = {"name": "eagle3", "options": {"model": str(self.head.write(folder / "head"))}}
        else:
            self.head, self.drafter = MTPReference(model), "mtp"
            self.head.write(self.folder)
        self.found = {}

    def answers(self, params):
        """Return the prompts of ``play`` and the tokens of the answers to them, without drafts."""
        key = len(params)
        if key not in self.found:
            items = prompts(61, [1 + 13 * i % 50 for i in range(len(params))])
            with engine(self.folder, graph="off") as llm:
                outs = llm.generate(items, params, use_tqdm=False)
            self.found[key] = items, [[c.token_ids for c in out.outputs] for out in outs]
        return self.found[key]

    def wrong(self, seen):
        """Return the drafts that differ from the drafts of the reference."""
        known = {}
        for row, guesses in seen:
            key = (*row, -1, len(guesses))
            if key not in known:
                known[key] = self.head.drafts(row, len(guesses))
            if guesses != known[key]:
                yield row, guesses, known[key]


@pytest.fixture(scope="module")
def headed(tmp_path_factory):
    made = {}

    def of(family, eagle=False):
        if (family, eagle) not in made:
            made[family, eagle] = Headed(tmp_path_factory.mktemp(family), family, eagle)
        return made[family, eagle]

    return of


@pytest.mark.parametrize(("eagle", "options"), [(False, {"graph": "auto", "max_num_seqs": 5}), (True, {})])
def test_captured_proposals_of_a_head_are_those_of_its_reference(headed, eagle, options, monkeypatch, ahead):
    case = headed("qwen3", eagle)
    seen = watch_drafts(monkeypatch, *case.answers(GREEDY))
    graphs = compare(case.folder, GREEDY, drafter=case.drafter, **{**ALWAYS, **options})
    assert_all_captured(graphs)
    assert len(seen) > 20 and not list(case.wrong(seen))
    assert ahead is None or len(ahead) > 3


def assert_all_captured(graphs):
    drafted, proposals = graphs.runner.drafted, graphs.runner.drafting.captured
    assert drafted.forwards and drafted.samples and not drafted.refused and proposals.made
    assert None not in drafted.samples.values() and None not in proposals.made.values()


# ---- faults in the captured path -------------------------------------------------------------------------------------


def states_of_the_token_before(monkeypatch):
    at = TargetStates.at
    monkeypatch.setattr(TargetStates, "at", lambda self, state, slots, position: at(self, state, slots, position - 1))


def first_pass_of_one_pair(monkeypatch):
    """Compute one pair in the first pass, so that the keys and values of accepted drafts are those of the head's own
    states.
    """
    init, most = CapturedPasses.__init__, HeadModel.most_pending

    def narrow(self, *args):
        monkeypatch.setattr(HeadModel, "most_pending", lambda own, k: 1)
        init(self, *args)
        monkeypatch.setattr(HeadModel, "most_pending", most)

    monkeypatch.setattr(CapturedPasses, "__init__", narrow)


@pytest.mark.parametrize("fault", [states_of_the_token_before, first_pass_of_one_pair])
def test_a_fault_in_captured_passes_changes_drafts_and_no_token(headed, fault, monkeypatch):
    case = headed("qwen3")
    seen = watch_drafts(monkeypatch, *case.answers(GREEDY))
    fault(monkeypatch)
    compare(case.folder, GREEDY, drafter=case.drafter, **ALWAYS)
    assert list(case.wrong(seen))


def rejected_drafts_are_accepted(monkeypatch):
    accept = DraftedCalls.accept

    def lenient(self, logits, rows, drawn, peaks):
        guess = self.state.tokens[rows.slots, rows.position].long()
        drawn.tokens.copy_(torch.where(self.b.draft < self.b.draft.roll(-1), guess, drawn.tokens))
        return accept(self, logits, rows, drawn, peaks)

    monkeypatch.setattr(DraftedCalls, "accept", lenient)


def test_rejected_drafts_that_are_accepted_change_tokens(noisy, monkeypatch):
    model, draft = noisy
    rejected_drafts_are_accepted(monkeypatch)
    with pytest.raises(AssertionError):
        compare(model, GREEDY, drafter=draft, **ALWAYS)


# ---- draws -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Return the folder of a tiny model, and a drafter whose model is the same with some noise."""
    folder, _, model = tiny_dir(tmp_path_factory.mktemp("model"), "qwen3")
    with torch.no_grad():
        torch.manual_seed(1)
        for p in model.parameters():
            p += 0.08 * torch.randn_like(p)
    draft = tmp_path_factory.mktemp("draft")
    with quiet():
        model.save_pretrained(draft)
    return folder, {"name": "model", "options": {"model": str(draft)}}


SETTINGS = (
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.7},
    {"n": 2, "logprobs": 0, "temperature": 0.9, "top_p": 0.9},
    {"logprobs": 3, "temperature": 0},
    {"min_tokens": 6, "ignore_eos": False, "stop_token_ids": list(range(3, 26)), "top_k": 20},
    {"logit_bias": {5: 3.0}, "presence_penalty": 0.5, "temperature": 0},
)
NGRAM = {"name": "ngram", "options": {"prompt_lookup_min": 1}}


@pytest.mark.parametrize(("drafter", "processors"), [(NGRAM, ["penalties"]), ("model", ["penalties", "logit_bias"])])
def test_captured_steps_with_drafts_draw_what_separate_launches_draw(noisy, drafter, processors, ahead):
    model, draft = noisy
    params = [p for p in requested(*SETTINGS, max_tokens=9) if p.logit_bias is None or "logit_bias" in processors]
    graphs = compare(model, params, drafter=draft if drafter == "model" else drafter, processors=processors, **ALWAYS)
    assert_all_captured(graphs)
    kinds = [kind for _, kind in graphs.runner.drafted.samples]
    assert any(kind.wants_min for kind in kinds) and {kind.topk for kind in kinds} >= {-1, 3}
    assert ahead is None or len(ahead) > 3


def pairs_of(model, prompt, top):
    """Return the probabilities f64 [V * V] of the second and third token, each drawn among the ``top`` likeliest."""

    def dist(ids):
        x = model(torch.tensor([prompt + ids])).logits[0, -1].double()
        x[x < x.topk(top).values[-1]] = -torch.inf
        return x.softmax(0)

    with torch.no_grad():
        first = dist([])
        found = torch.zeros(len(first), len(first), dtype=torch.float64)
        for a in first.nonzero()[:, 0].tolist():
            second = dist([a])
            for b in second.nonzero()[:, 0].tolist():
                found[b] += first[a] * second[b] * dist([a, b])
    return found.flatten()


def drawn_pairs(folder, drafter, prompt, n, top):
    """Return the pairs i64 [N] of the second and third token of ``n`` answers, and the counters of speculation."""
    options = {**ALWAYS, "num_speculative_tokens": 1, "graph": "decode", "max_num_seqs": 32, "num_kvcache_blocks": 300}
    with cpu_captures(), engine(folder, drafter=drafter, **options) as llm:
        params = [SamplingParams(n=32, top_k=top, seed=s, max_tokens=3, ignore_eos=True) for s in range(n // 32)]
        outs = llm.generate([prompt] * len(params), params, use_tqdm=False)
        assert not any(out.error for out in outs)
        assert_all_captured(SimpleNamespace(runner=llm.engine.executor.runner))
        counters = llm.stats()["speculation"]
    found = [c.token_ids for out in outs for c in out.outputs]
    return torch.tensor([ids[1] * 61 + ids[2] for ids in found]), counters


def test_captured_draws_behind_drafts_have_the_models_probabilities(noisy):
    """The second and third token of an answer come from one step, if the draft of the second is accepted."""
    (folder, draft), prompt, n, top = noisy, [3, 4, 5, 6] * 3, 256, 3
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    probs = pairs_of(model, prompt, top)
    tokens, counters = drawn_pairs(folder, draft, prompt, n, top)
    chisquare.check_draws(tokens, probs, "pairs behind captured drafts")
    assert 0.02 < counters["accepted"] / counters["proposed"] < 0.98


# ---- the kernels against their definitions ---------------------------------------------------------------------------


def drafted_rows(seed):
    """Return (columns, slots and ``StepPlan.draft`` of the rows of four sequences with up to 3 drafts)."""
    state, g = columns(slots=9, seed=seed), np.random.default_rng(seed)
    state.known.clamp_(max=30)
    state.end.copy_(state.known + torch.randint(0, 6, state.end.shape))
    state.min_end.copy_(state.known + torch.randint(-2, 2, state.end.shape))
    slots, _, draft = with_drafts(np.array([6, 0, 3, 7]), g.integers(0, 4, 4).astype(np.int32))
    return state, slots, draft


@pytest.mark.parametrize("seed", range(20))
def test_the_kernel_accepts_drafts_as_the_definition_does(seed):
    (state, slots, draft), (other, _, _) = drafted_rows(seed), drafted_rows(seed)
    n, size, width, g = len(slots), 16, 12, torch.Generator().manual_seed(seed)
    position = state.known[torch.from_numpy(slots)] + torch.from_numpy(draft)
    drawn = torch.randint(-1 if seed % 3 == 0 else 0, width, (n,), generator=g)
    for columns_ in (state, other):  # two drafts in three are right
        right = torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.67
        at = torch.from_numpy(slots)[right], position[right]
        columns_.tokens[at] = drawn[right].int()
    logits = torch.randn(n, width, generator=g)
    if seed % 4 == 0:
        logits[seed % n, 0] = (torch.nan, torch.inf)[seed % 2]
    rows = step.rows_of(state, torch.from_numpy(slots), position, 40)
    want = step.accept(state, rows, drawn, sampling.bad_rows(logits), width, draft=draft)
    table = torch.from_numpy(draft_table(slots, draft, size, 8))
    other.stopped[8], other.known[8] = True, 0  # the spare slot
    given, best = torch.zeros(size, dtype=torch.int64), torch.zeros(size, 1)
    given[:n], best[:n] = drawn, best_of_tiles(logits)
    # results of an earlier step, which must be overwritten
    out, total = torch.full((3, size), 5, dtype=torch.int32), torch.full((size,), 5, dtype=torch.int32)
    drafts.commit(table[:size], table[size : 2 * size], given, best, other, out, total, width, 3)
    assert torch.equal(given[:n], want[0]) and all(map(torch.equal, out[:, :n], (want[0].int(), *want[1:])))
    heads, _, count = step.by_slot(state, draft, want[0], want[1])
    assert total[heads].tolist() == count.tolist() and total.sum() == count.sum()
    kept = slice(0, 8)  # all slots except the spare one
    for name in ("tokens", "known", "stopped"):
        assert torch.equal(getattr(other, name)[kept], getattr(state, name)[kept]), name


def test_counts_of_an_earlier_step_are_noticed(monkeypatch):
    commit = drafts.commit

    def stale(slots, draft, drawn, best, state, out, total, *more):
        before = out[1].clone(), total.clone()
        commit(slots, draft, drawn, best, state, out, total, *more)
        out[1], total[:] = before

    monkeypatch.setattr(drafts, "commit", stale)
    with pytest.raises(AssertionError):
        test_the_kernel_accepts_drafts_as_the_definition_does(1)


@pytest.mark.parametrize("seed", range(5))
def test_rows_with_drafts_are_read_alike_from_the_columns_and_from_a_table(seed):
    state, slots, draft = drafted_rows(seed)
    computed = state.known.numpy()[slots] - 1 + draft
    n = len(slots)
    plan = StepPlan(0, slots, np.ones(n, np.int32), computed, np.arange(n), draft=draft)
    want, _ = step.read_rows(
        state, state.to(step.pack_rows(plan, n, n, 8)), step.host_lengths(plan, state.dropped_host)
    )
    static = captured.column_tensors(state, torch.from_numpy(slots), captured.bounds(GraphKey("decode", n, n, 64), 2))
    meta = static.meta
    shift = torch.from_numpy(draft).long()
    drafts.begin_at(meta.slots, shift, state, static.ids, static.position, meta.kv_len, meta.slot_map)
    assert torch.equal(static.ids, want.ids) and torch.equal(static.position, want.position)
    assert torch.equal(meta.kv_len, want.meta.kv_len) and torch.equal(meta.slot_map, want.meta.slot_map)


@pytest.mark.parametrize("seed", range(10))
def test_recurrent_layers_read_a_row_and_its_drafts_as_one_row(seed):
    state, slots, draft = drafted_rows(seed)
    most, size, n = 3, 16, len(np.unique(slots))
    state.recurrent = StateMemory((), 9, 0, most, torch.float32, torch.device("cpu"))
    state.recurrent.valid[:8] = (state.known[:8] - torch.randint(2, 4, (8,))).int()
    state.stopped[8], state.known[8] = True, 0  # the spare slot
    computed = state.known.numpy()[slots] - 1 + draft
    plan = StepPlan(0, slots, np.ones(len(slots), np.int32), computed, np.arange(len(slots)), draft=draft)
    whole = merged(plan)
    cu_q = torch.from_numpy(np.append(0, whole.q_len.cumsum())).int()
    start, many = torch.from_numpy(whole.computed).int(), torch.from_numpy(rows_with_drafts(plan))
    want = state.recurrent.of_step(torch.from_numpy(whole.slots).long(), start, cu_q, state.stopped, many)
    speculation, device = SimpleNamespace(num_speculative_tokens=most), torch.device("cpu")
    wiring = SimpleNamespace(max_num_seqs=8, speculation=speculation, dtype="float32")
    runner = SimpleNamespace(wiring=wiring, state=state, device=device, worker=SimpleNamespace(hidden_size=4))
    steps = DraftedSteps(runner)
    b = steps._buffers(size)
    steps._fill(b, slots, draft)
    got = steps._states(b)
    for name in ("rows", "start", "behind", "drafts", "save_at", "save_to"):
        assert torch.equal(getattr(got, name)[:n], getattr(want, name)), name
    assert torch.equal(got.cu_q[: n + 1], want.cu_q) and (got.rows[n:] == 8).all() and not got.drafts[n:].any()
    assert torch.equal(got.row[: len(slots)], torch.repeat_interleave(torch.arange(n), cu_q.diff()))
    assert got.longest == 1 + most and (got.cu_q.diff() <= got.longest).all()
    before = state.recurrent.valid.clone()
    want.advance()
    covered = state.recurrent.valid[:8].clone()
    state.recurrent.valid.copy_(before)
    got.advance()
    assert torch.equal(state.recurrent.valid[:8], covered) and not torch.equal(covered, before[:8])


def test_rows_before_the_first_token_have_no_keys_and_write_to_the_null_block():
    state = columns(seed=1)
    slots, shift = torch.tensor([2, 2, 4]), torch.tensor([-1, 0, -50])
    state.known[2], state.stopped[2] = 1, False
    made = torch.zeros(3).long(), torch.zeros(3).long(), torch.zeros(2, 3).int(), torch.zeros(2, 3).long()
    drafts.begin_at(slots, shift, state, *made)
    assert made[2].tolist() == [[0, 1, 0]] * 2 and not made[3][:, [0, 2]].any() and made[3][:, 1].all()


def test_sequences_of_a_table_begin_at_their_newest_tokens():
    table = draft_table(np.array([4, 4, 4, 1, 5, 5]), np.array([0, 1, 2, 0, 0, 1]), 8, 9)
    slots, draft, heads, many, row, begins = np.split(table, [8, 16, 24, 32, 40])
    assert slots.tolist() == [4, 4, 4, 1, 5, 5, 9, 9] and draft.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert heads.tolist() == [4, 1, 5, 9, 9, 9, 9, 9] and many.tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert row.tolist() == [0, 0, 0, 1, 2, 2, 3, 4] and begins.tolist() == [0, 3, 4, 6, 7, 8, 8, 8, 8]


def test_proposed_tokens_are_written_behind_the_known_ones_up_to_the_first_that_is_no_token():
    state = columns(seed=2)
    state.stopped[:] = False
    state.stopped[5] = True
    before, slots = state.tokens.clone(), torch.tensor([1, 3, 5])
    proposed, given = torch.tensor([[4, 5, 6], [7, 50, 8], [1, 2, 3]]), torch.zeros(3, dtype=torch.int32)
    drafts.put(slots, proposed, state, 50, 0, torch.tensor([2, 3, 3]), given)
    first, second = state.known[1], state.known[3]
    assert given.tolist() == [2, 1, 3] and state.tokens[1, first : first + 3].tolist() == [4, 5, 6]
    assert state.tokens[3, second : second + 3].tolist() == [7, 0, 8] and torch.equal(state.tokens[5], before[5])
