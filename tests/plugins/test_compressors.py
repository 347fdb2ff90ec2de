"""The built-in compressors in an engine on a CPU, compared with models of transformers that do not see removed keys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compression_reference import Recorder, logits_of, preempt_often

from minivllm import LLM, SamplingParams
from minivllm.core.engine.planner import Planner
from minivllm.errors import ConfigError, RequestError
from minivllm.plugin import Compressor, SchedulerPolicy, Tap
from minivllm.testing.tiny import tiny_dir

SCORERS = ("streaming", "knorm", "keydiff", "random", "snapkv", "tova", "rkv", "h2o")
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "phi3": {}, "gemma3": WINDOWED, "mixtral": {}}
# no token twice: its keys would have one norm, and rounding would choose between them
PROMPT = [5, 17, 3, 44, 60, 21, 9, 33, 12, 50, 7, 28, 1, 39, 55, 2, 19, 40, 8, 11, 22, 34, 45, 31, 10, 4, 18, 15]
OPTIONS = {"snapkv": {"window": 4, "kernel": 3}, "rkv": {"window": 3, "kernel": 3}}
MOST = 17


def choice(name):
    return {"name": name, "options": OPTIONS[name]} if name in OPTIONS else name


def engine(path, name, **options):
    defaults = dict(skip_tokenizer_init=True, dtype="float32", max_num_seqs=8, max_model_len=128, kvcache_block_size=4)
    return LLM(str(path), compressor=choice(name), **{**defaults, "compress_every": 5, **options})


def params(**values):
    return SamplingParams(**{**dict(temperature=0, max_tokens=MOST, ignore_eos=True, seed=7, kv_budget=0.5), **values})


def run(llm, prompts, **values):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params(**values), use_tqdm=False)]


@pytest.mark.parametrize("graph", ["auto", "off"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCORERS)
def test_tokens_are_those_of_transformers_where_queries_do_not_see_removed_keys(
    name, family, graph, tmp_path, monkeypatch
):
    path, cfg, hf = tiny_dir(tmp_path, family, **FAMILIES[family])
    recorder = Recorder(monkeypatch, cfg.num_hidden_layers)
    with engine(path, name, graph=graph) as llm:
        (out,) = llm.generate([PROMPT], params(logprobs=1), use_tqdm=False)
        assert llm.stats()["compression"]["compressions"] == 4
    compare_with_transformers(hf, list(out.outputs[0].token_ids), out.outputs[0].logprobs, recorder)


def compare_with_transformers(hf, tokens, logprobs, recorder):
    logits = logits_of(hf, PROMPT + tokens[:-1], recorder)[len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    found = torch.tensor([next(iter(p.values())).logprob for p in logprobs])
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("options", [{}, {"run_ahead": 1}, {"enable_prefix_caching": False}])
@pytest.mark.parametrize("name", SCORERS)
def test_pressure_compresses_a_row_before_it_preempts_one_and_changes_no_uncompressed_row(
    name, options, tmp_path, monkeypatch
):
    path, cfg, hf = tiny_dir(tmp_path)
    plain = [PROMPT[::-1], params(kv_budget=0, max_tokens=30)]
    with engine(path, name, compress_every=0) as llm:
        expected = run(llm, [plain[0]], kv_budget=0, max_tokens=30)[0]
    recorder = Recorder(monkeypatch, cfg.num_hidden_layers)
    requested = params(kv_budget=None, max_tokens=30, logprobs=1)
    with engine(path, name, compress_every=0, pressure_budget=0.5, num_kvcache_blocks=25, **options) as llm:
        own, other = llm.generate([PROMPT, plain[0]], [requested, plain[1]], use_tqdm=False)
        assert llm.stats()["preemptions"] == 0 and llm.stats()["compression"]["compressions"] > 0
    assert list(other.outputs[0].token_ids) == list(expected)
    assert all(stored > kept >= computed // 2 for computed, stored, kept in recorder.events)
    compare_with_transformers(hf, list(own.outputs[0].token_ids), own.outputs[0].logprobs, recorder)


KEPT = [Tap("compression.kept", read=True)]


def assert_same(kept, recorder):
    """Compare the kept tokens of an output with the kept tokens that the reference has recorded."""
    alive = [np.arange(0)] * len(recorder.removed)
    assert [one.computed for one in kept] == [computed for computed, *_ in recorder.events]
    for one in kept:
        assert list(one.positions) == list(range(len(alive)))
        for layer, positions in one.positions.items():
            removed = recorder.removed[layer][:, : one.computed]
            for head, found in enumerate(positions):
                assert found.tolist() == np.flatnonzero(removed[head] > one.computed).tolist()


@pytest.mark.parametrize("executor", ["local", "process"])
@pytest.mark.parametrize("name", ["keydiff", "snapkv"])
def test_a_request_reads_the_tokens_that_its_compressions_keep(name, executor, tmp_path, monkeypatch):
    path, cfg, _ = tiny_dir(tmp_path)
    recorder = Recorder(monkeypatch, cfg.num_hidden_layers)
    with engine(path, name) as llm:
        (out,) = llm.generate([PROMPT], params(), use_tqdm=False, taps=KEPT)
    kept = out.outputs[0].taps["compression.kept"]
    assert len(kept) == 4
    assert_same(kept, recorder)
    monkeypatch.undo()
    with engine(path, name, executor=executor) as llm:
        (again,) = llm.generate([PROMPT], params(), use_tqdm=False, taps=KEPT)
    for one, other in zip(kept, again.taps["compression.kept"], strict=True):
        assert one.computed == other.computed
        assert all(np.array_equal(one.positions[layer], other.positions[layer]) for layer in one.positions)


def test_kept_tokens_are_read_only_where_rows_are_compressed(tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, "none", compress_every=0) as llm, pytest.raises(RequestError, match="compressor=none keeps all"):
        llm.generate([PROMPT], params(kv_budget=0), use_tqdm=False, taps=KEPT)
    with engine(path, "knorm") as llm:
        with pytest.raises(RequestError, match="nothing is added to it"):
            llm.generate([PROMPT], params(), use_tqdm=False, taps=[Tap("compression.kept", add=[1.0])])
        (out,) = llm.generate([PROMPT], params(kv_budget=0), use_tqdm=False, taps=KEPT)
        assert out.taps["compression.kept"] == []
    with engine(path, "knorm", max_tap_bytes=200) as llm:
        (out,) = llm.generate([PROMPT], params(), use_tqdm=False, taps=KEPT)
        assert "max_tap_bytes" in out.error


class Draws(Compressor):
    """Scores that no second computation repeats."""

    calls = 0

    def score(self, stored):
        type(self).calls += 1
        heads, n = stored.keys.shape[1], len(stored.keys)
        return torch.rand(heads, n, generator=torch.Generator().manual_seed(type(self).calls))


@pytest.mark.parametrize("options", [{}, {"run_ahead": 1}, {"max_num_batched_tokens": 30}])
@pytest.mark.parametrize("pressed", [False, True])
def test_a_preempted_row_keeps_the_tokens_that_it_has_kept_before(pressed, options, tmp_path, monkeypatch):
    path, cfg, hf = tiny_dir(tmp_path)
    recorder = Recorder(monkeypatch, cfg.num_hidden_layers)
    preempt_compressed(monkeypatch)
    budget = {"kv_budget": None} if pressed else {}
    more = {"pressure_budget": 0.5, "num_kvcache_blocks": 25, "compress_every": 0} if pressed else {}
    requested = [params(logprobs=1, max_tokens=24, **budget), params(kv_budget=0, max_tokens=24)]
    with engine(path, Draws, **options, **more) as llm:
        own, _ = llm.generate([PROMPT, PROMPT[::-1]], requested, use_tqdm=False, taps=KEPT)
        stats = llm.stats()
        assert own.error is None
        assert stats["preemptions"] >= 3 and stats["compression"]["compressions"] > len(recorder.events) > 0
    assert_same(own.taps["compression.kept"], recorder)
    compare_with_transformers(hf, list(own.outputs[0].token_ids), own.outputs[0].logprobs, recorder)


def preempt_compressed(monkeypatch):
    """Preempt each compressed row three times, some steps after its last compression."""
    real = Planner.next

    def plan(planner, now):
        for slot in planner.slots.running.tolist():
            seq = planner.slots.seq[slot]
            behind = planner.slots.computed[slot] - max(seq.compressions, default=0)
            if seq.compressions and behind >= 1 and seq.preempted < 3:
                planner.preempt(slot)
        return real(planner, now)

    monkeypatch.setattr(Planner, "next", plan)


@pytest.mark.parametrize("name", SCORERS)
def test_batches_chunks_hits_and_preemptions_change_no_token(name, tmp_path, monkeypatch):
    path, *_ = tiny_dir(tmp_path)
    prompts = [PROMPT, PROMPT[:19], PROMPT[3:], [59, *PROMPT], PROMPT]
    with engine(path, name, enable_prefix_caching=False) as llm:
        alone = [run(llm, [prompt])[0] for prompt in prompts]
    with engine(path, name) as llm:
        assert run(llm, prompts) == alone
        assert run(llm, prompts) == alone, "behind prefix hits"
        # attention sums need all queries of a prompt
        assert (llm.stats()["prefix_hits"] > 0) == (name != "h2o")
    with engine(path, name, max_num_batched_tokens=9) as llm:
        assert run(llm, prompts) == alone, "in chunks"
    with engine(path, name, num_kvcache_blocks=16) as llm:
        assert run(llm, prompts) == alone, "with little memory"
    preempt_often(monkeypatch)
    with engine(path, name, max_num_batched_tokens=21) as llm:
        assert run(llm, prompts) == alone, "preempted"
        assert llm.stats()["preemptions"] > 4


@pytest.mark.parametrize("name", ["knorm", "snapkv", "h2o"])
def test_rows_are_compressed_behind_steps_in_flight_and_change_no_token(name, tmp_path):
    path, *_ = tiny_dir(tmp_path)
    prompts = [PROMPT, PROMPT[:19], PROMPT[3:], [59, *PROMPT], PROMPT[::-1]]
    with engine(path, name, enable_prefix_caching=False, run_ahead=0) as llm:
        whole = run(llm, prompts, max_tokens=30)
        # a row ends at one of these tokens while its next step, and perhaps a compression, is in flight
        stops = {"ignore_eos": False, "stop_token_ids": [tokens[12] for tokens in whole[:3]]}
        short = run(llm, prompts, max_tokens=30, **stops)
    assert min(map(len, short)) < 30
    with engine(path, name, enable_prefix_caching=False, run_ahead=2) as llm:
        for _ in range(2):  # in used blocks too
            assert run(llm, prompts, max_tokens=30) == whole
            assert run(llm, prompts, max_tokens=30, **stops) == short


@pytest.mark.parametrize("kv_format", ["fp16", "bf16", "int8", "fp8"])
def test_stored_bytes_of_every_kv_format_move_unchanged(kv_format, tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, "knorm", kv_format=kv_format) as llm, engine(path, "knorm", kv_format=kv_format) as slow:
        assert run(llm, [PROMPT], kv_budget=len(PROMPT) + MOST) == run(slow, [PROMPT], kv_budget=0)
        assert run(llm, [PROMPT]) == run(slow, [PROMPT])


def test_keeping_everything_changes_no_token(tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, "keydiff") as llm, engine(path, "none", compress_every=0) as plain:
        prompts = [PROMPT, PROMPT[:9]]
        assert run(llm, prompts, kv_budget=100) == run(plain, prompts, kv_budget=0)


def test_branches_of_a_request_are_compressed_on_their_own(tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, "keydiff") as llm:
        alone = run(llm, [PROMPT])[0]
        (out,) = llm.generate([PROMPT], params(n=3), use_tqdm=False)
        assert [list(one.token_ids) for one in out.outputs] == [list(alone)] * 3


class FirstVictim(SchedulerPolicy):
    def victim(self, candidates, need):
        return 0


def test_branches_whose_parent_is_preempted_as_they_fork_have_its_queries(tmp_path):
    path, *_ = tiny_dir(tmp_path)
    prompts = [[1 + (i * k + k) % 59 for i in range(29)] for k in (3, 7, 11, 13)]
    options = dict(max_num_seqs=16, max_model_len=64, num_kvcache_blocks=38, enable_prefix_caching=False)
    with engine(path, "snapkv", scheduler=FirstVictim, **options) as llm:
        for _ in range(3):
            done = llm.generate(prompts, params(n=4, max_tokens=8, kv_budget=0.3), use_tqdm=False)
            assert [output.error for output in done] == [None] * 4
        assert llm.stats()["preemptions"] > 0


@pytest.mark.parametrize("name", ["snapkv", "rkv"])
def test_a_branch_in_a_slot_that_another_row_leaves_has_the_queries_of_its_parent(name, tmp_path):
    path, *_ = tiny_dir(tmp_path)
    two = params(n=2, temperature=1.0)
    with engine(path, name, max_num_seqs=4, max_num_batched_tokens=16) as llm:
        (alone,) = llm.generate([PROMPT], two, use_tqdm=False)
        # one of the short rows ends in the step before the fork, with each number of tokens in flight
        for tokens in range(1, 6):
            llm.reset_prefix_cache()
            requested = [params(max_tokens=tokens, kv_budget=0), two]
            *_, out = llm.generate([PROMPT[:3], PROMPT], requested, use_tqdm=False)
            assert out.error is None, f"beside a row of {tokens} tokens: {out.error}"
            assert [one.token_ids for one in out.outputs] == [one.token_ids for one in alone.outputs]


def test_a_class_of_the_user_works_with_one_option(tmp_path):
    class Oldest(Compressor):
        def score(self, stored):
            return -stored.keys.new_ones(len(stored.keys)).cumsum(0)

    path, *_ = tiny_dir(tmp_path)
    with engine(path, Oldest) as llm:
        assert len(run(llm, [PROMPT])[0]) == MOST
        assert llm.stats()["compression"]["compressions"] == 4


def raises(stored):
    raise ValueError("no scores today")


FAULTS = {"no scores today": raises, "gave (3,)": lambda stored: stored.keys.new_ones(3), "gave int": lambda stored: 7}


@pytest.mark.parametrize("reported", FAULTS)
def test_a_scorer_that_fails_ends_its_own_request_only(reported, tmp_path):
    class Mine(Compressor):
        def score(self, stored):
            return FAULTS[reported](stored)

    path, *_ = tiny_dir(tmp_path)
    with engine(path, Mine) as llm:
        failed, fine = llm.generate([PROMPT, PROMPT], [params(), params(kv_budget=0)], use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error" and fine.outputs[0].finish_reason == "length"
        assert reported in failed.error
        assert run(llm, [PROMPT], kv_budget=0)[0] == fine.outputs[0].token_ids


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"compressor": "none", "kv_budget": 8}, "compressor=none compresses nothing"),
        ({"compressor": "none", "compress_every": 8}, "compressor=none compresses nothing"),
        ({"compressor": "none", "pressure_budget": 0.5}, "pressure_budget=0.5: compressor=none compresses nothing"),
        ({"compressor": "knorm", "pressure_budget": 1.5}, "a share of the computed tokens below 1"),
        ({"compressor": "knorm", "drafter": "ngram"}, "drafter=ngram needs all tokens"),
        ({"compressor": "knorm", "kv_budget": 1.5}, "a whole number of tokens"),
        ({"compressor": "knorm", "kv_budget": -1}, "kv_budget"),
        ({"compressor": "knorm", "kv_budget": float("inf")}, "kv_budget"),
        ({"compressor": {"name": "snapkv", "options": {"kernel": 4}}}, "expected an odd number"),
    ],
)
def test_what_is_not_compressed_together_is_refused_by_name(options, reported, tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with pytest.raises(ConfigError, match=reported):
        LLM(str(path), skip_tokenizer_init=True, **options)


@pytest.mark.parametrize(("family", "reported"), [("qwen3_5", "recurrent states"), ("mpt", "ALiBi")])
def test_models_that_are_not_compressed_are_refused_by_name(family, reported, tmp_path):
    path, *_ = tiny_dir(tmp_path, family)
    with pytest.raises(ConfigError, match=reported):
        LLM(str(path), skip_tokenizer_init=True, compressor="knorm")


def test_a_request_budget_is_refused_where_nothing_is_compressed(tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, "none", compress_every=0) as llm, pytest.raises(RequestError, match="compressor=none"):
        run(llm, [PROMPT])


def test_explain_says_when_requests_are_compressed_and_to_how_many_tokens(tmp_path):
    path, *_ = tiny_dir(tmp_path)
    with engine(path, "knorm", kv_budget=0.5, compress_every=8, pressure_budget=64) as llm:
        reported = llm.explain("compressor")
    assert (
        "0.5 of the prompt at the end of the prompt, and after every 8 generated tokens; 64 tokens when KV" in reported
    )
    with engine(path, "knorm", compress_every=0) as llm:
        assert "as the kv_budget of a request says, at the end of its prompt" in llm.explain("compressor")
