"""Faults at the boundary of the engine's process under load; each test is one line of a table (``faults.py``)."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from minivllm import EngineDeadError

from .faults import HERE, OPTIONS, TARGETS, Fault, golden, load, run
from .faulty_parts import VARIABLE

ATTENTION = {"attention": f"{HERE}:Attention"}
POLICY = {"scheduler": f"{HERE}:Policy"}


async def leave_after_5_tokens(client, beside):
    async def one(i):
        got = 0
        async with await client.stream([i % 40 + 1, 2, 3], beside_params(400, i), f"f{i}") as stream:
            async for piece in stream:
                got += len(piece.token_ids)
                if got >= 5:
                    return

    beside.start(8)
    before = (await client.stats())["finished"]
    await asyncio.gather(*(one(i) for i in range(500)))
    gone = time.monotonic()
    await beside.all()
    while (stats := await client.stats())["running"]:
        assert time.monotonic() - gone < 5, stats
    assert stats["finished"] - before == 508 and beside.ends == {"length": 8}


async def leave_at_once(client, beside):
    """Abort requests, most of which still wait or compute their prompt."""
    beside.start(4)

    async def one(i):
        task = asyncio.create_task(client.stream([i % 40 + 1] * (20 * (i % 10) + 1), beside_params(50, i), f"f{i}"))
        await asyncio.sleep(0.003 * (i % 20))
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().aclose()

    await asyncio.gather(*(one(i) for i in range(200)))
    await beside.all()
    assert beside.ends == {"length": 4}


async def one_reader_stops(client, beside):
    slow = await client.stream([1, 2, 3], beside_params(300, 0), "slow")
    beside.start(12)
    await beside.all()
    assert beside.ends == {"length": 12} and len(slow._pending) <= 1
    await slow.aclose()


async def one_step_fails(client, beside):
    beside.start(24, 12)
    await beside.all()
    assert beside.ends["error"] >= 1 and beside.ends["length"] >= 8 and beside.ends.total() == 24, beside.ends
    assert all("planned" in error for error in beside.errors)


async def all_steps_fail(client, beside):
    for _ in range(3):
        beside.start(8, 12)
        await beside.all(10)
    assert beside.ends["error"] + beside.ends["dead"] == 24, beside.ends
    assert all("planned" in error for error in beside.errors)


async def a_processor_fails_on_one(client, beside):
    beside.start(12)
    beside.start(1, extra={"fault": "apply"})
    beside.start(1, extra={"fault": "bind"})
    await beside.all()
    assert beside.ends["refused"] == 1 and beside.ends["length"] >= 1 and beside.ends.total() == 14, beside.ends
    assert all("boom" in error for error in beside.errors)


async def killed(client, beside):
    beside.start(24, 500)
    while not client._read:
        await asyncio.sleep(0.01)
    os.kill(client.pid, signal.SIGKILL)
    at = time.monotonic()
    await beside.all(5)
    assert not client.healthy()[0] and time.monotonic() - at < 5
    assert beside.ends == {"dead": 24}


async def storm(client, beside):
    beside.start(32, 120)
    await beside.all(120)
    assert beside.ends == {"length": 32} and (await client.stats())["preemptions"] > 0


async def as_large_as_the_pool(client, beside):
    room = client.info.kv_tokens
    beside.start(8)
    big = await client.stream([3] * (room - 40), beside_params(30, 1), "big")
    beside.start(8)
    with pytest.raises(Exception, match="cache holds"):
        await client.stream([3] * (room - 10), beside_params(60, 1), "larger")
    assert [p async for p in big][-1].finish_reason == "length"
    await beside.all()
    assert beside.ends == {"length": 16}


async def the_policy_raises_once(client, beside):
    beside.start(24, 12)
    await beside.all()
    assert beside.ends == {"length": 24}  # only the planning failed, so the next turn plans again


async def the_policy_hangs(client, beside):
    beside.start(4, 100)
    await beside.all(30)
    assert beside.ends == {"dead": 4} and all("Policy.order" in error for error in beside.errors), beside.errors


async def nonsense_on_the_socket(client, beside):
    beside.start(4, 300)
    while not client._read:
        await asyncio.sleep(0.01)
    client._writer.write(b"\xff" * 64)
    await beside.all(10)
    assert beside.ends == {"dead": 4}


def beside_params(tokens, seed):
    from minivllm import SamplingParams

    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


FAULTS = [
    Fault("F1", "500 clients leave after 5 tokens", leave_after_5_tokens, slow=True),
    Fault("F2", "200 clients leave while they wait or compute their prompt", leave_at_once, slow=True),
    Fault("F3", "one reader stops", one_reader_stops, slow=True),
    Fault("F4", "one step fails", one_step_fails, ATTENTION, "forward:raise@10"),
    Fault("F5", "every step fails", all_steps_fail, ATTENTION, "forward:raise@*", "3 steps failed", slow=True),
    Fault("F6", "a step finds no memory", one_step_fails, ATTENTION, "forward:memory@10", slow=True),
    Fault(
        "F7", "a processor fails on one request", a_processor_fails_on_one, {"processors": [f"{TARGETS}:Faulty"]},
        slow=True,
    ),
    Fault("F8", "the process is killed", killed, dies="SIGKILL", slow=True),
    Fault("F12", "a pool of a tenth of the need", storm, {"num_kvcache_blocks": 28}, slow=True),
    Fault("F13", "a request as large as the pool", as_large_as_the_pool, {"num_kvcache_blocks": 50}, slow=True),
    Fault("F18", "the policy raises once", the_policy_raises_once, POLICY, "policy:raise@1", slow=True),
    Fault("F18 hang", "the policy hangs", the_policy_hangs, POLICY, "policy:hang@1", "Policy.order", 3.0, slow=True),
    Fault("frames", "what comes is no frame", nonsense_on_the_socket, dies="process", slow=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def want():
    from minivllm.server.link.process_client import ProcessClient

    async def main():
        client = ProcessClient(load(None, OPTIONS))
        await client.open()
        try:
            return await golden(client)
        finally:
            await client.close()

    assert VARIABLE not in os.environ
    return asyncio.run(main())


def lines(faults):
    return [pytest.param(f, id=f.id, marks=[pytest.mark.slow] if f.slow else []) for f in faults]


@pytest.mark.parametrize("fault", lines(FAULTS))
def test_a_fault_harms_nobody_else_and_leaves_nothing(fault, want, monkeypatch):
    assert len(want) == 32
    run(fault, want, monkeypatch)


def test_an_engine_without_a_client_is_an_error_with_a_reason():
    from minivllm.server.link.process_client import ProcessClient

    client = ProcessClient(load(None, OPTIONS))
    with pytest.raises(EngineDeadError, match="not been started"):
        asyncio.run(client.stats())
