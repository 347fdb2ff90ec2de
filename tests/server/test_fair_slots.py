"""The part before the engine: clients that left cost nothing, owners take turns, and requests have bounds."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine_loop import Wired

from minivllm import EngineDeadError, RequestError, SamplingParams
from minivllm.core.engine.pace import FEWEST
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.server.errors import ApiError
from minivllm.server.fair_queue import FairQueue, owner_of
from minivllm.server.http.limits import Door
from minivllm.server.link import engine_loop, outbox, pace
from minivllm.server.link.outbox import Outbox
from minivllm.server.link.pace import TurnPace
from minivllm.testing.sim import sim_engine

ACTS = ["push", "push", "pop", "remove"]

# ---- the line --------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["push", "push", "pop", "remove"]), st.sampled_from("aab"), st.integers(0, 9)))
)
def test_a_line_gives_each_owners_items_in_order_and_owners_in_turn(acts):
    line, model, served = FairQueue(), {}, {}
    for n, (act, owner, k) in enumerate(acts):
        if act == "push":
            if owner not in model:
                served[owner] = n  # this owner has not waited, so it follows the owners that have
            line.push(owner, n, f"{owner}{n}")
            model.setdefault(owner, []).append(n)
        elif act == "remove":
            number = [i for items in model.values() for i in items][k % 3 : k % 3 + 1]
            assert (line.remove(number[0] if number else -1) is not None) == bool(number)
            model = {o: rest for o, items in model.items() if (rest := [i for i in items if i not in number])}
        elif model:
            first = min(model, key=served.get)
            assert line.pop() == (first, model[first][0], f"{first}{model[first].pop(0)}")
            served[first] = n
            model = {o: items for o, items in model.items() if items}
        else:
            assert line.pop() is None
        assert len(line) == sum(map(len, model.values()))


def test_owners_that_are_left_out_keep_their_turn():
    line = FairQueue()
    for n, owner in enumerate("aaab"):
        line.push(owner, n, n)
    assert line.pop(("a",)) == ("b", 3, 3) and line.pop(("a",)) is None and line.pop() == ("a", 0, 0)


@pytest.mark.parametrize(
    ("tenant", "one", "other", "same"),
    [
        ("key-0", ("10.0.0.1", 5), ("10.0.0.2", 6), True),  # the key decides
        ("", ("10.0.0.1", 5), ("10.0.0.1", 6), True),
        ("", ("10.0.0.1", 5), ("10.0.0.2", 5), False),
        ("", ("2001:db8:0:1::1", 5), ("2001:db8:0:1:ffff::2", 5), True),  # a client chooses the last 64 bits itself
        ("", ("2001:db8:0:1::1", 5), ("2001:db8:0:2::1", 5), False),
        ("", ("::ffff:10.0.0.1", 5), ("10.0.0.1", 5), True),
        ("", ("fe80::1%eth0", 5), ("fe80::2", 5), True),
        ("", None, ("", 0), True),  # a socket in the file system
    ],
)
def test_an_owner_is_a_key_or_an_address(tenant, one, other, same):
    assert (owner_of(tenant, one) == owner_of(tenant, other)) == same
    assert owner_of(tenant, one) and (tenant == "" or owner_of(tenant, one) == tenant)


# ---- the engine's loop -----------------------------------------------------------------------------------------------


async def send(client, owner, name, prompt=(1, 2, 3), **params):
    """Send a request that the loop has not yet read."""
    made = SamplingParams.make(**{"max_tokens": 2, "ignore_eos": True, **params})
    task = asyncio.create_task(client.stream(list(prompt), made, name, owner=owner))
    await asyncio.sleep(0)
    return task


def test_who_leaves_before_the_loop_looks_is_never_checked_planned_or_compiled(monkeypatch):
    async def main():
        engine = sim_engine(slots=4, budget=16)
        client = Wired(engine)
        seen, compiled = [], []
        monkeypatch.setattr(engine, "add", lambda request: seen.append(request.id))
        monkeypatch.setattr(client.loop.compiling, "begin", lambda number, live: compiled.append(number))
        gone = [await send(client, "a", f"a{i}", range(50)) for i in range(50)]
        gone += [await send(client, "a", f"g{i}", structured_outputs={"regex": "a"}) for i in range(5)]
        stays = await send(client, "a", "stays")
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        client.loop.turn()
        assert seen == ["stays"] and not compiled and not len(client.loop.arriving)
        assert not engine.executor.trail and client.tables()["ids"] == 1
        stays.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_abort_overtakes_requests_and_its_own_is_refused_by_name():
    async def main():
        client = Wired(sim_engine())
        task = await send(client, "a", "mine")
        await client.abort("mine")
        client.loop.turn()
        with pytest.raises(RequestError, match="aborted"):
            await task
        client.rest()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_running_request_is_aborted_before_a_thousand_others_are_looked_at(monkeypatch):
    async def main():
        client = Wired(sim_engine(slots=4))
        mine = await client.add(range(9), "mine", max_tokens=40, ignore_eos=True)
        waiting = [await send(client, "a", f"a{i}") for i in range(1000)]
        monkeypatch.setattr(engine_loop, "PATIENCE", -1.0)  # one of them a turn
        await mine.aclose()
        client.loop.turn()
        assert "mine" not in client.engine.requests and len(client.loop.arriving) == 999
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        client.rest()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_owners_take_turns_before_the_engine_too(monkeypatch):
    async def main():
        client = Wired(sim_engine(slots=2))
        monkeypatch.setattr(engine_loop, "PATIENCE", -1.0)
        order = []
        add = client.engine.add
        monkeypatch.setattr(client.engine, "add", lambda request: (order.append(request.id), add(request)))
        tasks = [await send(client, owner, f"{owner}{i}") for owner in "ab" for i in range(20)]
        tasks.append(await send(client, "c", "c0"))
        for _ in range(4):
            client.loop.turn()
        assert order == ["a0", "b0", "c0", "a1"]
        for _ in range(60):
            client.loop.turn()
        for task in tasks:
            await (await task).aclose()
        client.rest()

    asyncio.run(asyncio.wait_for(main(), 60))


# ---- on the way to another process -----------------------------------------------------------------------------------


class Transport:
    def __init__(self):
        self.held, self.sent, self.room = 0, [], asyncio.Event()

    def set_write_buffer_limits(self, high):
        self.high = high

    def get_write_buffer_size(self):
        return self.held


class Writer:
    """A socket that accepts no bytes before ``take_all`` is called."""

    def __init__(self):
        self.transport = Transport()

    def write(self, data):
        self.transport.sent.append(data)
        self.transport.held += len(data)

    async def drain(self):
        await self.transport.room.wait()

    def take_all(self):
        self.transport.held = 0
        self.transport.room.set()


def test_what_the_socket_does_not_take_can_be_taken_back_and_owners_take_turns():
    async def main():
        writer = Writer()
        box, frame = Outbox(writer), bytes(40_000)
        for n in range(100):
            box.put("a", n, frame)
        box.put("b", 100, b"small")
        assert len(writer.transport.sent) == 2 and writer.transport.held <= outbox.HIGH + len(frame)
        assert all(box.remove(n) for n in range(3, 100)) and not box.remove(0) and not box.remove(3)
        writer.take_all()
        for _ in range(5):
            await asyncio.sleep(0)
        assert writer.transport.sent[2:] in ([frame, b"small"], [b"small", frame]) and not len(box)
        box.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_one_owner_leaves_unsent_is_bounded_and_nobody_elses(monkeypatch):
    async def main():
        monkeypatch.setattr(outbox, "UNREAD", 200_000)
        box = Outbox(Writer())
        with pytest.raises(EngineDeadError):
            for n in range(20):
                box.put("a", n, bytes(50_000))
        box.put("b", 50, bytes(50_000))
        box.close()
        assert not len(box)

    asyncio.run(asyncio.wait_for(main(), 60))


# ---- in the same process ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm():
    made = AsyncLLM(model="pocket", max_num_seqs=8, num_kvcache_blocks=300, dtype="float32")
    yield made
    made.close()


def blocked(llm):
    """The engine's thread waits until the event is set."""
    go = threading.Event()
    llm._send(go.wait)
    return go


