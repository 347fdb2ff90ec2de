"""Updates of weights, pauses and sleep over HTTP, for operators."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import torch
from http_helpers import Running
from safetensors.torch import load_file, save_file

import minivllm.pocket
from minivllm.config import load_config
from minivllm.errors import ConfigError
from minivllm.server.serve import check_config

POCKET = Path(minivllm.pocket.__file__).parent / "model"
ENGINE = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with other weights for pocket, with broken ones, and a link to a folder outside."""
    place = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    tensors = load_file(POCKET / "model.safetensors")
    for name, scale in (("first", 0.05), ("broken", torch.nan)):
        (place / name).mkdir()
        changed = {key: t + scale * torch.randn(t.shape).to(t.dtype) for key, t in tensors.items()}
        save_file(changed, place / name / "model.safetensors")
    shutil.copytree(POCKET, place.parent / "beside", dirs_exist_ok=True)
    (place / "link").symlink_to(place.parent / "beside")
    return place


@pytest.fixture(scope="module")
def server(folder):
    made = Running(["user", "other"], ENGINE, admin=True, weights_dir=str(folder))
    made.client.headers["Authorization"] = f"Bearer {made.app.admin_token}"
    yield made
    made.close()


def post(server, route, **body):
    answer = server.client.post(f"{server.url}{route}", json=body)
    return answer.status_code, answer.json()


def complete(server, **more):
    body = {"model": "pocket", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12, **more}
    answer = server.client.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_operators_replace_the_weights(server):
    before = complete(server)
    assert before["system_fingerprint"] is None
    for path, words in (("broken", "infinite numbers"), ("none", "no such model directory")):
        status, answer = post(server, "/update_weights", path=path)
        assert status == 400 and words in answer["error"]["message"]
    assert complete(server)["choices"] == before["choices"]
    status, answer = post(server, "/update_weights", path="first")
    assert (status, answer) == (200, {"version": 1, "paused": False, "sleep_level": 0})
    after = complete(server)
    assert after["choices"] != before["choices"] and after["system_fingerprint"] == "weights-1"
    assert server.client.get(f"{server.url}/weights").json()["version"] == 1


@pytest.mark.parametrize("path", ["link", "..", "../beside", "/etc", "", "a" * 2000, "a" * 300, "x\0y", "none"])
def test_paths_outside_of_the_folder_are_refused(server, path):
    status, answer = post(server, "/update_weights", path=path)
    assert status == 400 and answer["error"]["param"] == "path"
    assert server.app.service.server.weights_dir not in answer["error"]["message"]


def test_wrong_values_are_refused(server):
    assert post(server, "/sleep", level=3)[0] == 400
    assert post(server, "/resume")[0] == 200
    assert post(server, "/wake_up")[0] == 400
    assert post(server, "/update_weights", path="first", kv="all")[0] == 400


@pytest.mark.parametrize("route", ["/pause", "/resume", "/sleep", "/wake_up", "/update_weights", "/reset_prefix_cache"])
def test_operators_learn_of_a_field_that_a_route_does_not_read(server, route):
    before = server.client.get(f"{server.url}/weights").json()
    status, answer = post(server, route, path="first", mode="abort")
    name = "mode" if route == "/update_weights" else "path"
    assert status == 400 and answer["error"]["param"] == name and "is not read here" in answer["error"]["message"]
    status, answer = post(server, f"{route}?tags=weights")
    assert status == 400 and answer["error"]["param"] == "tags"
    assert server.client.get(f"{server.url}/weights").json() == before


def test_a_pause_and_a_sleep_need_no_body_and_the_level_may_stand_in_the_query(server):
    def level(route, **more):
        answer = server.client.post(f"{server.url}{route}", **more)
        return answer.json()["sleep_level"] if answer.status_code == 200 else answer.status_code

    assert level("/pause") == 0 and level("/resume") == 0
    assert level("/sleep") == 1 and level("/wake_up", json={"tags": None}) == 0
    assert level("/sleep?level=2") == 2 and level("/wake_up") == 0
    assert [level("/sleep?level=3"), level("/sleep?level=1", json={"level": 2})] == [400, 400]
    assert level("/wake_up") == 400, "nothing sleeps"


def test_users_may_not(server):
    for path in ("pause", "resume", "update_weights", "sleep", "wake_up"):
        answer = server.client.post(f"{server.url}/{path}", json={}, headers={"Authorization": "Bearer user"})
        assert answer.status_code in (401, 403)


@pytest.mark.parametrize("stop, go, state", [("/pause", "/resume", "paused"), ("/sleep", "/wake_up", "sleep_level")])
def test_requests_wait_while_the_engine_is_paused_or_asleep(server, stop, go, state):
    want = complete(server)
    assert post(server, stop)[1][state] == 1
    found = []
    thread = threading.Thread(target=lambda: found.append(complete(server)))
    thread.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        state_now = server.client.get(f"{server.url}/debug/state").json()
        if state_now["engine"]["tables"]["live"]:
            break
        time.sleep(0.02)
    assert not found
    assert post(server, go)[0] == 200
    thread.join(60)
    assert found[0]["choices"] == want["choices"]


def test_an_aborting_pause_ends_requests(server):
    found = []
    thread = threading.Thread(target=lambda: found.append(complete(server, max_tokens=900, ignore_eos=True)))
    thread.start()
    deadline = time.monotonic() + 60
    while not server.client.get(f"{server.url}/debug/state").json()["engine"]["tables"]["live"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert post(server, "/pause", keep_requests=False)[0] == 200
    thread.join(60)
    assert not thread.is_alive()
    assert post(server, "/resume")[0] == 200
    complete(server)


def test_wrong_configurations_are_refused(tmp_path):
    for server, words in (
        ({"weights_dir": str(tmp_path)}, "weights_dir without server.admin"),
        ({"weights_dir": str(tmp_path / "none"), "admin": True}, "no such folder"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_config(load_config(keywords={"model": "pocket", "server": server}, environ={}))


def test_replicas_change_together_and_those_that_fail_are_drained(folder):
    made = Running(["user", "other"], ENGINE, admin=True, weights_dir=str(folder), replicas=2)
    try:
        made.client.headers["Authorization"] = f"Bearer {made.app.admin_token}"
        before = complete(made)
        status, answer = post(made, "/update_weights", path="broken")
        assert status == 400 and "infinite numbers" in answer["error"]["message"]
        status, answer = post(made, "/update_weights", path="first")
        assert status == 200 and {one["version"] for one in answer["replicas"].values()} == {1}
        for _ in range(4):
            after = complete(made)
            assert after["choices"] != before["choices"] and after["system_fingerprint"] == "weights-1"
        client = made.app.service.client
        assert made.do(client.stats)["weights"]["version"] == 1

        async def failing(do, **args):
            raise RuntimeError("planted")

        client.replicas[1].weights = failing
        status, answer = post(made, "/update_weights", path="first")
        assert status == 400 and "replicas 1 kept their weights and were drained" in answer["error"]["message"]
        assert [one.held for one in client.replicas] == [False, True]
        assert complete(made)["system_fingerprint"] == "weights-2"
    finally:
        made.close()
