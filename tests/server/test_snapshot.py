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


def test_requests_that_wait_for_the_prefix_of_another_say_so():
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    head = np.arange(1, 201, dtype=np.int32).repeat(2)
    with LLM(model="pocket", device="cpu", max_num_seqs=8, num_kvcache_blocks=200) as llm:
        snapshots = snapshot.Snapshots(llm.engine)
        for number in range(3):
            prompt = np.append(head, 5 + number).astype(np.int32)
            llm.engine.add(Request(f"r{number}", prompt, params, time.monotonic()))
        llm.engine.step()
        first = snapshots.take(None, 0, 0)["rows"]
        while llm.engine.planner.n_waiting:
            llm.engine.step()
        later = snapshots.take(None, 0, 0)["rows"]
    assert first["why"] == ["", "prefix", "prefix"] and first["cached"] == [0, 0, 0]
    assert later["why"] == [""] * 3 and later["cached"][1:] == [400, 400]
