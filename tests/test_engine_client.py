"""Clients of an engine that runs elsewhere: the same tokens and texts, and nothing left behind."""

from __future__ import annotations

import asyncio

import pytest

from minivllm import LLM, EngineDeadError, RequestError, SamplingParams
from minivllm.llm import load
from minivllm.server.client import LocalClient

OPTIONS = dict(model="pocket", max_num_seqs=8, num_kvcache_blocks=300, dtype="float32")
PROMPTS = [f"Once upon a time there was a {animal}" for animal in ("fox", "hen", "cat", "owl")]


def greedy(n=24, **more):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **more)


def mixed(count=64):
    """(prompt, params): lengths, stop strings, several samples, log-probabilities."""
    cases = []
    for i in range(count):
        kinds = [
            greedy(4 + i % 29), SamplingParams(seed=i, max_tokens=20), greedy(12, logprobs=3),
            SamplingParams(n=3, seed=i, max_tokens=10), SamplingParams(temperature=0, max_tokens=40, stop=[" t", "."]),
            SamplingParams(temperature=0, max_tokens=40, stop=["nd"], include_stop_str_in_output=True),
        ]  # fmt: skip
        cases.append((PROMPTS[i % 4] + " who was" * (i % 5), kinds[i % len(kinds)]))
    return cases


def run(task, **options):
    """``task(client)`` on an open client, which is at rest afterwards."""

    async def main():
        client = LocalClient(load(None, {**OPTIONS, **options}))
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
    """Joined by branch: (text, tokens, logprobs, finish_reason, stop_reason), in the order of the answer."""
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


def test_streams_give_what_generate_gives():
    cases = mixed()

    async def task(client):
        asks = [collect(client, *case, f"r{i}", pieces=i % 7 != 0) for i, case in enumerate(cases)]
        return await asyncio.gather(*asks)

    for got, want in zip(run(task, batch_invariant=True), offline(cases), strict=True):
        assert got == want


def offline(cases):
    with LLM(**OPTIONS, batch_invariant=True) as llm:
        found = llm.generate([p for p, _ in cases], [s for _, s in cases], use_tqdm=False)
    return [[(o.text, o.token_ids, o.logprobs or [], o.finish_reason, o.stop_reason) for o in f.outputs] for f in found]


def test_a_refused_request_raises_where_it_was_asked_and_nowhere_else():
    async def task(client):
        good = asyncio.create_task(collect(client, PROMPTS[0], greedy(), "good"))
        for ids, params in (
            ([], greedy()),
            ([10**6], greedy()),
            ([1] * 5000, greedy()),
            ([1], greedy(n=4, extra={"x": 1})),
        ):
            with pytest.raises(RequestError):
                await client.stream(ids, params, "bad")
        with pytest.raises(RequestError, match="function"):
            await client.stream([1], greedy(n=4, choose_fn=lambda logits, ids: 0), "bad")
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
