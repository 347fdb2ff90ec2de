"""The progress of the engine's process reaches the server, from each replica under its name."""

import asyncio

import pytest

pytest.importorskip("fastapi")

from minivllm.config import load_config
from minivllm.core import progress
from minivllm.server.replicas.client import make_client


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_progress_of_the_engines_process_is_reported_here(replicas):
    found = []
    engine = {"model": "pocket", "device": "cpu", "max_num_seqs": 2, "num_kvcache_blocks": 20}
    loaded = load_config(keywords={**engine, "server": {"replicas": replicas}}, environ={})

    async def start():
        client = make_client(loaded)
        await client.open()
        await client.close()

    with progress.listening(lambda *report: found.append(report)):
        asyncio.run(start())
    names = {"weights"} if replicas == 1 else {f"replica {number}: weights" for number in range(replicas)}
    assert {stage for stage, *_ in found} == names
    assert {stage for stage, done, total in found if done == total > 1_000_000} == names
