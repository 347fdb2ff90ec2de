"""Pauses, updates of weights and sleep, from the view of requests: versions, cached prefixes, open streams, memory."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from devices import DEVICE, on_cpu
from native_runs import engine, prompt
from packed_checkpoints import LLM_SIZES, PROMPT, coded, gptq, packed_dir
from safetensors.torch import load_file, save_file

from minivllm import LLM, AsyncLLM, ConfigError, EngineDeadError, RequestError, SamplingParams
from minivllm.core.engine import tiers
from minivllm.core.engine import weights as engine_weights
from minivllm.core.engine.blocks import BlockPool
from minivllm.device.worker import weights as running_weights
from minivllm.device.worker.runner import Runner
from minivllm.device.worker.weights import RunningWeights
from minivllm.frontend.embedding import EmbedOptions, embed_requests, embedding_output, listed
from minivllm.frontend.record import bill, replay
from minivllm.runtime.processes.memory import rss_bytes
from minivllm.testing.tiny import tiny_dir

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
IDS = {"prompt_token_ids": prompt(30)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny model, and other weights for it."""
    folder, _, _ = tiny_dir(tmp_path_factory.mktemp("weights") / "model", "qwen3", intermediate_size=64)
    torch.manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    return str(folder), {name: t + 0.2 * torch.randn(t.shape) for name, t in tensors.items()}


def started(llm, params=LONG, ids=IDS, tokens=6):
    """Return a stream that has given some tokens."""
    stream = llm.stream(ids, params)
    given = []
    while len(given) < tokens:
        given += next(stream).token_ids
    return stream


def rest(stream):
    """Return the output at the end of a stream."""
    return list(stream)[-1].output.outputs[0]


def answer(llm, ids=IDS, params=GREEDY):
    output = llm.generate(ids, params, use_tqdm=False)[0]
    return output.outputs[0].token_ids, [next(iter(x.values())).logprob for x in output.outputs[0].logprobs]


def test_an_open_stream_continues_with_the_new_weights(tiny):
    folder, tensors = tiny
    with engine(folder) as llm:
        stream = started(llm)
        done = len(llm.engine.requests) and llm.engine.slots.known[0] - 30
        llm.update_weights(tensors)
        output = rest(stream)
        versions = output.weights_versions
        assert versions == [0] * int(done) + [1] * (40 - int(done)) and output.weights_version == 1
        kept = output.token_ids[: int(done)]
        # tokens after the update equal the tokens of the new weights with the whole text before them
        again = llm.generate(
            {"prompt_token_ids": IDS["prompt_token_ids"] + kept},
            SamplingParams(temperature=0, max_tokens=40 - len(kept), ignore_eos=True),
            use_tqdm=False,
        )[0]
        assert output.token_ids == kept + again.tokens
        assert again.outputs[0].weights_versions == [1] * len(again.tokens)
        assert llm.stats()["preemptions"] == 1


def test_keys_and_values_stay_with_kv_keep(tiny):
    folder, tensors = tiny
    with engine(folder) as llm:
        stream = started(llm)
        llm.update_weights(tensors, kv="keep")
        output = rest(stream)
        assert set(output.weights_versions) == {0, 1}
        assert llm.stats()["preemptions"] == 0
        # later requests do not find the kept keys and values
        first = answer(llm)
        assert llm.stats()["prefix_hits"] == 0
        with engine(folder) as other:
            other.update_weights(tensors)
            assert answer(other) == first
        with pytest.raises(RequestError, match="expected recompute or keep"):
            llm.update_weights(tensors, kv="drop")


