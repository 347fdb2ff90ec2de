"""Clients of an engine that runs elsewhere: the same tokens and texts, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from minivllm import LLM, EngineDeadError, RequestError, SamplingParams
from minivllm.errors import ConfigError, MinivllmError, ModelError, PluginError, ResourceError
from minivllm.frontend.front_door import load
from minivllm.server.link.client import LocalClient
from minivllm.server.link.process_client import ProcessClient
from minivllm.testing.faulty import FATAL_CHUNK
from minivllm.testing.faulty import TARGETS as FAULTY

OPTIONS = dict(model="pocket", max_num_seqs=32, num_kvcache_blocks=500, dtype="float32", batch_invariant=True)
PROMPTS = [f"Once upon a time there was a {animal}" for animal in ("fox", "hen", "cat", "owl")]


def greedy(tokens=24, **more):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)


def mixed(count=64):
    """(prompt, params): lengths, stop strings, several samples, log-probabilities."""
    cases = []
    for i in range(count):
        kinds = [
            greedy(4 + i % 29),
            SamplingParams(seed=i, max_tokens=20),
            greedy(12, logprobs=3),
            SamplingParams(n=3, seed=i, max_tokens=10),
            SamplingParams(temperature=0, max_tokens=40, stop=[" t", "."]),
            SamplingParams(temperature=0, max_tokens=40, stop=["nd"], include_stop_str_in_output=True),
        ]
        cases.append((PROMPTS[i % 4] + " who was" * (i % 5), kinds[i % len(kinds)]))
    return cases


def run(task):
    """``task(client)`` on an open client, which is at rest afterwards."""

    async def main():
        client = LocalClient(load(None, OPTIONS))
        await client.open()
        try:
            result = await asyncio.wait_for(task(client), 120)
            await rest(client)
            return result
        finally:
            await client.close()

    return asyncio.run(main())


async def rest(client):
    for _ in range(200):
        stats = await client.stats()
        if not (stats["running"] or stats["waiting"]):
            assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
            return
        await asyncio.sleep(0.01)
    raise AssertionError(stats)


async def collect(client, prompt, params, name, **more):
    """Return (text, tokens, logprobs, finish_reason, stop_reason) of each branch, in the order of the answer."""
    stream = await client.stream(client.tokenizer.encode(prompt), params, name, **more)
    joined = {i: ["", [], [], None, None] for i in range(params.n)}
    async for piece in stream:
        at = joined[piece.sample]
        assert at[3] is None, "a piece after the last one"
        at[0] += piece.text
        at[1] += piece.token_ids
        at[2] += piece.logprobs or []
        at[3:] = piece.finish_reason, piece.stop_reason
    assert sum(len(at[1]) for at in joined.values()) == stream.completion_tokens
    assert stream.metrics.arrival_time <= stream.metrics.first_token_time <= stream.metrics.finished_time
    return [tuple(joined[i]) for i in stream.order]


def offline(cases):
    with LLM(**OPTIONS) as llm:
        found = llm.generate([p for p, _ in cases], [s for _, s in cases], use_tqdm=False)
    return [[(o.text, o.token_ids, o.logprobs or [], o.finish_reason, o.stop_reason) for o in f.outputs] for f in found]


def test_a_refused_request_raises_where_it_was_asked_and_nowhere_else():
    async def task(client):
        good = asyncio.create_task(collect(client, PROMPTS[0], greedy(), "good"))
        for ids, params in (
            ([], greedy()),
            ([10**6], greedy()),
            ([1] * 5000, greedy()),
            ([1], greedy(4, extra={"x": 1})),
        ):
            with pytest.raises(RequestError):
                await client.stream(ids, params, "bad")
        with pytest.raises(RequestError, match="function"):
            await client.stream([1], greedy(4, choose_fn=lambda logits, ids: 0), "bad")
        with pytest.raises(RequestError, match="in use"):
            await client.stream([1], greedy(), "good")
        return await good

    assert run(task)[0][3] == "length"


def test_a_closed_client_says_so_and_tells_its_streams():
    async def main():
        client = LocalClient(load(None, OPTIONS))
        assert not client.healthy()[0]
        await client.open()
        assert client.healthy() == (True, "")
        stream = await client.stream([1, 2, 3], greedy(3000), "long")
        await anext(stream)
        assert not await client.close()
        with pytest.raises(EngineDeadError, match="stopped"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDeadError, match="stopped"):
            await client.stream([1], greedy(), "late")
        assert not client.healthy()[0]
        await client.close()

    asyncio.run(main())


@pytest.fixture(scope="module")
def served():
    """Return a function that runs ``task(client)`` on one engine's process for the whole file.

    The engine is at rest afterwards.
    """
    loop = asyncio.new_event_loop()
    client = ProcessClient(load(None, OPTIONS))
    loop.run_until_complete(client.open())

    async def job(task):
        result = await asyncio.wait_for(task(client), 120)
        await rest(client)
        assert not client._streams and not client._ids and not client._accepting and not client._questions
        return result

    yield lambda task: loop.run_until_complete(job(task))
    assert loop.run_until_complete(client.close())
    loop.close()


async def together(client):
    asks = [collect(client, *case, f"r{i}", pieces=i % 7 != 0) for i, case in enumerate(mixed())]
    return await asyncio.gather(*asks)


def test_streams_from_a_process_give_what_generate_gives(served):
    for got, want in zip(served(together), offline(mixed()), strict=True):
        assert got == want


@pytest.mark.slow
def test_streams_from_a_thread_give_what_generate_gives():
    assert run(together) == offline(mixed())


def test_stats_profile_and_reset_reach_the_process(served):
    async def task(client):
        await collect(client, PROMPTS[0], greedy(4), "r")
        assert (await client.stats())["blocks_cached"] > 0
        assert await client.reset_prefix_cache() is True
        assert (await client.stats())["blocks_cached"] == 0
        assert client.healthy() == (True, "")
        await client.profile(True)
        await collect(client, PROMPTS[1], greedy(2), "p")
        path = await client.profile(False)
        assert os.path.getsize(path) > 1000
        os.remove(path)
        assert client.info.max_num_seqs == 32 and client.info.selections["scheduler"] == "minivllm/fcfs"
        assert client.info.kv_tokens % OPTIONS["num_kvcache_blocks"] == 0

    served(task)


def test_a_stop_string_across_pieces_ends_the_branch_here_and_in_the_engine(served):
    async def task(client):
        free = (await collect(client, PROMPTS[0], greedy(40), "free"))[0]
        stop = free[0][len(free[0]) // 2 - 5 : len(free[0]) // 2]  # over token boundaries
        before = (await client.stats())["generated_tokens"]
        stream = await client.stream(client.tokenizer.encode(PROMPTS[0]), greedy(2000, stop=[stop]), "cut")
        pieces = [piece async for piece in stream]
        assert "".join(p.text for p in pieces) == free[0][: free[0].index(stop)]
        assert pieces[-1].finish_reason == "stop" and pieces[-1].stop_reason == stop
        tokens = [t for p in pieces for t in p.token_ids]
        assert tokens == free[1][: len(tokens)] and stream.completion_tokens == len(tokens) < 40
        await rest(client)
        assert (await client.stats())["generated_tokens"] - before < 100, "the engine went on"

    served(task)


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(served):
    async def task(client):
        slow = await client.stream(client.tokenizer.encode(PROMPTS[1]), greedy(60, logprobs=1), "slow")
        fast = await asyncio.gather(*(collect(client, p, greedy(60), f"f{i}") for i, p in enumerate(PROMPTS)))
        await rest(client)  # it has ended in the engine, though nobody has read a word of it
        assert len(slow._pending) == 1, "more than one piece of a branch waits"
        pieces = [piece async for piece in slow]
        assert len(pieces) == 1 and len(pieces[0].logprobs) == len(pieces[0].token_ids) == 60
        assert (pieces[0].text, pieces[0].token_ids) == fast[1][0][:2]

    served(task)


@pytest.mark.parametrize("how", ["aclose", "abort", "cancel", "drop"])
def test_who_leaves_at_any_moment_leaves_nothing_behind(served, how):
    """40 requests on 8 places and few blocks: some wait, some compute their prompt, some run."""

    async def leave(client, i):
        ids = client.tokenizer.encode(PROMPTS[i % 4] + " who was" * (10 * (i % 5)))
        task = asyncio.create_task(client.stream(ids, greedy(2000, n=1 + i % 2), f"r{i}"))
        await asyncio.sleep(0.02 * (i % 10))
        if how == "cancel":
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                await task.result().aclose()
        elif how == "drop":
            await task
            del task
        elif how == "aclose":
            await (await task).aclose()
        else:
            stream = await task
            await client.abort(f"r{i}")
            await client.abort(f"r{i}")
            assert [p async for p in stream][-1].finish_reason == "abort"

    async def task(client):
        await asyncio.gather(*(leave(client, i) for i in range(40)))
        gone = time.monotonic()
        await rest(client)
        assert time.monotonic() - gone < 20  # a second, on a machine with nothing else to do

    served(task)


def test_256_streams_at_once_get_what_each_gets_alone(served):
    kinds = [(PROMPTS[i % 4], SamplingParams(seed=i, max_tokens=6)) for i in range(8)]

    async def task(client):
        alone = [await collect(client, *kind, f"alone{i}") for i, kind in enumerate(kinds)]
        asks = [collect(client, *kinds[i % 8], f"r{i}") for i in range(256)]
        for i, got in enumerate(await asyncio.gather(*asks)):
            assert got == alone[i % 8]

    served(task)


@pytest.mark.parametrize("signal_", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_is_told_to_everybody_at_once(signal_):
    async def main():
        client = ProcessClient(load(None, OPTIONS))
        await client.open()
        streams = [await client.stream([1, 2, 3 + i], greedy(3000), f"r{i}") for i in range(12)]
        await anext(streams[0])
        asking = asyncio.create_task(client.stream([1], greedy(), "asking"))
        await asyncio.sleep(0)
        os.kill(client.pid, signal_)
        killed = time.monotonic()

        async def read(stream):
            async for _ in stream:
                pass

        received = await asyncio.gather(*map(read, streams), asking, return_exceptions=True)
        assert time.monotonic() - killed < 20
        for error in received:
            assert isinstance(error, EngineDeadError) and signal_.name in str(error)
        healthy, why = client.healthy()
        assert not healthy and signal_.name in why
        with pytest.raises(EngineDeadError, match=signal_.name):
            await client.stream([1], greedy(), "late")
        with pytest.raises(EngineDeadError, match=signal_.name):
            await client.stats()
        await client.close()

    asyncio.run(main())


@pytest.mark.slow
def test_an_engine_that_dies_says_why_through_its_process_which_ends_with_status_7():
    async def main():
        client = ProcessClient(
            load(None, {**OPTIONS, "attention": f"{FAULTY}:FaultyAttention", "allow_targets": [FAULTY]})
        )
        await client.open()
        child = client._child
        errors, dead = [], None
        for i in range(4):
            try:
                errors += [
                    p.error async for p in await client.stream([i + 1] * FATAL_CHUNK, greedy(4), f"r{i}") if p.error
                ]
            except EngineDeadError as e:
                dead = str(e)
                break
        assert all("boom" in e for e in errors) and "3 steps failed" in dead and "boom" in dead
        assert client.healthy() == (False, dead)
        assert await asyncio.wait_for(child.wait(), 20) == EngineDeadError.exit_code
        await client.close()

    asyncio.run(main())


def test_a_silent_engine_is_not_healthy(served):
    async def task(client):
        await client.stats()
        os.kill(client.pid, signal.SIGSTOP)
        try:
            client._last_frame -= 6
            healthy, why = client.healthy()
            assert not healthy and "neither run a step nor been idle for 6." in why
        finally:
            os.kill(client.pid, signal.SIGCONT)
        for _ in range(500):
            if client.healthy()[0]:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(client.healthy())

    served(task)


BAD_STARTS = [
    (dict(model="/no/such/model"), ModelError),
    pytest.param(dict(scheduler="fcsf"), PluginError, marks=pytest.mark.slow),
    pytest.param(dict(max_model_len=10**6), ConfigError, marks=pytest.mark.slow),
    pytest.param(dict(num_kvcache_blocks=10**9), ResourceError, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "kind"), BAD_STARTS)
def test_an_engine_that_cannot_start_raises_what_it_raises_in_process(options, kind):
    loaded = load(None, {**OPTIONS, **options})
    with pytest.raises(MinivllmError) as here:
        LLM(config=loaded)

    async def main():
        client = ProcessClient(loaded)
        try:
            await client.open()
        finally:
            assert client.pid is None and not client.healthy()[0]

    with pytest.raises(MinivllmError) as there:
        asyncio.run(main())
    assert type(there.value) is type(here.value) is kind and str(there.value) == str(here.value)
    assert there.value.exit_code == here.value.exit_code


def test_drain_lets_running_requests_finish_and_refuses_new_ones():
    async def main():
        client = ProcessClient(load(None, OPTIONS))
        await client.open()
        running = [asyncio.create_task(collect(client, p, greedy(60), p)) for p in PROMPTS]
        while len(client._ids) < 4:
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(client.close(drain=60))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="shutting down"):
            await client.stream([1], greedy(), "new")
        assert await closing is True
        assert [r[0][3] for r in await asyncio.gather(*running)] == ["length"] * 4

    asyncio.run(main())


@pytest.mark.slow
def test_a_drain_that_is_too_short_tells_who_is_left():
    async def main():
        client = ProcessClient(load(None, OPTIONS))
        await client.open()
        stream = await client.stream([1, 2, 3], greedy(3000), "long")
        begin = time.monotonic()
        assert await client.close(drain=0.3) is False
        assert time.monotonic() - begin < 10
        with pytest.raises(EngineDeadError, match="stopped"):
            async for _ in stream:
                pass

    asyncio.run(main())


PARENT = """
import asyncio, sys
from minivllm.frontend.front_door import load
from minivllm.server.link.process_client import ProcessClient

async def main():
    client = ProcessClient(load(None, {"model": "pocket", "max_num_seqs": 4, "num_kvcache_blocks": 100}))
    opening = asyncio.create_task(client.open())
    while client.pid is None:
        await asyncio.sleep(0.01)
    print(client.pid, flush=True)
    if sys.argv[1] == "running":
        await opening
        print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["loading", pytest.param("running", marks=pytest.mark.slow)])
def test_the_process_ends_with_its_parent_however_that_ends(when):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, when], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        if when == "running":
            assert parent.stdout.readline() == "open\n"
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    for _ in range(1000):
        if not alive(pid):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("the engine's process outlived its parent")


def alive(pid):
    try:
        return f") {'Z'} " not in open(f"/proc/{pid}/stat").read()
    except FileNotFoundError:
        return False
