"""Changes of the weights of several replicas: all that serve have the same weights, versions and state."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

pytest.importorskip("fastapi")

import torch
from http_helpers import Running
from safetensors.torch import load_file, save_file
from test_server_weights import ENGINE, POCKET, complete, post

pytestmark = pytest.mark.slow


def until(condition):
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def write(folder, tensors, seed):
    """Write other weights for pocket into a folder."""
    torch.manual_seed(seed)
    folder.mkdir(exist_ok=True)
    changed = {name: t + 0.05 * torch.randn(t.shape).to(t.dtype) for name, t in tensors.items()}
    save_file(changed, folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("weights")
    tensors = load_file(POCKET / "model.safetensors")
    for seed, name in enumerate(("first", "second", "latest")):
        write(place / name, tensors, seed)
    (place / "norm").mkdir()
    name = next(name for name in tensors if "norm" in name)
    save_file({name: 0.5 * tensors[name]}, place / "norm" / "model.safetensors")
    return place


@pytest.fixture(scope="module")
def running(folder):
    made = Running(["user", "other"], ENGINE, admin=True, weights_dir=str(folder), replicas=2, router="round-robin")
    made.client.headers["Authorization"] = f"Bearer {made.app.admin_token}"
    yield made
    made.close()


@pytest.fixture
def server(running):
    """The server with both replicas awake, not paused, and in service."""
    yield running
    until(lambda: all(one.runs for one in running.app.service.client.replicas))
    assert post(running, "/update_weights", path="first")[0] == 200
    assert not left_out(running)


def left_out(server):
    return state(server).get("left_out")


def state(server):
    return server.client.get("/weights").json()


def agreed(server, **expected):
    """Check that both replicas have this state, and that both give the same answers."""
    states = state(server)
    assert set(states) == {"replicas"} and set(states["replicas"]) == {"0", "1"}
    for one in states["replicas"].values():
        assert one == {"paused": False, "sleep_level": 0} | one | expected
    answers = [complete(server) for _ in range(2)]
    version = states["replicas"]["0"]["version"]
    assert {answer["system_fingerprint"] for answer in answers} == {f"weights-{version}" if version else None}
    assert answers[0]["choices"] == answers[1]["choices"]
    return answers[0]["choices"]


def restart(server, number=1):
    """Kill the engine of a replica, and wait for the next one."""
    replica = server.app.service.client.replicas[number]
    before = replica.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: replica.runs and replica.pid != before)


def test_overlapping_updates_reach_a_silent_replica_in_their_order(server):
    client = server.app.service.client
    version = state(server)["replicas"]["0"]["version"]
    silent = client.replicas[1]
    os.kill(silent.pid, signal.SIGSTOP)
    found = {}
    threads = []
    try:
        silent._last_frame = -1e9  # as after a step of more than 5 s
        for name in ("first", "second"):
            send = threading.Thread(
                target=lambda name=name: found.update({name: post(server, "/update_weights", path=name)})
            )
            send.start()
            threads.append(send)
            until(lambda: client._weights.lock.locked() or not threads[-1].is_alive())
        threads[1].join(1)
        assert not found
    finally:
        os.kill(silent.pid, signal.SIGCONT)
    for thread in threads:
        thread.join(60)
    for add, name in enumerate(("first", "second"), 1):
        status, answer = found[name]
        assert status == 200 and {one["version"] for one in answer["replicas"].values()} == {version + add}, answer
        assert set(answer) == {"replicas"} and set(answer["replicas"]) == {"0", "1"}
    agreed(server, version=version + 2)


def test_a_replica_without_an_answer_is_started_again_with_the_new_weights(server, monkeypatch):
    client = server.app.service.client
    monkeypatch.setattr(client._weights, "seconds", 3.0)
    silent = client.replicas[1]
    before = silent.pid
    os.kill(before, signal.SIGSTOP)
    status, answer = post(server, "/update_weights", path="second")
    assert status == 200 and set(answer["replicas"]) == {"0"} and set(answer["left_out"]) == {"1"}
    assert not silent.accepts
    monkeypatch.setattr(client._weights, "seconds", 60.0)
    until(lambda: silent.accepts and silent.pid != before)
    agreed(server, version=answer["replicas"]["0"]["version"])


def test_a_new_engine_repeats_updates_and_the_pause_before_it_serves(server):
    for path, partial in (("second", False), ("norm", True)):
        status, answer = post(server, "/update_weights", path=path, partial=partial)
        assert status == 200, answer
    version = answer["replicas"]["0"]["version"]
    choices = agreed(server, version=version)
    assert post(server, "/pause")[0] == 200
    restart(server)
    states = state(server)["replicas"]
    assert all(one == {"version": version, "paused": True, "sleep_level": 0} for one in states.values())
    assert post(server, "/resume")[0] == 200
    assert agreed(server, version=version) == choices
    stats = server.do(server.app.service.client.stats)
    assert [one["weights"]["version"] for one in (stats, *stats["replicas"])] == [version] * 3


def test_versions_agree_after_a_failure_and_the_replica_waits_for_the_next_update(server, monkeypatch):
    replica = server.app.service.client.replicas[1]
    version = state(server)["replicas"]["0"]["version"]

    async def failing(do, **args):
        raise RuntimeError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(replica, "weights", failing)
        status, answer = post(server, "/update_weights", path="second")
        assert status == 400 and "replicas 1 kept their weights and were drained" in answer["error"]["message"]
    assert replica.condition == "outdated" and "planted" in left_out(server)["1"]
    assert "planted" in server.client.get("/replicas").json()["replicas"][1]["reason"]
    status, answer = post(server, "/replicas/1/resume")
    assert status == 400 and "replica 1 has other weights" in answer["error"]["message"]
    status, answer = post(server, "/update_weights", path="norm", partial=True)
    assert status == 200 and set(answer["replicas"]) == {"0"} and set(answer["left_out"]) == {"1"}
    status, answer = post(server, "/update_weights", path="first")
    assert status == 200 and set(answer) == {"replicas"}
    agreed(server, version=version + 3)


def test_replicas_that_are_in_the_state_already_are_no_error(server):
    client = server.app.service.client
    version = state(server)["replicas"]["0"]["version"]
    server.do(lambda: client.replicas[0].weights("sleep", level=1))
    status, answer = post(server, "/sleep", level=1)
    assert status == 200 and {one["sleep_level"] for one in answer["replicas"].values()} == {1}
    assert post(server, "/sleep", level=1)[0] == 400
    server.do(lambda: client.replicas[0].weights("wake"))
    assert post(server, "/wake_up")[0] == 200
    status, answer = post(server, "/wake_up")
    assert status == 400 and "the engine does not sleep" in answer["error"]["message"]
    agreed(server, version=version)


def test_a_new_engine_sleeps_with_the_others_and_reads_the_files_of_the_model_with_them(server):
    assert post(server, "/sleep", level=2)[0] == 200
    restart(server)
    assert {one["sleep_level"] for one in state(server)["replicas"].values()} == {2}
    status, answer = post(server, "/wake_up")
    assert status == 200, answer
    version = answer["replicas"]["0"]["version"]
    choices = agreed(server, version=version)
    restart(server)
    assert agreed(server, version=version) == choices
    assert post(server, "/sleep", level=2)[0] == 200
    assert post(server, "/wake_up")[0] == 200
    assert agreed(server, version=version + 1) == choices


def test_a_new_engine_does_not_serve_if_the_files_of_the_update_have_changed(server, folder):
    assert post(server, "/update_weights", path="latest")[0] == 200
    write(folder / "latest", load_file(POCKET / "model.safetensors"), 9)
    restart(server)
    replica = server.app.service.client.replicas[1]
    assert replica.condition == "outdated" and "latest have changed since the update" in left_out(server)["1"]
    assert server.client.get("/health").json()["replicas"] == {"serving": 1, "all": 2}
    assert post(server, "/update_weights", path="latest")[0] == 200
    assert replica.condition == "serving"
    agreed(server)
