"""A rotary embedding that changes with the length of a request (LongRoPE): each request has one, from its first token
to its last, chosen by how long it can become; whatever is computed beside it, cached or preempted."""

from __future__ import annotations

import pytest
import torch

from minivllm import LLM, ConfigError, SamplingParams
from minivllm.testing.tiny import tiny_dir

SWITCH = 40
ROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": SWITCH,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
}  # fmt: skip
VALUES = {"rope_parameters": ROPE, "original_max_position_embeddings": SWITCH}
SIZES = {
    "skip_tokenizer_init": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
    "kvcache_block_size": 8,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path, _, hf = tiny_dir(tmp_path_factory.mktemp("phi3"), "phi3", **VALUES)
    return str(path), hf


def prompt(n, seed=0):
    return [(7 * i * i + 3 * i + 5 + seed) % 50 + 3 for i in range(n)]


def greedy(hf, ids, n, long):
    """Return transformers' tokens with the frequencies of long or of short sequences."""
    rotary = hf.model.rotary_emb
    hf.config.rope_parameters["original_max_position_embeddings"] = 1 if long else 10_000
    try:
        ids = list(ids)
        for _ in range(n):
            with torch.no_grad():
                ids.append(int(hf(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    finally:
        hf.config.rope_parameters["original_max_position_embeddings"] = SWITCH
    assert rotary.rope_type == "longrope"
    return ids[-n:]


def ask(llm, requests):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for _, n in requests]
    outs = llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)
    return [out.outputs[0].token_ids for out in outs]


MORE = {
    "plain": {},
    "preempted": {"num_kvcache_blocks": 14},
    "drafts": {"drafter": "ngram", "speculate": "always"},
    "process": {"executor": "process"},
}


@pytest.mark.parametrize("more", MORE.values(), ids=MORE)
def test_each_request_keeps_the_frequencies_of_the_length_that_it_can_have(checkpoint, more):
    """Of N tokens the last one's keys are never computed: a request of SWITCH + 1 tokens is a short one yet."""
    path, hf = checkpoint
    requests = [
        (prompt(30), 4),
        (prompt(30), 30),
        (prompt(30), 11),
        (prompt(30), 12),
        (prompt(60), 8),
        (prompt(9, 4), 60),
    ]
    want = [greedy(hf, ids, n, len(ids) + n - 1 > SWITCH) for ids, n in requests]
    assert want[0] != want[1][:4], "the test has no power: both sets of frequencies give the same tokens"
    with LLM(model=path, device="cpu", dtype="float32", **{**SIZES, **more}) as llm:
        assert llm.engine.wiring.rope_switch == SWITCH
        assert ask(llm, requests) == want
        assert ask(llm, requests[::-1]) == want[::-1]  # from the prefix cache, now
        if "num_kvcache_blocks" in more:
            assert llm.engine.planner.preemptions, "the test has no power"


def test_long_and_short_requests_share_prefixes_with_their_like_alone(checkpoint):
    path, _ = checkpoint
    ids = prompt(33)
    with LLM(model=path, device="cpu", dtype="float32", **SIZES) as llm:
        params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (2, 3, 40, 50, 2)]
        hits = [llm.generate({"prompt_token_ids": ids}, p, use_tqdm=False)[0].num_cached_tokens for p in params]
    assert hits == [0, 32, 0, 32, 32]


def test_a_saved_prefix_has_the_salt_of_its_request(checkpoint, tmp_path):
    path, _ = checkpoint
    store = {"name": "disk", "options": {"path": str(tmp_path), "load": "always"}}
    with LLM(model=path, device="cpu", dtype="float32", kvstore=store, **SIZES) as llm:
        short, long = {"prompt_token_ids": prompt(33)}, {"prompt_token_ids": prompt(64)}
        assert llm.save_prefix("short", short) == 32
        assert llm.save_prefix("long", long) == 64
        names = llm.engine.cache.tiers.prefixes.keys
        for name, ids in (("short", short), ("long", long)):
            assert [key[:-1].hex() for key in names[name]] == [key[:-2] for key in llm.block_keys(ids)]
        assert llm.block_keys(short) != llm.block_keys(long)[:4]


def test_an_engine_whose_sequences_never_get_long_has_one_table(checkpoint):
    path, hf = checkpoint
    with LLM(model=path, device="cpu", dtype="float32", **{**SIZES, "max_model_len": SWITCH}) as llm:
        assert llm.engine.wiring.rope_switch is None
        assert ask(llm, [(prompt(30), 9)]) == [greedy(hf, prompt(30), 9, False)]


def test_a_draft_model_that_changes_at_another_length_is_refused(checkpoint, tmp_path):
    path, _ = checkpoint
    other, _, _ = tiny_dir(tmp_path, "phi3")
    drafter = {"name": "model", "options": {"model": str(other)}}
    with pytest.raises(ConfigError, match=r"other rotary frequencies for requests longer than None tokens.* than 40 "):
        LLM(model=path, device="cpu", dtype="float32", drafter=drafter, **SIZES)
