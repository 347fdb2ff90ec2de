"""Attention sums of the prompt for compressors, compared with the probabilities of transformers in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.core.engine.planner import Planner
from minivllm.device.worker import attention_sums
from minivllm.device.worker.attention_sums import AttentionSums
from minivllm.plugin import Compressor, CompressorContext, StoredTokens, Tap
from minivllm.plugins.compressor.attention_weights import H2O
from minivllm.plugins.compressor.options import H2OOptions
from minivllm.testing.tiny import tiny_dir

WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
FAMILIES = {"llama": {}, "qwen3": {}, "gemma3": WINDOWED, "mixtral": {}, "gpt_oss": {}}
PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8, 11, 22, 34, 45, 31, 10, 4, 18, 15]
OTHER = [59, *PROMPT[::-1], 3]
KEPT = [Tap("compression.kept", read=True)]


class Spy(Compressor):
    """Keep the tokens with the largest sums, and record the stored tokens of all calls."""

    attention_sums = True
    seen: list[StoredTokens] = []

    def score(self, stored):
        type(self).seen.append(stored)
        return stored.attention_sums


def engine(path, compressor=Spy, **options):
    defaults = dict(skip_tokenizer_init=True, dtype="float32", max_num_seqs=8, max_model_len=128, kvcache_block_size=4)
    return LLM(str(path), compressor=compressor, **{**defaults, **options})


def params(**values):
    return SamplingParams(**{**dict(temperature=0, max_tokens=9, ignore_eos=True, seed=7, kv_budget=0.5), **values})


def reference(hf, prompt):
    """Return the sums f64 [kv_heads, n] of each layer of a model of transformers."""
    hf = hf.double()
    hf.set_attn_implementation("eager")
    hf.set_experts_implementation("eager")  # the other ones compute no float64
    with torch.inference_mode():
        attentions = hf(torch.tensor([prompt]), output_attentions=True).attentions
    config = hf.config.get_text_config()
    group = config.num_attention_heads // config.num_key_value_heads
    return [a[0].sum(1).view(-1, group, len(prompt)).sum(1) for a in attentions]


def compare(seen, sums, n):
    """Compare recorded sums of a prompt of n tokens with ``reference``."""
    mine = [stored for stored in seen if stored.computed == n]
    assert mine, "nothing was compressed at the end of the prompt"
    for stored in mine:
        assert stored.attention_sums.dtype == torch.float32
        error = (stored.attention_sums.double() - sums[stored.layer]).abs().max()
        assert error < 2e-5, f"sums of layer {stored.layer} differ by {error}"
        assert stored.sum_queries.tolist() == [list(range(n, 0, -1))] * len(stored.sum_queries)


@pytest.fixture
def seen(monkeypatch):
    found = []
    monkeypatch.setattr(Spy, "seen", found)
    return found


# a prompt that fits a step, chunks, invariant attention, and steps of separate operations
OPTIONS = [{}, {"max_num_batched_tokens": 9}, {"batch_invariant": True, "max_num_batched_tokens": 13}, {"graph": "off"}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sums_are_those_of_transformers_in_float64(family, options, tmp_path, seen):
    path, _, hf = tiny_dir(tmp_path, family, **FAMILIES[family])
    with engine(path, **options) as llm:
        llm.generate([PROMPT, OTHER], params(), use_tqdm=False)
    for prompt in (PROMPT, OTHER):
        compare(seen, reference(hf, prompt), len(prompt))


def at_prompts(tmp_path, seen, **options):
    """Serve both prompts twice in an engine of few slots, and compare all sums."""
    path, _, hf = tiny_dir(tmp_path)
    sums = {len(prompt): reference(hf, prompt) for prompt in (PROMPT, OTHER)}
    with engine(path, max_num_seqs=2, max_num_batched_tokens=11, **options) as llm:
        for _ in range(2):
            llm.generate([PROMPT, OTHER, PROMPT], params(), use_tqdm=False)
            llm.generate([PROMPT], params(n=2), use_tqdm=False)
    for n, expected in sums.items():
        compare(seen, expected, n)


def test_sums_of_reused_slots_and_of_branches_are_those_of_their_prompts(tmp_path, seen):
    at_prompts(tmp_path, seen)


def heads_exchanged(real, self, slot, layers, stored):
    """Let ``of`` return the sums of another head."""
    sums, queries = real(self, slot, layers, stored)
    return sums.flip(0), queries


def layers_exchanged(real, self, slot, layers, stored):
    """Let ``of`` return the sums of the first layers."""
    return real(self, slot, self.layers[layers[0].group][: len(layers)], stored)


def kept_at_reset(real, self, delta):
    """Let ``note`` keep the sums of rows that left."""
    before = dict(self._of_slot)
    real(self, delta)
    for slot, rows in before.items():
        self._of_slot.setdefault(slot, rows)


def lost_by_forks(real, self, delta):
    """Let ``note`` forget the sums of rows that fork."""
    real(self, delta)
    for _, slot, _ in delta.fork.tolist():
        self._of_slot.pop(slot, None)


def shared_by_forks(real, self, row, group, stored):
    """Let ``_grown`` return the sums of the parent, which all its branches change."""
    if row is not None and row.sums.shape[-1] == stored:
        return row
    grown = real(self, row, group, stored)
    if row is not None and len(self._rows) > 1:
        self._last = grown = getattr(self, "_last", grown) if getattr(self, "_from", None) is row else grown
        self._from = row
    return grown


def last_chunk_only(real, self, row, group, stored):
    """Let ``_grown`` forget the sums of earlier chunks."""
    return real(self, None, group, stored)


FAULTS = {
    "of": (heads_exchanged, layers_exchanged),
    "note": (kept_at_reset, lost_by_forks),
    "_grown": (shared_by_forks, last_chunk_only),
}


@pytest.mark.parametrize(("method", "fault"), [(m, fault) for m, faults in FAULTS.items() for fault in faults])
def test_a_planted_fault_of_the_sums_is_caught(method, fault, tmp_path, seen, monkeypatch):
    real = getattr(AttentionSums, method)
    monkeypatch.setattr(AttentionSums, method, lambda self, *args: fault(real, self, *args))
    with pytest.raises((AssertionError, TypeError, RuntimeError)):
        at_prompts(tmp_path, seen)


@pytest.mark.parametrize("planted", [False, True])
def test_kept_tokens_carry_their_sums_to_later_compressions(planted, tmp_path, seen, monkeypatch):
    if planted:
        monkeypatch.setattr(AttentionSums, "keep", lambda *args: None)
    path, _, hf = tiny_dir(tmp_path)
    with engine(path, compress_every=3) as llm:
        (out,) = llm.generate([PROMPT], params(max_tokens=12), use_tqdm=False, taps=KEPT)
    sums, kept = reference(hf, PROMPT), out.taps["compression.kept"]
    by_event = {stored.computed: [] for stored in seen}
    for stored in seen:
        by_event[stored.computed].append(stored)
    assert len(kept) == len(by_event) == 4
    wrong = 0
    for before, later in zip(kept, list(by_event)[1:], strict=False):
        for stored in by_event[later]:
            for head, positions in enumerate(before.positions[stored.layer]):
                at = torch.from_numpy(positions)
                old, more = at[at < len(PROMPT)], later - before.computed + int((at >= len(PROMPT)).sum())
                expected = torch.cat((sums[stored.layer][head][old], torch.zeros(more)))
                wrong += not torch.allclose(stored.attention_sums[head].double(), expected, atol=2e-5)
                counts = [len(PROMPT) - position for position in old.tolist()] + [0] * more
                wrong += stored.sum_queries[head].tolist() != counts
    assert (wrong > 0) == planted


def test_a_budget_that_is_reached_after_the_prompt_reads_the_sums_of_the_prompt(tmp_path, seen):
    path, _, hf = tiny_dir(tmp_path)
    n = len(PROMPT)
    with engine(path, compress_every=4, max_num_batched_tokens=9) as llm:
        llm.generate([PROMPT], params(kv_budget=n + 2), use_tqdm=False)
    first = min(stored.computed for stored in seen)
    assert first == n + 4
    for stored in seen:
        if stored.computed == first:
            expected = torch.cat((reference(hf, PROMPT)[stored.layer], torch.zeros(2, 4)), dim=1)
            assert (stored.attention_sums - expected).abs().max() < 2e-5
            assert stored.sum_queries.tolist() == [[*range(n, 0, -1), 0, 0, 0, 0]] * 2


@pytest.mark.parametrize("pressure", [0, 0.5])
def test_preempted_rows_add_up_their_prompt_once(pressure, tmp_path, seen, monkeypatch):
    real = Planner.next

    def plan(planner, now):
        rows = planner.slots.running
        if len(rows) and planner.step_id % 5 == 0 and planner.slots.preempted[rows[0]] < 3:
            planner.preempt(int(rows[0]))
        return real(planner, now)

    monkeypatch.setattr(Planner, "next", plan)
    path, _, hf = tiny_dir(tmp_path)
    sums, n = reference(hf, PROMPT), len(PROMPT)
    budget = {"kv_budget": None} if pressure else {"kv_budget": n + 3}
    options = {"pressure_budget": pressure, "num_kvcache_blocks": 25} if pressure else {"compress_every": 5}
    plain = params(max_tokens=30, kv_budget=0)
    with engine(path, max_num_batched_tokens=13, **options) as llm:
        llm.generate([PROMPT, PROMPT[::-1]], [params(max_tokens=30, **budget), plain], use_tqdm=False)
        assert llm.stats()["preemptions"] >= 2
    firsts = [stored for stored in seen if len(stored.keys) == stored.computed]
    assert firsts
    for stored in firsts:
        assert (stored.attention_sums[:, :n] - sums[stored.layer]).abs().max() < 2e-5
        assert not stored.attention_sums[:, n:].any()


def test_requests_that_are_not_compressed_add_up_nothing_and_have_prefix_hits(tmp_path, seen, monkeypatch):
    calls = []
    real = AttentionSums.of_step
    monkeypatch.setattr(AttentionSums, "of_step", lambda self, plan: calls.append(plan.id) or real(self, plan))
    path, *_ = tiny_dir(tmp_path)
    with engine(path) as llm:
        for _ in range(2):
            llm.generate([PROMPT], params(kv_budget=0), use_tqdm=False)
        assert not calls and llm.stats()["prefix_hits"] > 0
        llm.generate([PROMPT], params(max_tokens=20), use_tqdm=False)
        assert len(calls) == 1, "decode steps add up nothing"


@pytest.mark.parametrize("pairs", [1, 300, 1 << 22])
def test_sums_do_not_depend_on_the_number_of_queries_at_once(pairs, tmp_path, seen, monkeypatch):
    monkeypatch.setattr(attention_sums, "PAIRS", pairs)
    path, _, hf = tiny_dir(tmp_path)
    with engine(path) as llm:
        llm.generate([PROMPT], params(), use_tqdm=False)
    compare(seen, reference(hf, PROMPT), len(PROMPT))


# ---- h2o -------------------------------------------------------------------------------------------------------------


def random_stored(n, heads, kv_heads, keep, seed):
    """Return stored tokens with the sums of random queries and keys, and their attention f32 [heads, n, n]."""
    generator = torch.Generator().manual_seed(seed)
    q, keys = (torch.randn(n, count, 16, generator=generator) for count in (heads, kv_heads))
    grown = keys.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, grown) / 4
    attention = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1)
    sums = attention.sum(1).view(kv_heads, -1, n).sum(1)
    queries = torch.arange(n, 0, -1).float().expand(kv_heads, n)
    return StoredTokens(0, keys, keys, None, 0.25, keep, n, 0, sums, queries), attention


def kept_of(scores, keep):
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[:, :keep].sort(-1).values.tolist()


SIZES = [(30, 4, 2, 10), (57, 8, 8, 9), (64, 6, 2, 33), (5, 2, 1, 1), (200, 8, 2, 50)]


@pytest.mark.parametrize("recent", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize(("n", "heads", "kv_heads", "keep"), SIZES)
def test_h2o_keeps_the_heavy_hitters_and_the_newest_tokens_of_the_formula_in_float64(n, heads, kv_heads, keep, recent):
    made = H2O(H2OOptions(recent=recent), CompressorContext("cpu", "float32", 256))
    for seed in range(10):
        stored, attention = random_stored(n, heads, kv_heads, keep, seed)
        newest = int(recent * keep)
        hits = attention.double().sum(1).view(kv_heads, -1, n).sum(1)
        expected = []
        for head in hits:
            heavy = sorted(range(n - newest), key=lambda i: (-head[i].item(), i))[: keep - newest]
            expected.append(sorted(heavy) + list(range(n - newest, n)))
        assert kept_of(made.score(stored), keep) == expected


@pytest.mark.parametrize(("n", "heads", "kv_heads", "keep"), SIZES)
def test_means_keep_the_tokens_of_the_press_of_observed_attention(n, heads, kv_heads, keep):
    made = H2O(H2OOptions(recent=0, mean=True), CompressorContext("cpu", "float32", 256))
    for seed in range(10):
        stored, attention = random_stored(n, heads, kv_heads, keep, seed)
        # kvpress: attention summed over queries, divided by the queries that see the key, averaged over the group
        mean = attention.double().sum(1) / torch.arange(n, 0, -1)
        expected = mean.view(kv_heads, -1, n).mean(1)
        assert kept_of(made.score(stored), keep) == kept_of(expected, keep)


def test_h2o_in_the_engine_keeps_the_tokens_of_the_formula(tmp_path):
    path, _, hf = tiny_dir(tmp_path)
    with engine(path, "h2o", max_num_batched_tokens=9) as llm:
        (out,) = llm.generate([PROMPT], params(), use_tqdm=False, taps=KEPT)
    n, keep = len(PROMPT), len(PROMPT) // 2
    (kept,) = out.taps["compression.kept"]
    for layer, sums in enumerate(reference(hf, PROMPT)):
        newest = keep // 2
        heavy = sums[:, : n - newest].topk(keep - newest, dim=-1).indices.sort(-1).values.numpy()
        recent = np.broadcast_to(np.arange(n - newest, n), (len(heavy), newest))
        assert np.array_equal(kept.positions[layer], np.concatenate((heavy, recent), axis=1))
