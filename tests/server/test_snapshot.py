"""Snapshots of an engine for the live page."""

import time

import numpy as np

from minivllm import LLM, SamplingParams
from minivllm.core.engine.request import Request
from minivllm.server.link import snapshot


def test_a_snapshot_has_waiting_requests_however_many_run(monkeypatch):
    monkeypatch.setattr(snapshot, "MOST_ROWS", 6)
    monkeypatch.setattr(snapshot, "LEAST_WAITING", 2)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with LLM(model="pocket", device="cpu", max_num_seqs=8, num_kvcache_blocks=200) as llm:
        snapshots = snapshot.Snapshots(llm.engine)
        for number in range(11):
            llm.engine.add(Request(f"r{number}", np.array([number + 1, 5, 6], np.int32), params, time.monotonic()))
        llm.engine.step()
        rows = snapshots.take(None, 0, 0)["rows"]
    assert rows["running"] == [True] * 4 + [False] * 2
    assert rows["why"] == [""] * 4 + ["rows"] * 2
