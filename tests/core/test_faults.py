"""The effects of a fault: it ends one request or one step, and a fault of an evictor or executor ends the engine, with
an error for every request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading

import numpy as np
import pytest

from minivllm import LLM, EngineDeadError, RequestError, SamplingParams
from minivllm.core.interfaces.plan import NAN
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.faulty import TARGETS as FAULTY
from minivllm.testing.sim import answer, at_rest, request, run, sim_engine
from minivllm.testing.tiny import tiny_dir


def outputs(r):
    return [(s.tokens[len(r.prompt) : s.known].tolist(), s.finish_reason) for s in r.sequences]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_token_chosen_for_a_row_never_reaches_the_next_owner_of_its_slot(depth):
    engine = sim_engine(slots=1, depth=depth)
    fn = lambda logits, ids: int(np.argmax(logits))  # noqa: E731
    made = [request(engine, f"r{i}", [i, 2], max_tokens=4, choose_fn=fn) for i in range(6)]
    run(engine, check=True)
    for r in made:
        assert outputs(r) == [answer(r.prompt, r.params)]


@pytest.mark.parametrize("fail_at", range(1, 6))
def test_branches_never_go_on_from_a_prompt_whose_step_failed(fail_at):
    engine = sim_engine(depth=2, budget=8)
    engine.executor.fail_at = {fail_at}
    made = [request(engine, f"r{i}", range(n), n=3, max_tokens=6, ignore_eos=True) for i, n in enumerate((5, 13, 20))]
    run(engine, check=True)  # the simulated device would detect a read of KV that was never written
    for r in made:
        assert all(
            reason == "error" or (t, reason) == answer(r.prompt, r.params, i)
            for i, (t, reason) in enumerate(outputs(r))
        )
    at_rest(engine)


def test_a_prompt_longer_than_a_windows_pool_is_served_in_chunks():
    engine = sim_engine(blocks=[40, 9], windows=(None, 6), budget=64)
    made = [request(engine, f"r{i}", range(i, i + 45), max_tokens=30, ignore_eos=True) for i in range(3)]
    run(engine, check=True)
    for r in made:
        assert outputs(r) == [answer(r.prompt, r.params)]
    at_rest(engine)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("blocks", [15, 17, 21])
def test_protected_rows_that_wait_to_fork_never_block_the_oldest(n, blocks):
    engine = sim_engine(blocks=blocks, slots=8)
    made = [
        request(engine, f"r{i}", range(i, i + 9), n=n if i % 2 else 1, max_tokens=8, ignore_eos=True) for i in range(4)
    ]
    for r in made[1:]:
        r.sequences[0].preempted = 8
    run(engine, limit=2000, check=True)
    for r in made:
        assert outputs(r) == [answer(r.prompt, r.params, i) for i in range(r.params.n)]
    at_rest(engine)


@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_of_one_token_forks_without_an_idle_turn(depth):
    engine = sim_engine(depth=depth)
    r = request(engine, "r", [5], n=3, max_tokens=4, ignore_eos=True)
    while engine.busy:
        assert engine.step(), "a turn in which nothing could run"
    assert outputs(r) == [answer(r.prompt, r.params, i) for i in range(3)]


def test_a_sink_that_raises_ends_its_own_sequence():
    engine = sim_engine()
    made = [request(engine, f"r{i}", [i, 3], max_tokens=10, ignore_eos=True) for i in range(3)]

    def sink(seq, ids, ended):
        raise RuntimeError("full disk")

    made[1].sink, made[1].watch = sink, True
    made[2].on_done = lambda r: 1 / 0
    run(engine, check=True)
    assert made[1].sequences[0].finish_reason == "error" and "full disk" in made[1].sequences[0].error
    for r in (made[0], made[2]):
        assert outputs(r) == [answer(r.prompt, r.params)]
    at_rest(engine)


def test_a_policy_whose_key_fails_refuses_the_request_and_keeps_nothing_of_it():
    class Picky(Fcfs):
        def key(self, new):
            return new.arrival / 0 * np.nan if new.prompt[0] == 13 else new.arrival

    engine = sim_engine(policy=Picky)
    with pytest.raises(RequestError, match="Picky"), np.errstate(all="ignore"):
        request(engine, "bad", range(13), max_tokens=5)
    good = request(engine, "good", range(5), max_tokens=5)
    run(engine)
    assert outputs(good) == [answer(good.prompt, good.params)]
    at_rest(engine)


@pytest.mark.parametrize("where", ["add", "hold", "free", "victims", "hit"])
def test_an_evictor_that_fails_ends_the_engine_and_everyone_is_told(where):
    class Bad(Lru):
        def __getattribute__(self, name):
            if name == where:
                raise RuntimeError("boom")
            return super().__getattribute__(name)

    engine = sim_engine(evictor=Bad, blocks=14, slots=3)
    received = []
    for i in range(12):
        r = request(engine, f"r{i}", range(i % 3, i % 3 + 17), max_tokens=12, ignore_eos=True)
        r.on_done = lambda r: received.append(r.id)
    run(engine)
    assert len(received) == 12 and f"evictor Bad failed in {where}: RuntimeError: boom" in engine.dead
    with pytest.raises(EngineDeadError, match="boom"):
        request(engine, "late", [1])


def test_a_step_without_numbers_is_not_put_into_the_prefix_cache():
    engine = sim_engine()
    collect = engine.executor.collect

    def poisoned(in_flight):
        results = collect(in_flight)
        for r in results:
            r.flags[:] = NAN
            r.count[:] = 0
        return results

    engine.executor.collect = poisoned
    bad = request(engine, "bad", range(20), max_tokens=5)
    run(engine)
    assert bad.sequences[0].finish_reason == "error" and not engine.cache.pools[0].index


def test_aborted_and_cancelled_entries_do_not_pile_up_in_the_queue():
    engine = sim_engine(slots=1)
    request(engine, "long", [1], max_tokens=200, ignore_eos=True)
    engine.step()
    for i in range(3000):
        request(engine, f"r{i}", [2], max_tokens=5)
    for i in random.Random(1).sample(range(3000), 2990):
        engine.abort(f"r{i}")
        (lane,) = engine.planner.waiting.lanes.values()
        assert len(lane.front) + len(lane.back) < 2 * engine.planner.n_waiting + 70
    assert engine.planner.n_waiting == 10
    run(engine)
    at_rest(engine)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_dir(folder, "qwen3", vocab_size=257)
    return dict(model=str(folder), skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=60, max_num_seqs=4)


def long(n=200, **more):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)


def test_what_a_failed_request_has_generated_is_not_lost(tiny):
    with LLM(**tiny) as llm:
        calls = []

        def choose(logits, ids):
            calls.append(1)
            if len(calls) == 5:
                raise RuntimeError("boom")
            return 7

        out = llm.generate([1, 2], long(choose_fn=choose), use_tqdm=False)[0]
        assert out.tokens == [7, 7, 7, 7] and out.finish_reason == "error" and "boom" in out.error


@pytest.mark.parametrize("other", [dict(logprobs=1), dict(allowed_tokens_fn=lambda ids: [1])])
def test_choose_fn_stands_alone(other):
    with pytest.raises(RequestError, match="choose_fn"):
        SamplingParams(choose_fn=lambda logits, ids: 1, **other)


def test_ctrl_c_ends_a_call_between_two_steps_and_the_engine_serves_on(tiny):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore the signal
    with LLM(**tiny) as llm, contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, before)
        want = llm.generate([1, 2, 3], long(20), use_tqdm=False)[0].tokens
        timer = threading.Timer(0.15, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                llm.generate([[1, 2]] * 8, long(), use_tqdm=False)
        assert not llm.engine.busy or not llm.engine.requests
        assert llm.generate([1, 2, 3], long(20), use_tqdm=False)[0].tokens == want


def test_a_stream_that_nobody_reads_is_aborted(tiny):
    with LLM(**tiny) as llm:
        stream = llm.stream([1, 2], long())
        assert llm.engine.requests
        del stream
        assert not llm.engine.requests


def test_a_column_of_a_wrong_shape_refuses_its_request_only(tiny):
    options = dict(processors=[f"{FAULTY}:Misshapen"], allow_targets=[FAULTY])
    with LLM(**tiny, **options) as llm:
        with pytest.raises(RequestError, match=r"column 'x' got shape \(3,\); expected \(2,\)"):
            llm.generate([1, 2], long(3, extra={"wide": True}), use_tqdm=False)
        assert len(llm.generate([1, 2], long(3), use_tqdm=False)[0].tokens) == 3
        with pytest.raises(RequestError, match=r"no processor, sampler or strategy in the config reads it.*'wide'"):
            llm.generate([1, 2], long(3, extra={"wid": True}), use_tqdm=False)


@pytest.mark.parametrize("token", [-1, 10**6, 2**31 + 3, -(2**62)])
@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"presence_penalty": 0.5}], ids=str)
def test_a_sampler_that_draws_no_token_of_the_vocabulary_ends_its_row_and_is_named(tiny, token, more):
    options = dict(sampler=f"{FAULTY}:FaultySampler", allow_targets=[FAULTY])
    with LLM(**tiny, **options) as llm:
        want = llm.generate([1, 2, 3], long(12), use_tqdm=False)[0].tokens
        params = [long(12), long(12, extra={"token": token}, **more), long(12)]
        outs = llm.generate([[1, 2, 3]] * 3, params, use_tqdm=False)
        assert [outs[i].tokens for i in (0, 2)] == [want, want]
        assert outs[1].finish_reason == "error" and not outs[1].tokens
        assert "FaultySampler" in outs[1].error and "not in the vocabulary" in outs[1].error


def test_a_sampler_that_leaves_tokens_of_another_shape_ends_the_rows_that_it_drew(tiny):
    options = dict(sampler=f"{FAULTY}:FaultySampler", allow_targets=[FAULTY])
    with LLM(**tiny, **options) as llm:
        (out,) = llm.generate([[1, 2, 3]], long(12, extra={"misshapen": 1.0}), use_tqdm=False)
        assert out.finish_reason == "error" and "FaultySampler" in out.error and "expected [1] int64" in out.error
        assert len(llm.generate([1, 2], long(3), use_tqdm=False)[0].tokens) == 3


def test_an_aborted_stream_with_logprobs_ends_whole_and_the_thread_lives(tiny):
    llm = AsyncLLM(**tiny)

    async def work():
        stream = llm.generate([1, 2], long(logprobs=2))
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        return [p async for p in llm.generate([1, 2], long(5))]

    try:
        assert asyncio.run(work())[-1].finish_reason == "length"
    finally:
        llm.close()


def test_a_refused_duplicate_id_leaves_the_original_alone(tiny):
    llm = AsyncLLM(**tiny)

    async def collect(n):
        return [p async for p in llm.generate([1, 2], long(n), request_id="same")]

    async def work():
        first = asyncio.create_task(collect(60))
        while not (await llm.stats())["running"]:
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match="in use"):
            await collect(3)
        return await first

    try:
        last = asyncio.run(work())[-1]
        assert last.finish_reason == "length" and len(last.output.tokens) == 60
    finally:
        llm.close()


def test_close_answers_what_is_still_in_the_inbox(tiny):
    llm = AsyncLLM(**tiny)

    async def work():
        tasks = [asyncio.create_task(consume(llm)) for _ in range(20)]
        await asyncio.sleep(0)
        await asyncio.to_thread(llm.close)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)

    async def consume(llm):
        return [p async for p in llm.generate([1, 2], long(100))][-1].finish_reason

    for end in asyncio.run(work()):
        assert end in ("error", "length") or isinstance(end, EngineDeadError)


@pytest.mark.parametrize("params", [dict(repetition_penalty=1.5), dict(logit_bias={5: 10.0}), dict(presence_penalty=1)])
def test_a_parameter_that_nothing_in_the_config_reads_is_refused_and_not_ignored(tiny, params):
    with LLM(**tiny, processors=[]) as llm:
        with pytest.raises(RequestError, match=f"{next(iter(params))} is set, but no processor"):
            llm.generate([1, 2], SamplingParams(max_tokens=2, **params), use_tqdm=False)
        neutral = SamplingParams(max_tokens=2, ignore_eos=True, repetition_penalty=1.0, logit_bias={})
        assert len(llm.generate([1, 2], neutral, use_tqdm=False)[0].tokens) == 2
