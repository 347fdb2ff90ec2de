"""``LLM.embed`` and ``LLM.score`` equal transformers for any division into steps, and refuse some options."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
import torch

from minivllm import LLM, RequestError, SamplingParams
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.frontend.embedding import cosine, cosines
from minivllm.frontend.pooling import default_pooling
from minivllm.testing.tiny import tiny_dir

NEAR = 1e-5
LENGTHS = (1, 2, 5, 17, 40, 63)
SMALL = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
SMALL |= {"kvcache_block_size": 4, "load_format": "auto", "skip_tokenizer_init": True}
KINDS = ("mean", "last", "cls")


def pooled(states: np.ndarray, kind: str) -> np.ndarray:
    """Return the pooled hidden states of transformers, of length 1."""
    vector = {"mean": states.mean(axis=0), "last": states[-1], "cls": states[0]}[kind]
    return vector / np.linalg.norm(vector)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def tiny(request, tmp_path_factory):
    """Return (folder, prompts, last hidden states of transformers of each prompt)."""
    path, cfg, model = tiny_dir(tmp_path_factory.mktemp(request.param), request.param)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, cfg.vocab_size, n).tolist() for n in LENGTHS]
    prompts += [prompts[-1][:30] + prompts[-2][:9]]  # shares a prefix with another
    with torch.inference_mode():
        outputs = [model(torch.tensor([ids]), output_hidden_states=True) for ids in prompts]
    return str(path), prompts, [out.hidden_states[-1][0].float().numpy() for out in outputs]


def vectors(outputs) -> list[np.ndarray]:
    assert all(out.error is None and out.finished for out in outputs)
    return [np.array(out.outputs.embedding, np.float32) for out in outputs]


def compare(found, states, kind):
    for vector, expected in zip(found, states, strict=True):
        assert np.abs(vector - pooled(expected, kind)).max() < NEAR


@pytest.mark.parametrize(
    "more", [{}, {"enable_prefix_caching": False}, {"graph": "off", "max_num_batched_tokens": 512}]
)
def test_embeddings_equal_those_of_transformers(tiny, more):
    """Steps of 16 tokens divide the prompts, and the second round finds them in the prefix cache."""
    path, prompts, states = tiny
    with LLM(model=path, **{**SMALL, **more}) as llm:
        for _ in range(2):
            for kind in KINDS:
                outputs = llm.embed(prompts, kind, use_tqdm=False)
                compare(vectors(outputs), states, kind)
                assert [out.prompt_token_ids for out in outputs] == prompts
        hits = [out.num_cached_tokens for out in llm.embed(prompts, "last", use_tqdm=False)]
        if "enable_prefix_caching" in more:
            assert hits == [0] * len(prompts)
        else:
            assert hits[-2] >= 28, "an embedding publishes the prefix of its prompt, and last reads it"
        assert [out.num_cached_tokens for out in llm.embed(prompts, "mean", use_tqdm=False)] == [0] * len(prompts)
        llm.check()
        assert llm.stats()["generated_tokens"] == 0


def test_embeddings_beside_requests_that_decode(tiny):
    """There are few blocks, so requests are preempted meanwhile.  Both kinds have the same values as alone."""
    path, prompts, states = tiny
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(model=path, **SMALL) as llm:
        plain = [out.tokens for out in llm.generate(prompts[2:5], params, use_tqdm=False)]
    with LLM(model=path, **SMALL, num_kvcache_blocks=26) as llm:
        for kind in KINDS:
            streams = [llm.stream(ids, params) for ids in prompts[2:5]]
            pieces = [[next(stream)] for stream in streams]
            compare(vectors(llm.embed(prompts, kind, use_tqdm=False)), states, kind)
            for stream, own in zip(streams, pieces, strict=True):
                own += stream
            assert [own[-1].output.tokens for own in pieces] == plain
        assert llm.stats()["preemptions"] > 0
        llm.check()


def test_a_whole_context_and_one_token_more(tiny):
    path, prompts, _ = tiny
    ids = (prompts[-2] * 2)[:65]
    with LLM(model=path, **SMALL) as llm:
        assert len(vectors(llm.embed(ids[:64], use_tqdm=False))) == 1
        with pytest.raises(RequestError, match="the prompt has 65 tokens; expected at most 64") as refused:
            llm.embed(ids, use_tqdm=False)
        assert refused.value.param == "prompt"
        cut = llm.embed(ids, truncate_prompt_tokens=-1, use_tqdm=False)[0]
        assert cut.prompt_token_ids == ids[1:]
        cut = llm.embed(ids, truncate_prompt_tokens=3, use_tqdm=False)[0]
        assert cut.prompt_token_ids == ids[-3:]


@pytest.fixture(scope="module")
def pocket():
    with LLM(model="pocket", dtype="float32", max_num_seqs=8, num_kvcache_blocks=300) as llm:
        yield llm


def test_dimensions_cut_and_normalize_again(pocket):
    whole, raw = (
        vectors(pocket.embed("the fox", normalize=normalize, use_tqdm=False))[0] for normalize in (True, False)
    )
    assert abs(np.linalg.norm(whole) - 1) < 1e-6 and abs(np.linalg.norm(raw) - 1) > 0.1
    assert np.abs(raw / np.linalg.norm(raw) - whole).max() < 1e-6
    times = pocket.embed("the fox", use_tqdm=False)[0].metrics
    assert times.first_token_time is None and times.scheduled_time <= times.finished_time
    cut = vectors(pocket.embed("the fox", dimensions=16, use_tqdm=False))[0]
    assert cut.shape == (16,) and np.abs(cut - raw[:16] / np.linalg.norm(raw[:16])).max() < 1e-6
    assert np.array_equal(vectors(pocket.embed("the fox", normalize=False, dimensions=16, use_tqdm=False))[0], raw[:16])


def test_cosines_of_one_vector_and_many_are_those_of_each():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((100, 48)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    found = cosines(rows[3], list(rows))
    assert np.abs(found - [cosine(rows[3], row) for row in rows]).max() < 1e-15
    assert found.argmax() == 3 and found.max() <= 1 and not len(cosines(rows[0], []))


def test_scores_are_cosines(pocket):
    texts = ["a fox", "an owl", "one plus one"]
    fox, owl, sum_ = (np.array(v, np.float64) for v in vectors(pocket.embed(texts, use_tqdm=False)))
    one_to_many = pocket.score(texts[0], texts, use_tqdm=False)
    scores = [out.outputs.score for out in one_to_many]
    assert np.abs(np.array(scores) - [1, fox @ owl, fox @ sum_]).max() < 1e-6 and max(scores) <= 1
    pairs = pocket.score(texts[:2], [texts[1], texts[2]], use_tqdm=False)
    assert np.abs(np.array([out.outputs.score for out in pairs]) - [fox @ owl, owl @ sum_]).max() < 1e-6
    encode = pocket.tokenizer.encode
    assert pairs[0]["prompt_token_ids"] == encode("a fox") + encode("an owl")


@pytest.mark.parametrize(
    "options, text",
    [
        ({"pooling": "max"}, "expected auto, mean, last, cls"),
        ({"dimensions": 0}, "expected 1 to 256"),
        ({"dimensions": 257}, "expected 1 to 256"),
        ({"dimensions": True}, "expected 1 to 256"),
        ({"normalize": 1}, "expected True or False"),
        ({"truncate_prompt_tokens": 0}, "expected -1"),
        ({"pooling_params": 1}, "pass pooling, normalize and dimensions"),
        ({"poling": "mean"}, "unknown keyword 'poling'"),
    ],
)
def test_wrong_options_are_refused_by_name(pocket, options, text):
    with pytest.raises(RequestError, match=text) as refused:
        pocket.embed("a", use_tqdm=False, **options)
    assert refused.value.param == next(iter(options))


def test_wrong_prompts_are_refused_and_nothing_runs(pocket):
    before = pocket.stats()["finished"]
    with pytest.raises(RequestError, match=r"prompt 2 of 2: .*out of range"):
        pocket.embed(["a", [99999]], use_tqdm=False)
    with pytest.raises(RequestError, match="prompt 2 of 2: the prompt is empty"):
        pocket.embed(["a", ""], use_tqdm=False)
    with pytest.raises(RequestError, match="expected one in text_1, or as many"):
        pocket.score(["a", "b"], ["c"], use_tqdm=False)
    assert pocket.embed([], use_tqdm=False) == []
    assert pocket.stats()["running"] == pocket.stats()["waiting"] == 0
    assert pocket.stats()["finished"] - before <= 2, "the first prompts were aborted"


@pytest.mark.parametrize(
    "modules, config, expected",
    [
        (None, None, ("last", "")),
        ("ok", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, ("mean", "")),
        ("ok", {"pooling_mode_lasttoken": True, "word_embedding_dimension": 64}, ("last", "")),
        ("ok", {"pooling_mode": "cls"}, ("cls", "")),
        ("ok", {"pooling_mode_max_tokens": True}, ("", "sets the poolings pooling_mode_max_tokens")),
        ("ok", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("", "sets the poolings")),
        ("ok", None, ("", "which is missing")),
        ("dense", {"pooling_mode_mean_tokens": True}, ("", "a module Dense")),
        ("outside", {"pooling_mode_mean_tokens": True}, ("", "which is missing")),
        ("none", None, ("", "no module of the type Pooling")),
    ],
)
def test_the_pooling_of_a_checkpoint(tmp_path, modules, config, expected):
    kind = "sentence_transformers.models."
    listed = [{"type": kind + "Transformer", "path": ""}, {"type": kind + "Pooling", "path": "1_Pooling"}]
    if modules == "dense":
        listed.append({"type": kind + "Dense", "path": "2_Dense"})
    if modules == "outside":
        listed[1]["path"] = "../1_Pooling"
    if modules == "none":
        listed.pop()
    (tmp_path / "1_Pooling").mkdir()
    if modules is not None:
        (tmp_path / "modules.json").write_text(json.dumps(listed))
    if config is not None:
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    found = default_pooling(tmp_path)
    assert found.name == expected[0] and expected[1] in found.fault
    if expected[0]:
        assert found.chosen("auto") == expected[0]
    else:
        with pytest.raises(RequestError, match="pass the pooling, one of mean, last, cls"):
            found.chosen(None)
    assert found.chosen("mean") == "mean"


def test_many_coroutines_embed_on_one_engine(pocket):
    texts = [f"the {animal} number {i}" for i in range(3) for animal in ("fox", "owl", "hen")]
    alone = vectors(pocket.embed(texts, use_tqdm=False))

    async def run(llm):
        outputs = await asyncio.gather(*(llm.embed(text) for text in texts), llm.embed(texts), llm.score("a", "a"))
        *single, many, scores = outputs
        assert abs(scores[0].outputs.score - 1) < 1e-6
        for found in (vectors([one for (one,) in single]), vectors(many)):
            assert max(np.abs(a - b).max() for a, b in zip(found, alone, strict=True)) < NEAR
        with pytest.raises(RequestError, match="the prompt has"):
            await llm.embed(["a", "b " * 5000])
        task = asyncio.create_task(llm.embed(["long " * 500] * 20))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            stats = await llm.stats()
            if not stats["running"] + stats["waiting"]:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(stats)

    llm = AsyncLLM(model="pocket", dtype="float32", max_num_seqs=8, num_kvcache_blocks=300)
    try:
        asyncio.run(run(llm))
    finally:
        llm.close()
    assert threading.active_count() < 50