def test_a_coroutine_that_is_cancelled_before_its_turn_never_reaches_the_engine(llm):
    async def main():
        added, add, go = [], llm.engine.add, blocked(llm)
        llm.engine.add = lambda request: (added.append(request.id), add(request))
        try:
            params = SamplingParams(max_tokens=2, temperature=0)
            gone = [asyncio.create_task(anext(llm.generate("Once", params, f"gone{i}"))) for i in range(20)]
            stays = asyncio.create_task(anext(llm.generate("Once", params, "stays")))
            await asyncio.sleep(0)
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            go.set()
            await stays
            assert added == ["stays"]
        finally:
            go.set()
            llm.engine.add = add

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_abort_that_overtakes_its_request_ends_its_stream_and_not_a_later_one_of_that_id(llm):
    async def main():
        go = blocked(llm)
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)

        async def reasons(name):
            return [p.finish_reason async for p in llm.generate("Once", params, name)][-1]

        first = asyncio.create_task(reasons("x"))
        llm_abort = asyncio.create_task(reasons("y"))
        await asyncio.sleep(0)
        llm.abort("x")
        llm.abort("z")  # an unknown id, which may later belong to another request
        later = asyncio.create_task(reasons("z"))
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(first, llm_abort, later) == ["abort", "length", "length"]

    asyncio.run(asyncio.wait_for(main(), 60))