@pytest.mark.parametrize("kv", ["recompute", "keep"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=3, max_tokens=20, seed=1, ignore_eos=True),
        SamplingParams(beam_width=3, n=3, max_tokens=20, ignore_eos=True, temperature=0),
        SamplingParams(max_tokens=20, prompt_logprobs=1, logprobs=1, ignore_eos=True),
    ],
    ids=["samples", "beams", "scored"],
)
def test_every_kind_of_request_survives_an_update(tiny, params, kv, monkeypatch):
    monkeypatch.setenv("MINIVLLM_CHECK", "1")
    folder, tensors = tiny
    with engine(folder, max_num_seqs=8) as llm:
        stream = llm.stream(IDS, params)
        waiting = llm.stream({"prompt_token_ids": prompt(40, 1)}, LONG)
        for _ in range(4):
            llm.engine.step()
        llm.update_weights(tensors, kv=kv)
        outputs = list(stream)[-1].output.outputs
        assert all(len(out.token_ids) == 20 and out.weights_version == 1 for out in outputs)
        assert len(rest(waiting).token_ids) == 40
        llm.engine.check()


def test_prompts_do_not_find_prefixes_of_older_weights(tiny, tmp_path):
    folder, tensors = tiny
    store = {"name": "disk", "options": {"path": str(tmp_path / "pages"), "bytes": 1 << 24}}
    for options in ({}, {"kvstore": "cpu"}, {"kvstore": store}):
        with engine(folder, **options) as llm:
            old = answer(llm)
            llm.update_weights(tensors)
            hits = llm.stats()["prefix_hits"]
            new = answer(llm)
            assert llm.stats()["prefix_hits"] == hits
            assert new != old
        with engine(folder) as llm:
            llm.update_weights(tensors)
            assert answer(llm) == new


def test_a_load_that_waits_for_room_does_not_find_older_weights(tiny, tmp_path, monkeypatch):
    folder, tensors = tiny
    ids = [{"prompt_token_ids": prompt(60, seed)} for seed in (0, 3)]
    with engine(folder) as llm:
        llm.update_weights(tensors)
        expected = rest(llm.stream(ids[0], GREEDY)).token_ids
    store = {"name": "disk", "options": {"path": str(tmp_path / "pages"), "bytes": 1 << 24}}
    with engine(folder, kvstore=store) as llm:
        for name, one in zip("ab", ids, strict=True):
            answer(llm, one)
            llm.save_prefix(name, one)
        llm.reset_prefix_cache()
        cache_tiers = llm.engine.cache.tiers
        monkeypatch.setattr(tiers, "STAGED", 1)
        monkeypatch.setattr(cache_tiers.choice, "loads", lambda *sizes: True)
        streams = [llm.stream(one, GREEDY) for one in reversed(ids)]
        for _ in range(200):
            if len(cache_tiers.waits) == 2:
                break
            llm.engine.step()
        assert [bool(load.pages) for load in cache_tiers.waits.values()] == [True, False]
        llm.update_weights(tensors)
        outputs = [list(stream)[-1].output for stream in streams]
        assert outputs[1].outputs[0].token_ids == expected and outputs[1].num_cached_tokens == 0
        llm.engine.check()


def test_a_prefix_of_older_weights_would_be_seen(tiny, monkeypatch):
    """Plant a hit: blocks keep their keys over an update."""
    folder, tensors = tiny
    with engine(folder) as llm:
        llm.update_weights(tensors)
        expected = answer(llm)
    monkeypatch.setattr(BlockPool, "reset", lambda self: None)
    monkeypatch.setattr(engine_weights.Weights, "salted", lambda self, salt: salt)
    with engine(folder) as llm:
        answer(llm)
        llm.update_weights(tensors)
        assert answer(llm) != expected


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_an_embedding_in_progress_starts_again(tiny, pooling):
    folder, tensors = tiny
    ids = {"prompt_token_ids": prompt(60)}
    with engine(folder, max_num_batched_tokens=16) as llm:
        options = EmbedOptions.of(llm, pooling, True, None, None)
        tracked = embed_requests(llm, listed([ids]), options, lambda _: None)[0]
        tracked.add_to(llm.engine)
        for _ in range(2):
            llm.engine.step()
        llm.update_weights(tensors)
        while llm.engine.requests:
            llm.engine.step()
        found = embedding_output(tracked, options).outputs.embedding
        llm.reset_prefix_cache()
        again = llm.embed([ids], pooling=pooling, use_tqdm=False)[0].outputs.embedding
        assert np.abs(np.array(found) - np.array(again)).max() < 1e-4


