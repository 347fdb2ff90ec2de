"""The operator's routes of prefixes with names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from http_helpers import Running

from minivllm.config.server import ServerConfig
from minivllm.server import prefixes
from minivllm.server.errors import ApiError

STORY = "Once upon a time there was a fox who had a red box. " * 8
SMALL = {"num_kvcache_blocks": 200, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def running(files, disk):
    store = {"name": "disk", "options": {"path": str(disk), "bytes": 64 << 20, "load": "always"}}
    made = Running(["user", "other"], admin=True, prefix_dir=str(files), engine={"kvstore": store, **SMALL})
    yield made
    made.at_rest()
    made.close()


@pytest.fixture
def ask(running):
    """Return ``ask(method, path, body)``, which sends the operator's key or another one."""

    def call(method, path, body=None, key=None):
        headers = {"Authorization": f"Bearer {key or running.app.admin_token}"}
        return running.client.request(method, path, json=body, headers=headers)

    return call


@pytest.mark.parametrize("stop, go", [("/pause", "/resume"), ("/sleep", "/wake_up")])
def test_an_engine_that_runs_no_steps_refuses_to_compute_a_prefix(ask, stop, go):
    assert ask("POST", stop).status_code == 200
    try:
        answer = ask("POST", "/cache/prefixes", {"name": "waits", "prompt": STORY})
        assert answer.status_code == 400 and "computes no prompt" in answer.json()["error"]["message"]
    finally:
        assert ask("POST", go).status_code == 200


def test_a_prefix_is_saved_listed_moved_verified_and_dropped(ask, running, files):
    saved = ask("POST", "/cache/prefixes", {"name": "fox é", "prompt": STORY, "tenant": "key-0"})
    assert saved.status_code == 200, saved.text
    tokens = saved.json()["tokens"]
    assert tokens > 64 and tokens % 16 == 0
    assert ask("GET", "/cache/prefixes").json() == {"prefixes": {"fox é": tokens}}
    body = {"prompt": STORY + "The end", "max_tokens": 2}
    assert ask("POST", "/reset_prefix_cache").json() == {"reset": True}
    found = {}
    for key in ("other", "user"):
        usage = ask("POST", "/v1/completions", body, key).json()["usage"]
        found[key] = usage["prompt_tokens_details"]["cached_tokens"]
    assert found["other"] == 0 and found["user"] >= tokens, "only requests of the first key find the prefix"
    moved = ask("POST", "/cache/prefixes/fox é/export", {"file": "fox.tar"})
    assert moved.json() == {"file": "fox.tar", "pages": tokens // 16}
    assert (files / "fox.tar").stat().st_mode & 0o777 == 0o600
    assert ask("POST", "/cache/import", {"file": "fox.tar"}).json() == {"file": "fox.tar", "pages": tokens // 16}
    (model,) = ask("POST", "/cache/verify").json()["models"]
    assert (model["prefixes"], model["damaged"], model["unusable"]) == (["fox é"], 0, 0) and model["pages"] > 0
    assert ask("DELETE", "/cache/prefixes/fox é").json() == {"dropped": "fox é"}
    assert ask("GET", "/cache/prefixes").json() == {"prefixes": {}}
    again = ask("DELETE", "/cache/prefixes/fox é")
    assert again.status_code == 400 and "no prefix is called 'fox é'" in again.text


def test_token_ids_are_saved_while_requests_run(ask, running):
    stream = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer user"}
    with running.client.stream("POST", "/v1/completions", json=stream, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        saved = ask("POST", "/cache/prefixes", {"name": "ids", "prompt": list(range(40)), "cache_salt": "s"})
        rest = sum(1 for line in lines if line.startswith("data: "))
    assert saved.json() == {"name": "ids", "tokens": 32} and rest >= 59
    assert ask("DELETE", "/cache/prefixes/ids").status_code == 200


ROUTES = [
    ("GET", "/cache/prefixes", None),
    ("POST", "/cache/prefixes", {"name": "a", "prompt": STORY}),
    ("DELETE", "/cache/prefixes/a", None),
    ("POST", "/cache/prefixes/a/export", {"file": "a.tar"}),
    ("POST", "/cache/import", {"file": "a.tar"}),
    ("POST", "/cache/verify", None),
]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_only_the_operator_may_use_the_routes(ask, running, method, path, body):
    assert ask(method, path, body, key="user").status_code == 401
    assert running.client.request(method, path, json=body).status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("/cache/prefixes", {"prompt": STORY}, "name"),
        ("/cache/prefixes", {"name": "", "prompt": STORY}, "1 to 60 bytes"),
        ("/cache/prefixes", {"name": "é" * 31, "prompt": STORY}, "1 to 60 bytes"),
        ("/cache/prefixes", {"name": "a"}, "prompt"),
        ("/cache/prefixes", {"name": "a", "prompt": [1, 10**9]}, "token ids from 0"),
        ("/cache/prefixes", {"name": "a", "prompt": ["x"]}, "token ids from 0"),
        ("/cache/prefixes", {"name": "a", "prompt": "fox"}, "at least 17 tokens"),
        ("/cache/prefixes/none/export", {"file": "a.tar"}, "no model has a prefix 'none'"),
        ("/cache/import", {}, "NAME.tar"),
        ("/cache/import", {"file": "none.tar"}, "has no file"),
        ("/cache/import", {"file": "../disk.tar"}, "without a folder"),
        ("/cache/import", {"file": "/etc/passwd.tar"}, "without a folder"),
        ("/cache/import", {"file": "link.tar"}, "is a link"),
        ("/cache/prefixes/none/export", {"file": "link.tar"}, "is a link"),
        ("/cache/import", {"file": "bad.tar"}, "expected a file of"),
    ],
)
def test_wrong_requests_are_refused_with_the_accepted_values(ask, files, path, body, problem):
    (files / "bad.tar").write_bytes(b"no tar file")
    if not (files / "link.tar").is_symlink():
        (files / "link.tar").symlink_to("/etc/hostname")
    answer = ask("POST", path, body)
    assert answer.status_code in (400, 404) and problem in answer.text, answer.text


def test_a_server_without_a_disk_or_a_folder_says_what_to_set(files):
    made = Running(admin=True, engine=SMALL)
    try:
        headers = {"Authorization": f"Bearer {made.app.admin_token}"}
        answer = made.client.get("/cache/prefixes", headers=headers)
        assert answer.status_code == 400 and "set kvstore=disk" in answer.text
        answer = made.client.post("/cache/import", json={"file": "a.tar"}, headers=headers)
        assert answer.status_code == 400 and "server.prefix_dir" in answer.text
    finally:
        made.close()


def test_several_engines_are_refused_because_each_has_own_names():
    service = SimpleNamespace(server=ServerConfig(replicas=2), client=None)
    with pytest.raises(ApiError, match=r"server\.replicas=1"):
        asyncio.run(prefixes.names(None, service))