# ---- the door --------------------------------------------------------------------------------------------------------


def refused(door, prompts, owner):
    try:
        with door.enter(prompts, owner):
            return False
    except ApiError as error:
        assert error.status == 429 and error.headers["Retry-After"]
        return True


def test_nobody_is_turned_away_because_another_has_filled_its_room():
    async def main():
        door = Door(4, 10)
        held = [door.enter(1, "a") for _ in range(4)]
        for one in held:
            one.__enter__()
        assert refused(door, 1, "a") and not refused(door, 4, "b")
        more = [door.enter(3, owner) for owner in ("b", "c")]
        for one in more:
            one.__enter__()
        assert door.inside == 10 and refused(door, 1, "b") and door.refused == 2
        assert not refused(door, 1, "d"), "who has nothing inside is let in though all together are at the limit"
        for one in (*held, *more):
            one.__exit__(None, None, None)
        assert door.inside == 0 and not door.owners
        assert not refused(door, 100, "a"), "a batch that is larger than the room is taken alone"

    asyncio.run(main())


# ---- the pace --------------------------------------------------------------------------------------------------------


def prompt_steps(found, steps, each, key=0.0, fixed=0.0, shared=False, length=10**9):
    """Compute a prompt step by step, and return (seconds, tokens) of each step.

    A token costs ``each`` seconds, and ``key`` seconds for each key that it attends to.
    """
    times, at = [], 0
    for _ in range(steps):
        n = min(found.most(at, *((pace.SHARED_TURN, 64) if shared else ())), length - at)
        seconds = fixed + n * (each + key * (at + n / 2))
        found.note(n, at + n / 2, seconds)
        times.append((seconds, n))
        at = (at + n) % length
    return times


@pytest.mark.parametrize("rate", [100.0, 2000.0, 50_000.0, 5e6])
def test_a_step_comes_to_take_as_long_as_it_may_whatever_the_device_computes(rate):
    """Tokens a second."""
    found = TurnPace(16384, 512)
    times = prompt_steps(found, 30, 1 / rate)
    fits = pace.TURN * rate
    least = max(min(pace.LEAST, pace.LONG * rate), FEWEST)
    assert times[-1][1] == pytest.approx(min(max(fits, least), 16384), rel=0.05)
    assert all(t <= pace.LONG * 1.01 or n <= FEWEST for t, n in times[1:])


