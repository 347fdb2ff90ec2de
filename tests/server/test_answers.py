"""Answers whose size a client chooses.

They are written in bounded parts, and the JSON is the same with any division.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_engine_loop import Wired

from minivllm.core.interfaces.plan import LogProbs
from minivllm.pocket import checkpoint
from minivllm.runtime.text.outputs import Logprob
from minivllm.runtime.text.tokenizer import load_tokenizer
from minivllm.server.errors import ApiError
from minivllm.server.fair_slots import MOST_WAITING, FairSlots
from minivllm.server.http.sse import LongAnswer
from minivllm.server.link import engine_loop
from minivllm.server.link.pace import SHARED_LEAST, TURN
from minivllm.server.link.scored import Columns, Scored, ScoredToken
from minivllm.server.openai import answers, logprobs
from minivllm.server.openai.answers import Shaper, Slices, Stretch, TokenScores
from minivllm.server.openai.logprobs import Speller
from minivllm.server.pool_jobs import make
from minivllm.testing.sim import sim_engine


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(Path(checkpoint.__file__).parent / "model"))


def columns(n, k, seed=0, vocab=300, bare=0):
    """Scores of n tokens with up to k of the best, ties, tokens without probability and ``bare`` rows without any."""
    rng, found = np.random.default_rng(seed), Scored()
    for i in range(n):
        ids = rng.choice(vocab, rng.integers(0, k + 1), replace=False)
        top = np.sort(rng.choice([-0.25, -0.5, -1.0, -2.0, -math.inf], len(ids)))[::-1].astype(np.float32)
        own = int(ids[rng.integers(len(ids))]) if len(ids) and i % 2 else int(rng.integers(vocab))
        value = dict(zip(ids.tolist(), top.tolist(), strict=True)).get(own, -3.0)
        one = (
            np.array([own], np.int32),
            np.float32([value]),
            np.int32([0 if i < bare else 1 + i % 7]),
            np.int32([len(ids)]),
            ids.astype(np.int32),
            top,
        )
        found.extend(Scored.unpack(column.tobytes() for column in one))
    return found


class NearPool:
    """A worker pool without processes.  Jobs and results are bytes all the same."""

    def __init__(self, tokenizer):
        received = None if tokenizer is None else tokenizer.to_json()
        self.work, self.requested = (
            make(json.dumps({"tokenizer": received, "seconds": 5, "megabytes": 256}).encode()),
            [],
        )

    async def shape(self, requested, packed, who):
        self.requested.append(sum(map(len, packed)))
        return self.work({"op": "shape", **requested}, packed)[1:]

    async def places(self, tokens, skip, begin, prompt, who):
        job = {"op": "places", "skip": skip, "begin": begin, "given": prompt is not None}
        found = self.work(job, [np.asarray(tokens, np.int64).tobytes(), (prompt or "").encode()])
        return np.frombuffer(found[1], np.int64)


def written(answer, pool, tokenizer, speller=None):
    async def main():
        shaper = Shaper(pool, tokenizer, speller or Speller(tokenizer), "a")
        return [piece async for piece in answers.pieces(answer, shaper, Slices())]

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["chat", "prompt", "completion"])
@pytest.mark.parametrize("n, k", [(0, 0), (1, 0), (1, 20), (7, 3), (400, 0), (300, 20), (40, 299)])
@pytest.mark.parametrize("style", ["text", "ids", "bare"])
def test_an_answer_is_the_same_however_its_scores_are_cut(monkeypatch, tokenizer, kind, n, k, style):
    scored = columns(n, k, seed=n + k, bare=min(n, 2))
    speller = Speller(tokenizer, style == "ids", style != "bare")
    if kind == "completion":
        leaf = answers.CompletionScores([Stretch(scored, False, 0, None, 500), Stretch(scored, True, 9, None, 30)], k)
        rows = [*scored.rows(), *scored.rows()]
        places = [min(int(at), 500) for at in answers.places(tokenizer, scored.tokens, False, 0, None)]
        places += [min(int(at), 30) for at in answers.places(tokenizer, scored.tokens, True, 9, None)]
        want = {"text_offset": places, **logprobs.completion(rows, k, speller)}
    else:
        leaf = TokenScores(kind, scored, k)
        want = logprobs.chat(scored.rows(), k, speller) if kind == "chat" else logprobs.prompt(scored.rows(), speller)
    answer = {"id": "x", "choices": [{"index": 0, "logprobs": {"content": leaf}}, {"index": 1}], "more": leaf, "z": {}}
    want = json.loads(
        json.dumps(
            {"id": "x", "choices": [{"index": 0, "logprobs": {"content": want}}, {"index": 1}], "more": want, "z": {}}
        )
    )
    for at_once, job in ((0, 1), (0, 50), (100, 1000), (10**9, 10**9)):
        monkeypatch.setattr(answers, "AT_ONCE", at_once)
        monkeypatch.setattr(answers, "FEW", at_once)
        monkeypatch.setattr(answers, "JOB", job)
        monkeypatch.setattr(answers, "PIECE", 100)
        pool = NearPool(tokenizer)
        assert json.loads(b"".join(written(answer, pool, tokenizer, speller))) == want
        assert bool(pool.requested) == (at_once == 0 and n > 0) or at_once == 100


def test_the_event_loop_shapes_few_scores_of_an_answer_whatever_its_size(tokenizer, monkeypatch):
    """And no job of the worker pool has more than it may."""
    here, shaped = [], answers.shaped
    near = NearPool(tokenizer)
    work = near.work

    def elsewhere(job, parts):
        before = len(here)
        found = work(job, parts)
        del here[before:]
        return found

    def counted(kind, rows, top, speller):
        rows = list(rows)
        here.append(sum(1 + len(row.top) for row in rows))
        return shaped(kind, iter(rows), top, speller)

    near.work = elsewhere
    monkeypatch.setattr(answers, "shaped", counted)
    for n, k in ((5, 3), (3000, 20), (30, 250)):
        here.clear()
        near.requested.clear()
        leaf = answers.CompletionScores([Stretch(columns(n, k), False, 0, None, 10**6)], k)
        answer = {
            "choices": [{"logprobs": leaf, "prompt_logprobs": TokenScores("prompt", leaf.stretches[0].scored)}] * 3
        }
        found = written(answer, near, tokenizer)
        assert sum(here) <= answers.AT_ONCE
        assert all(size <= 8 * answers.JOB + 16 * 8192 for size in near.requested) and (n < 100 or near.requested)
        assert all(len(piece) < answers.PIECE + 256 * answers.JOB for piece in found)


@pytest.mark.parametrize("most", [1, 2, 7, 64, 10**6])
def test_parts_follow_one_another_and_exceed_their_weight_only_as_single_tokens(most):
    scored = columns(90, 9, seed=most)
    for low in (0, 1, 90):
        at = low
        for a, b in scored.parts(most, low):
            assert a == at < b and (scored.weight(a, b) <= most or b == a + 1)
            at = b
        assert at == 90
    joined = Scored()
    for a, b in scored.parts(most):
        joined.extend(scored.cut(a, b))
    assert list(joined.rows()) == list(scored.rows()) == list(Scored.unpack(scored.pack()).rows())


def test_columns_are_the_entries_that_an_llm_gives():
    prompt = np.array([4, 5, 6, 7], np.int32)
    lp = LogProbs(
        np.float32([-1, -2]), np.int32([2, 3]), np.int32([[9, 5], [1, 2]]), np.float32([[-0.5, -1], [-0.5, -0.5]])
    )
    later = LogProbs(np.float32([-4]), np.int32([1]), np.int32([[8]]), np.float32([[-math.inf]]))
    found = Scored.of_prompt(prompt, [(1, lp), (2, later)], str)
    assert found == [
        None,
        {5: Logprob(-1.0, 2, "5"), 9: Logprob(-0.5, 1, "9")},
        {6: Logprob(-4.0, 1, "6")},
        None,
    ]
    assert found[1:2] == [found[1]] and len(found) == 4 and found[-3] == found[1]
    table = {
        "chosen": np.float32([-1, -2]),
        "rank": np.int32([1, 2]),
        "tops": np.int32([2, 0]),
        "top_ids": np.int32([3, 4]),
        "top": np.float32([-1, -2]),
    }
    taken = Columns(table)
    assert list(taken.take([3]).rows()) == [ScoredToken(3, -1.0, 1, [3, 4], [-1.0, -2.0])]
    assert taken.take([6]) == [{6: Logprob(-2.0, 2)}]


# ---- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{}, {"logprobs": 3}, {"n": 5, "logprobs": 0}, {"n": 3, "logprobs": 9}], ids=str)
@pytest.mark.parametrize("watch", [False, True])
def test_a_turn_sends_bounded_frames_and_an_answer_is_the_same_in_however_many(monkeypatch, params, watch):
    def answered(frame):
        monkeypatch.setattr(engine_loop, "FRAME", frame)

        async def main():
            client, sizes = Wired(sim_engine(slots=8, budget=64, blocks=400)), []
            send = client.send

            def counted(header, columns):
                sizes.append(max((len(column) for column in columns.values()), default=0))
                send(header, columns)

            client.send = counted
            requested = dict(max_tokens=40, ignore_eos=True, prompt_logprobs=4, seed=3, **params)
            tasks = [
                asyncio.create_task(client.stream(range(50), made(**requested), f"r{i}", pieces=watch))
                for i in range(2)
            ]
            await asyncio.sleep(0)
            while client.loop.live or client.inbox:
                client.loop.turn()
                await asyncio.sleep(0)
            found = []
            for stream in [await task for task in tasks]:
                scored = [list(map(tuple, one.rows())) for one in stream.scored or ()]
                ids = [text.token_ids for text in stream.texts]
                found.append((ids, scored, list(map(tuple, stream.prompt_logprobs.rows())), stream.order))
                assert [len(one) for one in ids] == [40] * len(ids) and found[-1][2][1][2] > 0
            return found, sizes

        return asyncio.run(asyncio.wait_for(main(), 60))

    whole, sizes = answered(10**9)
    for frame in (1, 64, 200):
        cut, small = answered(frame)
        assert cut == whole and max(small) <= max(frame, engine_loop.TOKEN) + 60
        assert len(small) > len(sizes)


def made(**requested):
    from minivllm import SamplingParams

    return SamplingParams.make(**requested)


# ---- how long others wait --------------------------------------------------------------------------------------------


def test_prompts_of_one_owner_have_short_steps_beside_another(monkeypatch):
    """Scored or not: it is the time that counts."""

    async def main(owners):
        client, seen = Wired(sim_engine(slots=8, budget=512, blocks=400)), []
        fixed = SimpleNamespace(note=lambda *step: None, most=lambda context, turn, least: 60 if turn == TURN else 20)
        client.loop.paces = fixed, fixed
        planned = client.engine.planner.next

        def noted(now):
            plan = planned(now)
            if plan is not None:
                seen.append(int(plan.q_len.sum() - (plan.q_len == 1).sum()))
            return plan

        client.engine.planner.next = noted
        tasks = []
        for i, owner in enumerate(owners):
            params = made(max_tokens=30, ignore_eos=True, prompt_logprobs=2 if i else None)
            prompt = [3] * 200 if i else [1, 2]
            tasks.append(asyncio.create_task(client.stream(prompt, params, f"r{i}", owner=owner)))
            await asyncio.sleep(0)
            client.loop.turn()
        for _ in range(12):
            client.loop.turn()
        for task in tasks:
            await (await task).aclose()
        client.rest()
        return max(seen[1:])

    assert asyncio.run(main(["a", "b"])) <= 20 < asyncio.run(main(["a", "a"])) <= 60


def test_what_rows_take_anyway_does_not_shorten_prompts():
    """Of a step with 200 rows that decode in 60 ms and prompts beside them."""
    client = Wired(sim_engine(slots=8, budget=64, blocks=400))
    loop, budget = client.loop, client.engine.planner.max_tokens
    assert loop.shared_least == SHARED_LEAST["cpu"] and all(found.budget == budget for found in loop.paces)
    noted = []
    loop.paces = (SimpleNamespace(note=lambda *step: noted.append(step)),) * 2
    decodes = SimpleNamespace(q_len=np.ones(200, np.int32), computed=np.full(200, 30), prompt=())
    loop._note([decodes], 0.06)
    q_len, computed = np.array([1] * 200 + [1000], np.int32), np.array([31] * 200 + [500])
    loop._note([SimpleNamespace(q_len=q_len, computed=computed, prompt=())], 0.11)
    assert noted == [(1000, 1000.0, pytest.approx(0.05))]


def test_parts_of_answers_wait_for_their_turn_and_are_not_refused():
    async def main():
        turns = FairSlots(range(2))
        seat = await turns.take("a")
        waiting = [asyncio.create_task(turns.take("a", refuses=False)) for _ in range(MOST_WAITING + 9)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError):
            await turns.take("a")
        turns.give("b", await turns.take("b"))  # another has a seat at once
        for one in waiting:
            turns.give("a", seat)
            seat = await one
        turns.give("a", seat)
        assert not len(turns)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_of_many_answers_one_at_a_time_has_a_slice_of_the_loop():
    async def main():
        slices, rounds, at = Slices(), [], 0

        async def long():
            for _ in range(5):
                await slices.next()
                rounds.append(at)

        tasks = [asyncio.create_task(long()) for _ in range(20)]
        while not all(task.done() for task in tasks):
            at += 1
            await asyncio.sleep(0)
        assert len(rounds) == 100 and max(map(rounds.count, rounds)) <= 2

    asyncio.run(main())


def test_a_long_answer_that_fails_on_the_way_has_no_end():
    with pytest.raises(ApiError):
        LongAnswer._final(LongAnswer.__new__(LongAnswer), ApiError(500, "the worker pool is gone"))
