"""Processes with limits: whatever a job does, it ends within them, and the next one is answered."""

import asyncio
import gc
import os
import time

import pytest
from loop_turns import largest_allocation

from minivllm.errors import ResourceError
from minivllm.runtime.processes.confined import PIECE, Confined, Exceeded, decode_text, encode_text, pieces, size_of
from minivllm.server.errors import ApiError
from minivllm.server.fair_slots import MOST_WAITING, FairSlots

LIMITS = {"seconds": 0.2, "megabytes": 64}


def confined(test, hello=b"", workers=(0, 0)):
    """Run ``test(confined)``, a coroutine, with processes of its own."""

    async def run():
        made = Confined("confined_work:make", lambda: hello, workers)
        try:
            return await asyncio.wait_for(test(made), 100)
        finally:
            await made.close()

    return asyncio.run(run())


@pytest.mark.parametrize(("kind", "what"), [("loop", "time"), ("regex", "time"), ("memory", "memory")])
def test_a_job_beyond_its_limits_is_ended_and_the_next_ones_are_answered(kind, what):
    async def test(made):
        beside = asyncio.create_task(made.run_job(1, {"kind": "sleep", "sleep": 0.1, "say": "me"}, **LIMITS))
        with pytest.raises(Exceeded) as ended:
            await made.run_job(0, {"kind": kind}, **LIMITS)
        assert ended.value.resource == what
        assert (await beside)[0]["say"] == "me"
        received, parts = await made.run_job(0, {"kind": "say", "say": 7}, [b"a" * 300_000, b""], **LIMITS)
        assert received["say"] == 7 and parts == [b"a" * 300_000, b""]
        assert (await made.run_job(1, {"kind": "say"}, **LIMITS))[0]["done"] == 2

    confined(test)