def test_a_record_of_updated_weights_is_not_repeated(tiny, tmp_path):
    folder, tensors = tiny
    path = tmp_path / "run.json"
    with engine(folder, record=str(path)) as llm:
        llm.update_weights(tensors)
        answer(llm)
    record = bill.read(str(path))
    with pytest.raises(ConfigError, match=r"reached version 1 of its weights.*--force"):
        replay.check(record, record, "run.json")
    notes = replay.check(record, record, "run.json", force=True)
    assert any("has the weights of the model's files" in note for note in notes)


def test_paused_requests_wait_or_end(tiny):
    folder, _ = tiny
    with engine(folder) as llm:
        stream = started(llm)
        llm.pause()
        steps = llm.stats()["generated_tokens"]
        for call in (lambda: answer(llm), lambda: list(stream)):
            with pytest.raises(RequestError, match="resume it first"):
                call()
        assert llm.stats()["generated_tokens"] == steps and llm.stats()["weights"]["paused"]
        llm.resume()
        assert len(rest(stream).token_ids) == 40
        stream = started(llm)
        llm.pause(keep_requests=False)
        assert rest(stream).finish_reason == "abort"
        llm.resume()
        assert len(answer(llm)[0]) == 8


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_frees_its_memory_and_answers_alike_afterwards(tmp_path, level):
    folder, _, _ = tiny_dir(tmp_path / "model", "qwen3", hidden_size=512, intermediate_size=4096, num_hidden_layers=4)
    many = [{"prompt_token_ids": prompt(100, seed)} for seed in range(8)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with engine(str(folder), num_kvcache_blocks=4000, max_num_seqs=4, max_num_batched_tokens=512) as llm:
        want = [out.tokens for out in llm.generate(many, params, use_tqdm=False)]
        stream = started(llm)
        weights = llm.engine.capacity.weight_bytes
        cache = llm.engine.call("kv_resident")
        before = rss_bytes()
        llm.sleep(level)
        freed = before - rss_bytes()
        assert freed > 0.9 * cache + (0.8 * weights if level == 2 else 0)
        assert llm.engine.call("kv_resident") < 0.1 * cache
        assert llm.stats()["weights"]["sleep_level"] == level
        for call in (lambda: answer(llm), lambda: list(stream), llm.resume, lambda: llm.sleep(level)):
            with pytest.raises(RequestError, match="sleeps"):
                call()
        llm.wake()
        assert len(rest(stream).token_ids) == 40
        assert [out.tokens for out in llm.generate(many, params, use_tqdm=False)] == want
        with pytest.raises(RequestError, match="does not sleep"):
            llm.wake()


@pytest.mark.parametrize("options", [{}, {"graph": "off"}, {"executor": "process"}], ids=["native", "eager", "process"])
def test_weights_may_come_while_the_engine_sleeps(tiny, options):
    folder, tensors = tiny
    with engine(folder, **options) as llm:
        old = answer(llm)
        llm.update_weights(tensors)
        new = answer(llm)
        llm.sleep(1)
        with pytest.raises(RequestError, match="wake the engine"):
            llm.update_weights(tensors)
        llm.wake()
        assert answer(llm) == new
        llm.sleep(2)
        with pytest.raises(RequestError, match="partial=False"):
            llm.update_weights(tensors, partial=True)
        llm.update_weights(tensors)
        llm.wake()
        assert answer(llm) == new and llm.stats()["weights"]["version"] == 2
        llm.sleep(2)
        llm.wake()  # reads the files of the model
        assert answer(llm) == old and llm.stats()["weights"]["version"] == 3
        with pytest.raises(RequestError, match="expected 1 or 2"):
            llm.sleep(3)


@pytest.mark.parametrize(("architecture", "level"), [("qwen3", 1), ("qwen3", 2), ("qwen3_5", 1)])
def test_pages_of_tiers_outlast_a_sleep(tmp_path, monkeypatch, architecture, level):
    """``qwen3_5`` has recurrent states, whose copies are ordered when the KV cache is emptied."""
    folder, _, _ = tiny_dir(tmp_path / "model", architecture, num_hidden_layers=4)
    store = {"name": "disk", "options": {"path": str(tmp_path / "pages"), "bytes": 1 << 24}}
    ids = {"prompt_token_ids": prompt(60)}
    with engine(str(folder), kvstore=store) as llm:
        cache_tiers = llm.engine.cache.tiers
        monkeypatch.setattr(cache_tiers.choice, "loads", lambda *sizes: True)
        want = answer(llm, ids)
        llm.sleep(level)
        assert not cache_tiers.rows and not cache_tiers.backlog
        llm.wake()
        output = llm.generate(ids, GREEDY, use_tqdm=False)[0]
        assert output.tokens == want[0] and output.num_cached_tokens > 0
        llm.engine.check()


def test_a_pause_outlasts_a_sleep(tiny):
    folder, _ = tiny
    with engine(folder) as llm:
        llm.pause()
        llm.sleep()
        with pytest.raises(RequestError, match="a pause continues after it"):
            llm.resume()
        llm.wake()
        with pytest.raises(RequestError, match="resume it first"):
            answer(llm)
        llm.resume()
        assert len(answer(llm)[0]) == 8


def test_a_failed_update_of_a_sleeping_engine_can_be_repeated(tiny, monkeypatch):
    from minivllm.device.loading.weight_update import WeightUpdate

    folder, tensors = tiny
    write = WeightUpdate.write

    def broken(self):
        raise RuntimeError("planted")

    with engine(folder) as llm:
        old = answer(llm)
        llm.sleep(2)
        monkeypatch.setattr(WeightUpdate, "write", broken)
        with pytest.raises(RequestError, match="undefined until the next update"):
            llm.update_weights(tensors)
        with pytest.raises(RequestError, match="still sleeps"):
            llm.wake()
        monkeypatch.setattr(WeightUpdate, "write", write)
        llm.wake()
        assert answer(llm) == old


@on_cpu
def test_an_update_survives_a_lack_of_memory_for_native_steps(tiny, monkeypatch):
    """The new weights serve without cached prefixes of the old ones, and the next update makes native steps again."""
    folder, tensors = tiny

    def scarce(self):
        raise MemoryError("planted")

    with engine(folder, graph="off") as other:
        other.update_weights(tensors)
        tokens = answer(other)[0]
    with engine(folder) as llm:
        answer(llm)
        with monkeypatch.context() as m:
            m.setattr(Runner, "native_steps", scarce)
            assert llm.update_weights(tensors) == 1
        hits = llm.stats()["prefix_hits"]
        assert answer(llm)[0] == tokens and llm.stats()["prefix_hits"] == hits
        assert llm.update_weights(tensors) == 2
        assert answer(llm)[0] == tokens
        assert llm.engine.executor.runner.native is not None


def test_an_update_that_does_not_end_ends_the_engine(tiny, monkeypatch):
    folder, tensors = tiny

    def broken(self):
        raise RuntimeError("planted")

    with engine(folder) as llm:
        monkeypatch.setattr(RunningWeights, "_commit", broken)
        for call in (lambda: llm.update_weights(tensors), lambda: answer(llm)):
            with pytest.raises(EngineDeadError, match=r"did not end: .*planted"):
                call()


@on_cpu
@pytest.mark.parametrize("dropped", [False, True])
def test_a_failed_sleep_says_whether_weights_were_read_again(tiny, monkeypatch, dropped):
    folder, tensors = tiny
    discard = running_weights.discard_pages

    def broken(address, size):
        weights = llm.engine.executor.runner.weights
        if weights.dropped == dropped:
            raise OSError("planted")
        discard(address, size)

    with engine(folder) as llm:
        old = answer(llm)
        llm.update_weights(tensors)
        new = answer(llm)
        with monkeypatch.context() as m:
            m.setattr(running_weights, "discard_pages", broken)
            with pytest.raises(RequestError, match="did not sleep") as caught:
                llm.sleep(2)
        assert ("read from the files of the model again" in str(caught.value)) == dropped
        assert llm.stats()["weights"] == {"version": 1 + dropped, "paused": False, "sleep_level": 0}
        assert answer(llm) == (old if dropped else new)
        assert llm.engine.executor.runner.native is not None


def same(found, want):
    """Return whether answers are equal, with bits on a CPU; a GPU computes a cached prompt in another kernel."""
    near = DEVICE != "cpu" and np.allclose(found[1], want[1], atol=1e-4)
    return found == want or (found[0] == want[0] and near)


@pytest.mark.parametrize("form", ["packed", "other"])
def test_weights_that_cannot_be_written_again_are_not_dropped(tiny, tmp_path, form, monkeypatch):
    if form == "packed":
        config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
        packed_dir(tmp_path, config, lambda name, n, k: coded(n, k, 4, 32), lambda c, name: gptq(c, 4))
        llm, prompts = LLM(model=str(tmp_path), **LLM_SIZES), PROMPT
    else:
        llm, prompts = engine(tiny[0], quantizer="int8"), IDS
    with llm:
        if form == "other":
            monkeypatch.setattr(llm.engine.executor.runner.worker.parts, "_scheme", lambda info: None)
        tokens = answer(llm, prompts)
        with pytest.raises(RequestError, match="use level=1"):
            llm.sleep(2)
        assert llm.stats()["weights"]["sleep_level"] == 0
        assert same(answer(llm, prompts), tokens)
        llm.sleep(1)
        llm.wake()
        assert same(answer(llm, prompts), tokens)


def test_async_requests_wait_while_the_engine_is_paused_or_asleep(tiny):
    folder, tensors = tiny

    async def tokens(llm):
        async for piece in llm.generate(IDS, GREEDY):
            last = piece
        return last.output.outputs[0]

    async def run():
        options = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128, "num_kvcache_blocks": 64}
        async with AsyncLLM(model=folder, **options) as llm:
            await llm.pause()
            waiting = asyncio.ensure_future(tokens(llm))
            while (await llm.stats())["waiting"] == 0:
                await asyncio.sleep(0.01)
            assert await llm.update_weights(tensors) == 1
            await llm.resume()
            assert (await waiting).weights_version == 1
            await llm.sleep(1)
            waiting = asyncio.ensure_future(tokens(llm))
            while (await llm.stats())["waiting"] == 0:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            await llm.wake()
            assert len((await waiting).token_ids) == 8

    asyncio.run(asyncio.wait_for(run(), 120))


def test_executors_without_weights_refuse_by_name(tiny):
    folder, _ = tiny
    with engine(folder, executor="sim") as llm:
        with pytest.raises(RequestError, match="Sim"):
            llm.update_weights("/tmp")
        with pytest.raises(RequestError, match="Sim"):
            llm.sleep()


def test_a_worker_that_dies_ends_the_engine(tiny, tmp_path):
    folder, tensors = tiny
    save_file(tensors, tmp_path / "model.safetensors")
    with engine(folder, executor="process") as llm:
        answer(llm)
        llm.engine.executor._child.end(1.0)
        with pytest.raises(EngineDeadError):
            llm.update_weights(tmp_path)
        with pytest.raises(EngineDeadError):
            answer(llm)
