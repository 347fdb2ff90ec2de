"""The engine's loop behind a link, on a simulated device: an abort frees everything at once, whatever the state."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import EngineDeadError, RequestError, SamplingParams
from minivllm.core.engine.request import RUNNING, WAITING
from minivllm.errors import PluginError
from minivllm.server.link.client import EngineClient
from minivllm.server.link.engine_loop import EngineLoop
from minivllm.server.link.frames import decode, encode
from minivllm.testing.sim import answer, at_rest, sim_engine

RECEIVED = dict(
    model="sim",
    max_model_len=256,
    vocab_size=50,
    kv_tokens=252,
    max_num_seqs=8,
    max_logprobs=20,
    selections={},
    sampling={},
    version="0",
    device="cpu",
    dtype="float32",
    reads=[],
    tap_points={},
    energy="",
    weight_bytes=0,
    shape={},
    hidden=0,
    pooling="last",
    pooling_fault="",
    for_embeddings=False,
    explained=[],
    images={},
    block=4,
    forms=["json"],
)


class Wired(EngineClient):
    """A client and a loop in one thread: all that passes between them is encoded, and a turn is taken on demand."""

    def __init__(self, engine):
        super().__init__()
        self.engine, self.inbox = engine, deque()
        self.loop = EngineLoop(engine, self)
        self._opened(RECEIVED)

    def _send(self, kind, header, columns=None):
        self.inbox.append(decode(encode(kind, header, columns)[4:]))

    def receive(self, seconds):
        found = list(self.inbox)
        self.inbox.clear()
        return found

    def send(self, header, columns):
        frame = decode(encode("frame", header, columns)[4:])
        self._on_frame(frame.header, frame.columns)

    async def add(self, prompt, name, **params):
        task = asyncio.create_task(self.stream(prompt, SamplingParams.make(**params), name))
        await asyncio.sleep(0)
        self.loop.turn()
        return await task

    def rest(self):
        """At most the steps that were in flight are still to come."""
        for _ in range(4):
            self.loop.turn()
        at_rest(self.engine)
        assert not self.loop.live and not self._streams and not self._ids


def state_of(client, name):
    seq = client.engine.requests[name].sequences[0]
    if seq.status == WAITING:
        return "preempted" if seq.preempted else "waiting"
    if seq.status == RUNNING:
        return "prefilling" if client.engine.slots.collected[seq.slot] <= len(seq.request.prompt) else "running"
    return "finished"


async def reach(client, state, n):
    """A request in that state, beside others."""
    beside = [await client.add(range(i, i + 9), f"o{i}", max_tokens=40, ignore_eos=True) for i in range(3)]
    prompt = range(48) if state == "prefilling" else range(9)
    mine = await client.add(prompt, "mine", max_tokens=60 if n == 1 else 25, ignore_eos=True, n=n)
    for _ in range(400):
        if "mine" in client.engine.requests and state_of(client, "mine") == state:
            return mine, beside
        if state != "prefilling":
            client.loop.turn()
    raise AssertionError(f"never {state}")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("state", ["waiting", "prefilling", "running", "preempted"])
@pytest.mark.parametrize("how", ["aclose", "abort"])
def test_an_abort_frees_the_blocks_before_the_next_step_in_every_state(state, depth, n, how):
    options = {"waiting": dict(slots=3), "preempted": dict(blocks=26), "prefilling": dict(budget=12)}.get(state, {})

    async def main():
        client = Wired(sim_engine(depth=depth, **{"slots": 8, **options}))
        mine, beside = await reach(client, state, n)
        await (mine.aclose() if how == "aclose" else client.abort("mine"))
        client.loop.turn()
        assert "mine" not in client.engine.requests and 4 not in client.loop.live
        client.engine.cache.check()
        if how == "abort":
            last = [piece async for piece in mine]
            assert {p.sample for p in last if p.finish_reason == "abort"} == set(range(n))
        for other in beside:
            await other.aclose()
        client.rest()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_one_branch_that_is_cut_ends_alone_and_gives_its_blocks_back():
    async def main():
        client = Wired(sim_engine())
        stream = await client.add(range(7), "r", max_tokens=12, ignore_eos=True, n=2)
        for _ in range(4):
            client.loop.turn()
        client._cut(stream, 0, "stop")
        stream.open.discard(0)
        for _ in range(12):
            client.loop.turn()
        assert [s.finish_reason for s in client.engine.requests.values()] == []
        got = [t for p in [p async for p in stream] if p.sample == 1 for t in p.token_ids]
        assert got == answer(range(7), stream.params, 1)[0]
        client.rest()

    asyncio.run(asyncio.wait_for(main(), 60))


REQUESTS = st.tuples(st.integers(1, 40), st.integers(1, 30), st.integers(1, 3), st.booleans())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.one_of(REQUESTS, st.integers(0, 9), st.just("turn")), max_size=40),
    st.sampled_from([0, 2]),
    st.sampled_from([18, 60]),
)
def test_streams_among_arrivals_and_aborts_give_their_own_tokens_and_leave_nothing(program, depth, blocks):
    async def main():
        client = Wired(sim_engine(depth=depth, blocks=blocks, slots=5))
        streams = []
        for i, act in enumerate(program):
            if act == "turn":
                client.loop.turn()
            elif isinstance(act, int):
                if act < len(streams):
                    await streams[act][1].aclose()
            else:
                length, tokens, n, eos = act
                try:
                    made = await client.add(range(length), f"r{i}", max_tokens=tokens, n=n, ignore_eos=not eos)
                except RequestError as e:  # the cache cannot hold it
                    assert "cache holds" in str(e)
                    continue
                streams.append((range(length), made))
        for prompt, stream in streams:
            got = {sample: [] for sample in range(stream.params.n)}
            closed = stream._done and not stream._pending
            while not stream._done:
                client.loop.turn()
            reasons = {}
            async for piece in stream:
                got[piece.sample] += piece.token_ids
                reasons[piece.sample] = piece.finish_reason
            for sample in got if not closed else ():
                assert (got[sample], reasons[sample]) == answer(prompt, stream.params, sample)
        client.rest()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("depth, blocks", [(0, 200), (2, 200), (2, 26)])
def test_a_token_in_the_middle_of_an_answer_is_told_in_columns_and_arrives_as_the_others_do(depth, blocks):
    """The first and the last token of a branch are sent row by row, and so are tokens in flight of a preempted row."""

    async def main():
        client = Wired(sim_engine(slots=6, depth=depth, blocks=blocks))
        publisher, by_column, by_row = client.engine.publisher, [], []
        flush = publisher.flush
        client.engine.events.tokens_streamed.subscribe(lambda stream, sample, token: by_column.extend(stream.tolist()))
        publisher.flush = lambda seq, ended=None: (by_row.append(seq.id), flush(seq, ended))[1]
        ask = dict(max_tokens=40, ignore_eos=True, n=2)
        streams = [await client.add(range(i, i + 9), f"r{i}", **ask) for i in range(3)]
        while client.engine.busy:
            client.loop.turn()
        for i, stream in enumerate(streams):
            got = {0: [], 1: []}
            async for piece in stream:
                got[piece.sample] += piece.token_ids
            assert all(got[sample] == answer(range(i, i + 9), stream.params, sample)[0] for sample in got)
        client.rest()
        preempted = client.engine.planner.preemptions
        assert (preempted > 0) == (blocks < 100)
        assert len(by_row) + len(by_column) == 3 * 2 * 40 and len(by_row) <= 3 * 2 * 2 + preempted * (1 + depth)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_step_that_fails_ends_its_requests_and_three_end_the_engine_for_everybody():
    async def main():
        client = Wired(sim_engine())
        one = await client.add(range(5), "one", max_tokens=9, ignore_eos=True)
        client.engine.executor.fail_at = set(range(1000))
        client.loop.turn()
        client.engine.executor.fail_at = set()
        last = [piece async for piece in one][-1]
        assert last.finish_reason == "error" and "planned failure" in last.error
        client.rest()
        client.engine.executor.fail_at = set(range(1000))
        second = await client.add(range(5), "second", max_tokens=9)
        third = await client.add(range(5), "third", max_tokens=9)
        assert [p.finish_reason async for p in second] == ["error"]
        with pytest.raises(EngineDeadError, match="3 steps failed"):
            await anext(third)
        assert not client.healthy()[0] and "3 steps failed" in client.healthy()[1]
        with pytest.raises(EngineDeadError, match="3 steps failed"):
            await client.stream([1], SamplingParams(), "late")

    asyncio.run(asyncio.wait_for(main(), 60))


def test_commands_that_are_none_end_the_loop():
    client = Wired(sim_engine())
    client._send("ready", {})
    client.loop.run()
    assert "is not a command" in client.engine.dead


def test_a_request_whose_values_cannot_be_sent_ends_with_an_error_and_others_go_on(monkeypatch):
    from minivllm.server.link import engine_loop

    pooled = engine_loop.pooled

    def broken(request, reads):
        if request.id == "mine":
            raise KeyError("no such point")
        return pooled(request, reads)

    monkeypatch.setattr(engine_loop, "pooled", broken)

    async def main():
        client = Wired(sim_engine(depth=1, slots=8))
        mine = await client.add(range(9), "mine", max_tokens=4, ignore_eos=True)
        other = await client.add(range(5), "other", max_tokens=9, ignore_eos=True)
        for _ in range(40):
            client.loop.turn()
        with pytest.raises(PluginError, match="cannot be sent: KeyError"):
            [piece async for piece in mine]
        pieces = [piece async for piece in other]
        assert sum(len(piece.token_ids) for piece in pieces) == 9
        client.rest()

    asyncio.run(main())