def test_no_turn_of_the_loop_copies_a_large_part_of_a_job_or_answer():
    """The copies of 8 MiB took 13 ms or more in one turn."""
    size = 8 << 20
    parts = [b"a" * size, [bytearray(b"b" * PIECE)] * (size // PIECE)]

    async def test(made):
        await made.run_job(0, {"kind": "say"}, **LIMITS)  # the processes start
        with largest_allocation() as most:
            _, found = await made.run_job(0, {"kind": "say"}, parts, seconds=10, megabytes=256)
        assert [len(part) for part in found] == [size, size]
        assert found[0] == parts[0] and found[1] == b"".join(parts[1])
        return most[0]

    assert confined(test, workers=(0,)) < 1 << 20


def test_a_job_that_is_cancelled_while_it_is_sent_disturbs_no_later_job():
    async def test(made):
        await made.run_job(0, {"kind": "say"}, **LIMITS)
        leaving = asyncio.create_task(made.run_job(0, {"kind": "say"}, [b"a" * (8 << 20)], **LIMITS))
        for _ in range(20):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert (await made.run_job(0, {"kind": "say", "say": 2}, **LIMITS))[0]["say"] == 2

    confined(test, workers=(0,))


@pytest.mark.parametrize("text", ["", "a", "é\U0001f98a" * PIECE, "\ud800" + "a" * PIECE])
def test_pieces_are_small_and_have_all_bytes_in_order(text):
    async def test():
        encoded = await encode_text(text)
        assert b"".join(encoded) == text.encode("utf-8", "surrogatepass") and size_of(encoded) == len(b"".join(encoded))
        found = list(pieces([b"head", encoded, [], b""]))
        assert b"".join(found) == b"head" + b"".join(encoded) and max(map(len, found)) <= PIECE
        assert await encode_text("é", text) == ["é".encode(), *encoded]
        if text.isprintable():
            assert await decode_text(b"".join(encoded), list(map(len, encoded))) == text

    asyncio.run(test())


def test_what_the_work_raises_is_told_and_ends_nothing():
    async def test(made):
        pid = (await made.run_job(0, {"kind": "say"}, **LIMITS))[0]["pid"]
        with pytest.raises(RuntimeError, match="ValueError: it cannot"):
            await made.run_job(0, {"kind": "raise"}, **LIMITS)
        assert (await made.run_job(0, {"kind": "say"}, **LIMITS))[0]["pid"] == pid

    confined(test, workers=(0,))


def test_a_seat_that_is_killed_is_asked_again_once_and_then_given_up():
    async def test(made):
        pid = (await made.run_job(0, {"kind": "say"}, **LIMITS))[0]["pid"]
        os.kill(pid, 9)  # the process is at rest, and its last message is read with the next job
        assert (await made.run_job(0, {"kind": "say", "say": 1}, **LIMITS))[0]["say"] == 1
        assert (await made.run_job(0, {"kind": "say", "say": 2}, **LIMITS))[0]["say"] == 2
        with pytest.raises(ResourceError, match="-9"):
            await made.run_job(0, {"kind": "die"}, **LIMITS)
        assert (await made.run_job(0, {"kind": "say", "say": 3}, **LIMITS))[0]["say"] == 3
        # the parent of the workers; they live on, and a worker that dies later has no parent to replace it
        made._process.kill()
        with pytest.raises(ResourceError):
            await made.run_job(0, {"kind": "die"}, **LIMITS)
        assert (await made.run_job(0, {"kind": "say", "say": 4}, **LIMITS))[0]["say"] == 4

    confined(test, workers=(0,))


def test_work_that_cannot_be_made_says_why():
    async def test(made):
        for _ in range(2):
            with pytest.raises(ResourceError, match="no work to do"):
                await made.run_job(0, {"kind": "say"}, **LIMITS)

    confined(test, b"broken")


def test_processes_end_with_who_asks():
    async def test(made):
        return made._process, [(await made.run_job(worker, {"kind": "say"}, **LIMITS))[0]["pid"] for worker in (0, 1)]

    async def left():
        made = Confined("confined_work:make", lambda: b"", (0, 0))
        return [(await made.run_job(worker, {"kind": "say"}, **LIMITS))[0]["pid"] for worker in (0, 1)]

    pids = confined(test)[1] + asyncio.run(left())
    gc.collect()
    end = time.monotonic() + 30
    while any(map(runs, pids)):
        assert time.monotonic() < end
        time.sleep(0.02)


def runs(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# ---- turns -----------------------------------------------------------------------------------------------------------


def test_an_asker_has_one_seat_and_those_who_wait_take_turns():
    async def main():
        turns, order = FairSlots(range(2)), []

        async def job(who):
            worker = await turns.take(who)
            assert who not in holders
            holders[who] = worker
            assert sorted(holders.values()) == sorted(set(holders.values())) and len(holders) <= 2
            order.append(who)
            await asyncio.sleep(0)
            del holders[who]
            turns.give(who, worker)

        holders = {}
        tasks = [asyncio.create_task(job("many")) for _ in range(50)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(job(f"one {i}")) for i in range(4)]
        await asyncio.gather(*tasks)
        assert len(turns) == 0
        return order

    order = asyncio.run(main())
    assert order.count("many") == 50
    assert max(order.index(f"one {i}") for i in range(4)) < 10


def test_who_leaves_while_waiting_takes_no_seat_along():
    async def main():
        turns = FairSlots(range(1))
        worker = await turns.take("a")
        waiting = [asyncio.create_task(turns.take(who)) for who in "abcabc"]
        await asyncio.sleep(0)
        for task in waiting[:3]:
            task.cancel()
        turns.give("a", worker)
        for task in waiting:  # the one that was given the worker at the same moment too
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert await asyncio.wait_for(turns.take("d"), 5) == worker

    asyncio.run(main())


def test_too_many_that_wait_are_sent_away_and_others_are_not():
    async def main():
        turns = FairSlots(range(1))
        worker = await turns.take("a")
        waiting = [asyncio.create_task(turns.take("a")) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await turns.take("a")
        assert refused.value.status == 429 and refused.value.headers["Retry-After"]
        other = asyncio.create_task(turns.take("b"))
        await asyncio.sleep(0)
        turns.give("a", worker)
        turns.give("a", await waiting[0])
        assert await asyncio.wait_for(other, 5) == worker
        for task in waiting:
            task.cancel()

    asyncio.run(main())
