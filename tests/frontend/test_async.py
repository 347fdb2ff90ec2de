"""The asynchronous front door: streams, aborts and refusals of many coroutines on one engine."""

from __future__ import annotations

import asyncio

import pytest

from minivllm import EngineDeadError, RequestError, SamplingParams
from minivllm.frontend.async_llm import AsyncLLM

OPTIONS = dict(model="pocket", max_num_seqs=8, num_kvcache_blocks=300, dtype="float32")


@pytest.fixture(scope="module")
def llm():
    made = AsyncLLM(**OPTIONS)
    yield made
    made.close()


def greedy(n=24, **more):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)


async def collect(llm, prompt, params):
    return [piece async for piece in llm.generate(prompt, params)]


def at_rest(llm):
    async def settle():
        for _ in range(100):
            stats = await llm.stats()
            if not (stats["running"] or stats["waiting"]):
                return stats
            await asyncio.sleep(0.02)
        raise AssertionError(stats)

    stats = asyncio.run(settle())
    assert stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]


def test_the_pieces_of_many_streams_make_their_outputs(llm):
    prompts = [f"Once upon a time there was a {animal}" for animal in ("fox", "hen", "cat", "owl")] * 4

    async def run():
        return await asyncio.gather(*(collect(llm, p, greedy()) for p in prompts))

    alone = asyncio.run(collect(llm, prompts[0], greedy()))[-1].output.text
    for prompt, pieces in zip(prompts, asyncio.run(run()), strict=True):
        last = pieces[-1]
        assert last.finished and not any(p.finished for p in pieces[:-1])
        assert "".join(p.delta for p in pieces) == last.output.text
        assert [token for p in pieces for token in p.token_ids] == last.output.tokens
        if prompt == prompts[0]:
            assert last.output.text == alone
    at_rest(llm)


def test_leaving_a_stream_frees_its_blocks_within_a_step(llm):
    async def run():
        stream = llm.generate("Once upon a time", greedy(3000))
        got = [await anext(stream) for _ in range(3)]
        await stream.aclose()
        return got, await llm.stats()  # after the abort, because the engine's thread runs both in order

    got, stats = asyncio.run(run())
    assert len(got) == 3 and stats["running"] == 0
    at_rest(llm)


def test_cancelling_a_task_aborts_its_request(llm):
    async def run():
        task = asyncio.create_task(collect(llm, "Once upon a time", greedy(3000)))
        while (await llm.stats())["running"] == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await llm.stats()

    assert asyncio.run(run())["running"] == 0
    at_rest(llm)


def test_abort_by_id_ends_the_stream_with_what_there_is(llm):
    async def run():
        pieces = []
        async for piece in llm.generate("Once upon a time", greedy(3000), request_id="mine"):
            pieces.append(piece)
            if len(pieces) == 4:
                llm.abort("mine")
                llm.abort("never was")
        return pieces

    pieces = asyncio.run(run())
    assert pieces[-1].finished and pieces[-1].finish_reason == "abort" and len(pieces[-1].output.tokens) >= 4
    at_rest(llm)


def test_a_refused_request_raises_where_it_was_asked_and_nowhere_else(llm):
    async def run():
        good = asyncio.create_task(collect(llm, "There was a fox", greedy()))
        for bad in ([], [10**6], "word " * 5000):
            with pytest.raises(RequestError):
                await collect(llm, bad, greedy())
        with pytest.raises(RequestError, match="temperature"):
            await collect(llm, "x", {"temperature": -1})
        return await good

    assert asyncio.run(run())[-1].finish_reason == "length"
    at_rest(llm)


def test_a_closed_engine_says_so():
    made = AsyncLLM(**OPTIONS)

    async def run():
        stream = made.generate("Once upon a time", greedy(3000))
        await anext(stream)
        made.close()
        made.close()
        last = [piece async for piece in stream][-1]
        with pytest.raises(EngineDeadError, match="stopped"):
            await collect(made, "again", greedy())
        return last

    assert asyncio.run(run()).finish_reason == "error"