@pytest.mark.parametrize("each", [2e-5, 1e-3])
@pytest.mark.parametrize("key", [1e-8, 1e-6, 1e-5])
@pytest.mark.parametrize("fixed", [0.0, 0.02])
def test_a_step_ends_in_time_however_much_the_tokens_before_it_cost(each, key, fixed):
    found = TurnPace(8192, pace.FIRST)
    for _ in range(2):
        times = prompt_steps(found, 400, each, key, fixed, length=20_000)
        assert max(t for t, n in times if n > FEWEST) < 2.4 * pace.TURN, "from the first step on"
    steps = [n for _, n in times]
    assert max(steps) > FEWEST and sum(steps) > 20 * FEWEST


def test_decodes_say_nothing_of_the_pace_and_one_slow_step_is_forgotten():
    found = TurnPace(16384, 16384)
    assert found.most(0) == 16384
    found.note(16384, 8192.0, 60.0)
    assert found.most(0) < 300
    for _ in range(12):
        n = found.most(0)
        found.note(n, n / 2, 0.01)
    assert found.most(0) > 10_000
    before = found.most(0)
    for _ in range(30):
        found.note(3, 2.0, 0.01)  # steps of short prompts take as long as any others
    assert found.most(0) > before / 8
    assert TurnPace(100, 512).most(0) == 100


def test_the_loop_bounds_the_prompt_tokens_of_a_step_by_its_pace():
    async def main():
        client = Wired(sim_engine(slots=8, budget=64, blocks=400))
        fixed = SimpleNamespace(most=lambda context, *turn: requested.append(context) or 10)
        fixed.note = lambda tokens, context, seconds: noted.append((tokens, context))
        client.loop.paces = fixed, fixed
        requested, noted = [], []
        stream = await client.add(range(40), "r", max_tokens=3, ignore_eos=True)
        for _ in range(8):
            client.loop.turn()
        assert noted == [(10, 5.0), (10, 15.0), (10, 25.0), (10, 35.0)]
        assert requested[:4] == [0, 10, 20, 30]
        await stream.aclose()
        client.rest()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_short_prompt_does_not_wait_for_all_of_a_long_one_of_its_owner():
    """The time bounds a step here, so a long prompt waits as the policy orders."""

    async def main(short, turns):
        client = Wired(sim_engine(slots=8, budget=512, blocks=400))
        fixed = SimpleNamespace(most=lambda *step: 40, note=lambda *step: None)
        client.loop.paces = fixed, fixed
        long = await client.add([3] * 250, "long", max_tokens=1, ignore_eos=True)
        other = await client.add([4] * short, "short", max_tokens=1, ignore_eos=True)
        for _ in range(turns):
            client.loop.turn()
        begun = other.metrics.first_token_time
        for _ in range(20):
            client.loop.turn()
        assert long.metrics.first_token_time, "nor is the long one forgotten"
        for one in (long, other):
            await one.aclose()
        client.rest()
        return begun is not None

    assert asyncio.run(asyncio.wait_for(main(9, 2), 60))
    assert not asyncio.run(asyncio.wait_for(main(30, 2), 60))


def test_a_prompt_of_ids_is_what_the_loop_gets(monkeypatch):
    """The frames of requests that waited are whole."""

    async def main():
        client = Wired(sim_engine(slots=4))
        task = await send(client, "a", "r", range(30), max_tokens=1)
        frame = client.inbox[-1]
        assert frame.header["owner"] == "a" and np.array_equal(frame.columns["prompt"], np.arange(30))
        client.loop.turn()
        await (await task).aclose()
        client.rest()

    asyncio.run(asyncio.wait_for(main(), 60))
