"""The executor ``sim``: its pace, its made-up tokens and its check.  The conformance kit tests the rest."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import EngineConfig
from minivllm.config.resolve import resolve
from minivllm.errors import ConfigError
from minivllm.plugins.executor.made_up import Histories, MadeUpModel, hash_of, logits_after
from minivllm.registry import Catalog
from minivllm.testing import ExecutorConformance
from minivllm.testing.sim import outputs, request, run, sim_engine

VOCABULARIES = (2, 50, 151_936)


class TestChecked(ExecutorConformance):
    """With every KV slot looked at."""

    plugin = "minivllm/sim"
    options = {"check": True, "step_ms": 0.0}


@pytest.fixture(scope="module")
def llm():
    options = {"step_ms": 4.0, "row_ms": 1.0, "sample_ms": 1.0, "answer_tokens": 20}
    with LLM(model="pocket", executor={"name": "sim", "options": options}, max_num_seqs=8, device="cpu") as made:
        yield made


# ---- the model -----------------------------------------------------------------------------------------------------


def histories(n: int, seed: int = 0) -> np.ndarray:
    """u64 [n]."""
    rng = np.random.default_rng(seed)
    return np.concatenate([hash_of(rng.integers(0, 50, rng.integers(1, 40))) for _ in range(n)])


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_each_history_orders_the_whole_vocabulary_in_its_own_way(vocab):
    model, h = MadeUpModel(vocab), histories(20)
    tokens = np.arange(min(vocab, 5000))[None]
    assert (model.at_rank(h[:, None], model.rank_of(h[:, None], tokens)) == tokens).all()
    assert len({int(t) for t in model.at_rank(h, np.zeros(20, int))}) > min(vocab, 8) / 2


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_log_probabilities_are_those_of_a_distribution_and_scores_are_read_from_it(vocab):
    model, h = MadeUpModel(vocab), histories(8)
    logits = model.logits(h)
    assert np.allclose(np.logaddexp.reduce(logits.astype(np.float64), axis=1), 0, atol=1e-5)
    tokens, k = np.arange(8) % vocab, min(5, vocab)
    found = model.scores(h, tokens, k)
    assert (found.top_ids == np.argsort(-logits, axis=1, kind="stable")[:, :k]).all()
    chosen = logits[np.arange(8), tokens]
    assert (found.chosen == chosen).all() and (found.rank == 1 + (logits > chosen[:, None]).sum(1)).all()
    assert (model.draw(h, np.zeros(8, int)) == found.top_ids[:, 0]).all(), "sample 0 is greedy"


def test_other_samples_draw_by_their_probabilities():
    model, h = MadeUpModel(50), histories(4000)
    rank = model.rank_of(h, model.draw(h, np.full(len(h), 3)))
    want = np.exp(model.log_prob(h[:, None], np.arange(6)[None])).mean(0)
    assert np.allclose(np.bincount(rank, minlength=6)[:6] / len(h), want, atol=0.03)


@pytest.mark.parametrize("share", [0.9, 0.1, 0.0005])
def test_a_mask_allows_its_likeliest_token_however_few_there_are(share):
    vocab, rng = 20_011, np.random.default_rng(3)
    model = MadeUpModel(vocab)
    for h in histories(10):
        allowed = rng.random(vocab) < share
        allowed[rng.integers(vocab)] = True
        words = np.packbits(np.append(allowed, np.zeros(-vocab % 32, bool)), bitorder="little").view("<i4")
        want = int(np.where(allowed, model.logits(np.array([h]))[0], -np.inf).argmax())
        assert model.likeliest(h, words) == want


def test_a_history_has_one_hash_however_it_came_to_be():
    tokens, text = np.random.default_rng(1).integers(0, 1000, 60), Histories(3, 64)
    text.put(0, tokens)
    text.put(1, tokens[:20])
    for at in range(20, 60):
        text.append(np.array([1]), np.array([at]), tokens[at : at + 1])
    text.fork(1, 2, 60)
    assert (text.prefix[0, :61] == text.prefix[1, :61]).all() and (text.prefix[2, :61] == text.prefix[0, :61]).all()
    assert len(set(text.prefix[0, :61].tolist())) == 61


# ---- time ----------------------------------------------------------------------------------------------------------


def test_a_step_takes_the_time_that_the_options_say(llm):
    begun, steps = time.monotonic(), llm.stats()["steps"]
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)
    took, steps = time.monotonic() - begun, llm.stats()["steps"] - steps
    assert steps >= 30 and took >= 30 * 6e-3 and llm.stats()["device_ms"] == 6.0


def test_on_a_virtual_clock_nobody_waits():
    options = {"step_ms": 10_000.0, "clock": "virtual"}
    with LLM(model="pocket", executor={"name": "sim", "options": options}, device="cpu", max_num_seqs=4) as made:
        begun = time.monotonic()
        made.generate([[5, 6]], SamplingParams(max_tokens=10, ignore_eos=True), use_tqdm=False)
        assert time.monotonic() - begun < 10 and made.stats()["device_ms"] == 10_000


# ---- in an engine --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_are_functions_of_the_prompt_and_end_after_so_many_tokens_in_the_mean(llm):
    prompts = [[i, i + 1, 7] for i in range(120)]
    requested = SamplingParams(max_tokens=400, temperature=0.7, top_p=0.9)
    first, again = (llm.generate(some, requested, use_tqdm=False) for some in (prompts, prompts[::-1]))
    assert [o.tokens for o in first] == [o.tokens for o in again[::-1]]
    assert all(o.finish_reason == "stop" for o in first)
    assert 14 < np.mean([len(o.tokens) for o in first]) < 28


def test_no_token_that_ends_an_answer_comes_before_min_tokens(llm):
    requested = SamplingParams(max_tokens=80, min_tokens=60)
    outs = llm.generate([[i] for i in range(8)], requested, use_tqdm=False)
    ends = {i for o in outs for i in o.tokens[:60]} & set(llm.engine.eos_ids)
    assert not ends and all(len(o.tokens) >= 60 for o in outs) and any(o.finish_reason == "stop" for o in outs)


def test_what_a_processor_honours_is_refused_by_its_name(llm):
    outs = llm.generate([[5], [6]], [SamplingParams(presence_penalty=1.0), SamplingParams(max_tokens=3)], False)
    assert outs[0].error.startswith("executor sim: minivllm/penalties: made-up tokens pass no processor")
    assert outs[0].finish_reason == "error" and outs[1].error is None


def test_nobody_gets_made_up_tokens_unasked():
    config = EngineConfig(model="pocket", device="cpu")
    assert resolve(config, Catalog.discover()).parts["executor"].name == "minivllm/local"


@pytest.mark.parametrize(
    "option, name", [("attention", "sdpa"), ("kv_format", "plain"), ("quantizer", "int8"), ("sampler", "mirostat")]
)
def test_a_part_that_would_not_run_is_refused_by_its_option(option, name):
    parts = {option: name, "executor": "sim"}
    with pytest.raises(ConfigError, match=rf"{option}={name} with executor=sim.*leave {option} out"):
        resolve(EngineConfig(model="pocket", device="cpu", **parts), Catalog.discover())
    assert resolve(EngineConfig(model="pocket", device="cpu", executor="sim"), Catalog.discover())


def test_it_is_imported_without_torch():
    code = "import minivllm.plugins.executor.sim, sys; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_logits_of_the_kit_are_those_that_are_drawn_from():
    engine = sim_engine()
    made = request(engine, "r", [1, 2, 3], max_tokens=6, ignore_eos=True)
    run(engine)
    tokens = outputs(made)[0][0]
    assert [int(logits_after(np.array([1, 2, 3, *tokens[:i]]), 50).argmax()) for i in range(6)] == tokens


# ---- its check -----------------------------------------------------------------------------------------------------


def faulty(kind: str, device) -> None:
    """Plant a fault into the messages to the device, or into its memory."""
    tables = device._tables

    def wrong(d):
        tables(d)
        if kind == "foreign":
            device.kv[0][:] ^= np.uint64(1)
        elif kind == "missing":
            device.table[0, :, 0] = 0

    device._tables = wrong


@pytest.mark.parametrize(("kind", "words"), [("foreign", "KV of another history at 0"), ("missing", "has no block")])
def test_a_kv_slot_that_is_not_the_rows_own_ends_the_engine(kind, words):
    engine = sim_engine()
    made = request(engine, "r", range(9), max_tokens=20, ignore_eos=True)
    for _ in range(4):
        engine.step()
    assert not engine.dead
    faulty(kind, engine.executor)
    while not engine.dead:
        engine.step()
    assert words in engine.dead and made.sequences[0].finish_reason == "error"


def test_a_table_that_names_an_entry_twice_is_seen():
    engine = sim_engine()
    request(engine, "r", range(9), max_tokens=3)
    submit = engine.executor.submit

    def twice(plan):
        object.__setattr__(plan.delta, "table", np.repeat(plan.delta.table, 2, axis=0))
        submit(plan)

    engine.executor.submit = twice
    engine.step()
    assert "named twice" in engine.dead
