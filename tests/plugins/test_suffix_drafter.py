"""The drafter ``suffix``: the places that it finds, the texts that it keeps, and its tokens on the host."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from devices import DEVICE

from minivllm import LLM, ConfigError, SamplingParams
from minivllm.core.interfaces.drafter import DrafterContext
from minivllm.core.interfaces.plan import Delta, StepPlan
from minivllm.device.worker import build
from minivllm.device.worker.host_tokens import HostTokens
from minivllm.plugins.drafter.options import SuffixOptions
from minivllm.plugins.drafter.suffix import Suffix, Texts, places
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other


def i32(*tokens):
    return np.array(tokens, np.int32)


def drafter(**options):
    return Suffix(SuffixOptions(**options), DrafterContext(50, 200, "cpu"))


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_matches_are_those_of_a_plain_search(seed):
    rng = random.Random(seed)
    history = i32(*(rng.randrange(3) for _ in range(rng.randrange(1, 30))))
    text = i32(*(rng.randrange(3) for _ in range(rng.randrange(0, 60))))
    most, n = rng.choice([1, 3, 9]), len(history)
    for where, stop in ((text, len(text)), (history, n - 1)):
        length, found = places(where, history, most, stop)
        expected, ends = 0, []
        for size in range(1, min(most, n) + 1):
            here = [e for e in range(size - 1, stop) if (where[e - size + 1 : e + 1] == history[n - size :]).all()]
            if here:
                expected, ends = size, here
        assert (length, found.tolist()) == (expected, ends)


@pytest.mark.parametrize("most", [1, 32])
def test_the_places_of_a_repeated_token_are_bounded_and_the_newest_are_kept(most):
    text = np.append(np.full(50_000, 7, np.int32), i32(-1))
    length, found = places(text, text[:100], most, len(text))
    assert length == most and 1000 < len(found) <= 4096
    assert found.tolist() == [*range(50_000 - len(found), 50_000)]
    assert drafter().continued(text[:30_000], text, 4) == [7, 7, 7, 7]


def test_the_most_frequent_continuation_is_drafted_and_the_last_of_equal_ones():
    find = drafter(min_share=0.0)
    nothing = i32()
    assert find.continued(i32(1, 2, 3, 8, 1, 2, 4, 9, 1, 2, 3, 7, 1, 2), nothing, 3) == [3, 7, 1]
    assert find.continued(i32(1, 2, 3, 8, 1, 2, 4, 9, 1, 2), nothing, 2) == [4, 9]
    assert find.continued(i32(1, 2), i32(0, 1, 2, 5, 6, -1, 1, 2, 5, 7, -1, 1, 2, 8, 8, -1), 2) == [5, 7]
    # a match of three tokens in the history wins over matches of two
    assert find.continued(i32(9, 1, 2, 4, 9, 1, 2), i32(1, 2, 5, -1, 1, 2, 5, -1), 1) == [4]


def test_drafts_repeat_a_period_and_end_with_a_text():
    assert drafter().continued(i32(5, 1, 2, 1, 2, 1, 2), i32(), 6) == [1, 2, 1, 2, 1, 2]
    assert drafter().continued(i32(3, 4), i32(3, 4, 7, -1, 9), 6) == [7]
    assert (
        drafter().continued(
            i32(
                7,
            ),
            i32(7, 7, -1),
            6,
        )
        == []
    )


def test_options_bound_the_drafts():
    text = i32(*([1, 2, 3, 4, 5, 6, 7, -1] * 1 + [1, 2, 3, 9, -1]))
    assert drafter(drafts_per_match=0.5, min_share=0).continued(i32(0, 1, 2), text, 5) == [3]
    assert drafter(min_share=0.6).continued(i32(0, 1, 2), text, 5) == [3]
    assert drafter(min_match=3).continued(i32(0, 1, 2), text, 5) == []
    assert drafter(max_match=1, min_match=1, drafts_per_match=1).continued(i32(0, 1, 2), text, 5) == [3]
    with pytest.raises(ValueError, match="min_match=9: expected at most max_match=8"):
        SuffixOptions(min_match=9, max_match=8)


def test_kept_texts_are_bounded_and_the_oldest_are_dropped_first():
    texts = Texts(20)
    for i in range(100):
        texts.add(i % 3, i32(*[i] * (i % 25 + 1)))
        assert texts.total == sum(len(text) for _, text in texts.texts) <= 20
        assert not texts.texts or texts.texts[-1][1][0] == i
        joined = {owner: texts.of(owner) for owner in range(3)}
        assert sum(map(len, joined.values())) == texts.total
    nothing = Texts(0)
    nothing.add(1, i32(1, 2, 3))
    assert not nothing.texts and not len(nothing.of(1))


def test_earlier_outputs_are_drafted_for_their_tenant_only(tmp_path):
    path, _, _ = tiny_dir(tmp_path / "model", eos_token_id=60)
    how = dict(device=DEVICE, dtype="float32", skip_tokenizer_init=True, speculate="always", num_kvcache_blocks=60)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = [[7, 3, 9, 11, 2, 40]]
    found, accepted = [], []
    with LLM(str(path), drafter="suffix", enable_prefix_caching=False, **how) as llm:
        for tenant in ("a", "b", "a"):
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, tenant=tenant)
            (out,) = llm.generate(prompt, params, use_tqdm=False)
            found.append(out.tokens)
            accepted.append(out.metrics.accepted_tokens)
    with LLM(str(path), **how) as llm:
        (plain,) = llm.generate(prompt, greedy, use_tqdm=False)
    assert found == [plain.tokens] * 3
    assert accepted[0] == accepted[1] < accepted[2] and accepted[2] > 14


def test_host_and_device_have_the_same_tokens(tmp_path, monkeypatch):
    """In chunks, with preemption, forks, aborts and tokens that the host chooses."""
    checked = []

    def compare(self, slots, known, original=HostTokens.known):
        rows = original(self, slots, known)
        state = llm.engine.executor.runner.state
        checked.extend(
            np.array_equal(row, state.tokens[slot, : len(row)].cpu()) for slot, row in zip(slots, rows, strict=True)
        )
        return rows

    monkeypatch.setattr(HostTokens, "known", compare)
    path, _, _ = tiny_dir(tmp_path / "model", eos_token_id=60)
    llm = LLM(
        str(path),
        device=DEVICE,
        dtype="float32",
        skip_tokenizer_init=True,
        speculate="always",
        drafter="suffix",
        num_kvcache_blocks=10,
        kvcache_block_size=16,
        max_num_seqs=5,
        max_num_batched_tokens=24,
    )
    rng = random.Random(4)
    prompts = [[rng.randrange(5) for _ in range(rng.randrange(1, 60))] for _ in range(12)]
    params = [SamplingParams(temperature=0.8, seed=i, n=1 + i % 2, max_tokens=30, ignore_eos=True) for i in range(12)]
    params[3] = SamplingParams(max_tokens=20, choose_fn=lambda ids, logits: 4)
    with llm:
        outs = llm.generate(prompts, params, use_tqdm=False)
        assert not any(out.error for out in outs), [out.error for out in outs]
        assert llm.stats()["preemptions"]
    assert len(checked) > 50 and all(checked)


def test_a_fork_of_a_sequence_that_leaves_in_the_same_step_keeps_the_tokens():
    ended = []
    host = HostTokens(4, 20, lambda owner, tokens, prompt: ended.append((owner, tokens.tolist(), prompt)))

    def apply(number, **delta):
        nothing = np.zeros(0, np.int32)
        host.apply(
            StepPlan(number, slots=nothing, q_len=nothing, computed=nothing, samples=nothing, delta=Delta(**delta))
        )

    apply(1, token=np.array([[0, 7]]))  # the slot of a sequence with the tokens 7, 8 and 9
    apply(2, token=np.array([[0, 8], [0, 9]]))
    apply(3, leave=i32(0), fork=np.array([[0, 1, 1], [1, 2, 2]]))
    assert ended == [(0, [7, 8, 9], 0)]
    assert [row.tolist() for row in host.known(i32(1, 2), i32(3, 3))] == [[7, 8, 9]] * 2
    with pytest.raises(RuntimeError, match="have \\[0\\] tokens"):
        host.known(i32(0), i32(1))


def test_a_drafter_whose_learn_raises_is_not_used_again(tmp_path, monkeypatch):
    def fails(self, owner, tokens, prompt):
        raise ValueError("no room for texts")

    monkeypatch.setattr(Suffix, "learn", fails)
    path, _, _ = tiny_dir(tmp_path / "model", eos_token_id=60)
    how = dict(device=DEVICE, dtype="float32", skip_tokenizer_init=True, speculate="always", num_kvcache_blocks=60)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(path), drafter="suffix", **how) as llm:
        outs = [llm.generate([[1, 2, 1, 2, 1]], params, use_tqdm=False)[0] for _ in range(3)]
        assert "no room for texts" in llm.stats()["speculation"]["failed"]
    assert all(len(out.tokens) == 12 and out.error is None for out in outs)


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="min_matches"):
        LLM("pocket", device="cpu", drafter={"name": "suffix", "options": {"min_matches": 3}})


def test_a_model_of_several_processes_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "load_weights", lambda *args: pytest.fail("weights were read"))
    path, _, _ = tiny_dir(tmp_path / "model")
    with pytest.raises(ConfigError, match="suffix with tensor_parallel_size=2: processes may read different"):
        LLM(str(path), device="cpu", skip_tokenizer_init=True, drafter="suffix", tensor_parallel_size=2)
