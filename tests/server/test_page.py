"""The page and the state of the engine over HTTP: files, their policy, keys and tenants, origins and limits."""

import base64
import json
import re
import time
from contextlib import contextmanager
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")
websockets = pytest.importorskip("websockets.sync.client")

from http_helpers import Running, served  # noqa: E402
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

import minivllm  # noqa: E402
from minivllm.server.http.auth import ApiKeys  # noqa: E402
from minivllm.server.page.files import POLICY, Page  # noqa: E402

HTML = {"Accept": "text/html,application/xhtml+xml"}
MOST_BYTES = 300_000
ENGINE = {"batch_invariant": False, "max_num_seqs": 2, "num_kvcache_blocks": 200}
server = served(["sk-1", "sk-2"], ENGINE, max_live_sockets=3, live_interval=0.1, header_timeout=2.0)


@pytest.fixture(scope="module")
def open_server():
    running = Running(engine=ENGINE, live_interval=0.1, max_live_sockets=2)
    yield running
    running.at_rest()
    running.close()


@contextmanager
def live(server, *protocols, **more):
    url = server.url.replace("http", "ws") + "/v1/live"
    with websockets.connect(url, subprotocols=["minivllm", *protocols], proxy=None, **more) as socket:
        yield socket


def hear(socket, kind="state"):
    """Return the next message of a kind."""
    while (message := json.loads(socket.recv(timeout=20)))["type"] != kind:
        pass
    return message


def wait_for(socket, holds):
    """Return the first state for which ``holds``."""
    end = time.monotonic() + 30
    while not holds(state := hear(socket)):
        assert time.monotonic() < end, state
    return state


def cells_of(state):
    blocks = state["blocks"]
    cells = np.frombuffer(base64.b64decode(blocks["cells"]), np.uint8)
    return cells, np.frombuffer(base64.b64decode(blocks["of"]), "<i2")


def test_the_page_is_a_browsers_and_the_greeting_is_for_others(server):
    page = server.client.get("/", headers={**HTML, "Authorization": ""})
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert page.headers["vary"] == "Accept" and "<title>minivllm</title>" in page.text
    greeting = server.client.get("/")
    assert "Ollama is running" in greeting.text and greeting.headers["content-type"].startswith("text/plain")
    assert server.client.get("/", headers={"Authorization": ""}).status_code == 401
    assert server.client.post("/", json={}, headers=HTML).status_code == 405


def test_every_file_comes_without_a_key_and_with_a_strict_policy(server):
    files = Page.load().files
    assert {"/", "/docs", "/page/app.js", "/page/style.css", "/page/licences.txt"} <= files.keys()
    for path, file in files.items():
        found = server.client.get(path, headers={**HTML, "Authorization": ""})
        assert found.status_code == 200 and found.content == file.content
        assert found.headers["content-security-policy"] == POLICY and found.headers["x-frame-options"] == "DENY"
        assert found.headers["x-content-type-options"] == "nosniff"
        again = server.client.get(path, headers={**HTML, "If-None-Match": found.headers["etag"]})
        assert again.status_code == 304 and not again.content
    assert "unsafe" not in POLICY and "http" not in POLICY and "*" not in POLICY
    assert server.client.get("/page/../app.py").status_code == 404
    assert server.client.get("/page/nothing.js").status_code == 404


def test_the_files_are_small_and_refer_to_no_other_host():
    files = Page.load().files
    assert sum(len(file.content) for file in files.values()) <= MOST_BYTES
    for path, file in files.items():
        text = file.content.decode()
        if path.endswith(".html") or path in ("/", "/docs"):
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|javascript:", text), path
            assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", text), path
        if path.endswith(".js") and path.split("/")[-1] not in ("marked.js", "purify.js", "uplot.js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text
            ), path
            assert not re.search(r"https?://", text), path


def test_vendored_libraries_come_with_their_licences():
    licences = (resources.files("minivllm.server.page") / "static" / "licences.txt").read_text(encoding="utf-8")
    for name in ("marked", "dompurify", "uplot", "Apache License", "Permission is hereby granted"):
        assert name in licences


def test_a_wheel_has_every_file_of_the_page():
    wheel = pytest.importorskip("hatchling.builders.wheel", reason='pip install "minivllm[test]"')
    root = Path(minivllm.__file__).resolve().parents[1]
    if not (root / "pyproject.toml").exists():
        pytest.skip("an installed package is no checkout")
    builder = wheel.WheelBuilder(str(root))
    inside = {file.distribution_path for file in builder.recurse_included_files()}
    static = root / "minivllm" / "server" / "page" / "static"
    assert {f"minivllm/server/page/static/{path.name}" for path in static.iterdir()} <= inside


def test_without_the_page_neither_files_nor_states_are_served():
    running = Running(engine=ENGINE, page=False)
    try:
        assert "Ollama is running" in running.client.get("/", headers=HTML).text
        assert running.client.get("/docs", headers=HTML).status_code == 404
        assert running.client.get("/page/app.js").status_code == 404
        with pytest.raises(InvalidStatus), live(running):
            pass
    finally:
        running.close()


def test_a_state_shows_requests_blocks_and_steps(open_server):
    with live(open_server) as socket:
        hello = hear(socket, "hello")
        assert hello["scope"] == "all" and hello["engine"]["max_num_seqs"] == 2
        chosen = {seam: (name, why) for seam, name, why in hello["engine"]["explained"]}
        assert all(chosen[seam][0] and chosen[seam][1] for seam in ("scheduler", "attention", "evictor"))
        body = {"prompt": ["Once", "Twice", "Thrice"], "max_tokens": 300, "ignore_eos": True, "stream": True}
        with open_server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            state = wait_for(socket, lambda s: len(s["rows"]["id"]) == 3 and any(s["rows"]["first"]))
            rows = state["rows"]
            assert rows["running"] == [True, True, False] and rows["why"] == ["", "", "rows"]
            assert rows["end"][0] > rows["known"][0] > rows["prompt"][0] and rows["blocks"][0] >= 1
            cells, of = cells_of(state)
            assert len(cells) == state["blocks"]["total"] == open_server.stats()["blocks_total"]
            for row in (0, 1):
                assert np.count_nonzero(of == row) == rows["blocks"][row]
            assert np.all(cells[of >= 0] >= 2) and state["engine"]["held"] == np.count_nonzero(cells >= 2)
        ended = []
        while len(ended) < 3:
            ended += hear(socket)["ended"]
        assert {one["why"] for one in ended} == {"abort"} and all(one["finished"] >= 0 for one in ended)
        assert len({one["id"] for one in ended}) == 3, "each end is reported once"
        assert set(hear(socket)["steps"]) >= {"count", "n"} and state["steps"]["ms"].keys() >= {"plan", "publish"}
        forms = state["steps"]["forms"]
        assert sum(count for *_, count in forms) <= state["steps"]["n"] and forms[0][3] > 0
        assert {kind for kind, *_ in forms} <= {"native", "separate"}, "the forms of steps on a CPU"
        assert "native" in open_server.stats()["forms"]


def test_a_prefix_hit_is_shown(open_server):
    body = {"prompt": "The quick brown fox jumps over the lazy dog. " * 4, "max_tokens": 2}
    with live(open_server) as socket:
        hear(socket)
        for _ in range(2):
            open_server.post("/v1/completions", body)
        ended = []
        while len(ended) < 2:
            ended += hear(socket)["ended"]
        assert ended[0]["cached"] < ended[1]["cached"] <= ended[1]["prompt"]
        cells, _ = cells_of(state := hear(socket))
        assert np.count_nonzero(cells & 7 == 1) == state["engine"]["cached"] > 0 and state["engine"]["hits"] > 0


def test_the_engine_is_not_asked_without_an_open_page(open_server):
    client, live_states = open_server.app.service.client, open_server.app.service.live
    with live(open_server) as socket:
        hear(socket)
        assert live_states.count == 1
    end = time.monotonic() + 10
    while live_states.count:
        assert time.monotonic() < end
        time.sleep(0.02)
    requested, ask = [], client._ask
    client._ask = lambda what, **args: requested.append(what) or ask(what, **args)
    try:
        time.sleep(0.5)
        assert requested == []
        with live(open_server) as socket:
            begin = time.monotonic()
            for _ in range(6):
                hear(socket)
            assert time.monotonic() - begin > 0.3, "at most one state in live_interval"
        assert 6 <= len(requested) <= 9 and set(requested) == {"snapshot"}
    finally:
        del client._ask


def test_a_key_sees_nothing_of_other_tenants(server):
    body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with (
        live(server, "key.sk-1") as first,
        live(server, "key.sk-2") as second,
        server.client.stream("POST", "/v1/completions", json=body, headers={"Authorization": "Bearer sk-2"}),
    ):
        hello = hear(second, "hello")
        assert hello["scope"] == "own" and not any(why for *_, why in hello["engine"]["explained"])
        mine = wait_for(second, lambda s: s["rows"]["id"] and s["rows"]["blocks"][0])
        assert set(mine["rows"]["owner"]) == {"key-1"}
        for _ in range(4):
            state = hear(first)
            cells, of = cells_of(state)
            assert state["rows"]["id"] == [] and state["ended"] == [] and not cells.any() and (of == -1).all()
            assert "engine" not in state and "steps" not in state and "key-1" not in json.dumps(state)
    with live(server, "key.sk-1") as first, live(server, "key.sk-2") as second:
        hear(first), hear(second)
        server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}, headers={"Authorization": "Bearer sk-2"})
        while not (ended := hear(second)["ended"]):
            pass
        assert [one["owner"] for one in ended] == ["key-1"]
        assert not any(hear(first)["ended"] for _ in range(4))


def test_who_sees_all():
    assert ApiKeys().sees_all("") and ApiKeys(["a"]).sees_all("key-0") and ApiKeys(["a", "a"]).sees_all("key-0")
    two = ApiKeys(["a", "b"])
    assert not two.sees_all("key-0") and not two.sees_all("key-1")
    operated = ApiKeys(["a", "b", "boss"], "boss")
    assert [operated.sees_all(f"key-{i}") for i in range(3)] == [False, False, True]
    assert not ApiKeys(["a", "boss"], "boss").sees_all("key-0")


def test_a_missing_or_wrong_key_is_refused(server):
    with pytest.raises(InvalidStatus) as refused, live(server, "key.wrong"):
        pass
    assert refused.value.response.status_code == 401
    for message in ('{"type": "auth", "key": "wrong"}', "x" * 20_000, '{"type": "hello"}'):
        with live(server) as socket:
            socket.send(message)
            with pytest.raises(ConnectionClosed) as closed:
                while True:
                    assert json.loads(socket.recv(timeout=20))["type"] == "error"
            assert closed.value.rcvd.code == 1008
    with live(server) as socket:
        socket.send('{"type": "auth", "key": "sk-1"}')
        assert hear(socket)["type"] == "state"


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}], ids=str)
def test_pages_of_other_origins_cannot_connect(server, headers):
    with pytest.raises(InvalidStatus) as refused, live(server, "key.sk-1", additional_headers=headers):
        pass
    assert refused.value.response.status_code == 403
    with live(server, "key.sk-1", additional_headers={"Origin": server.url}) as socket:
        assert hear(socket)["type"] == "state"


def test_pages_beyond_the_limit_are_refused(open_server):
    with live(open_server) as one, live(open_server) as two:
        hear(one), hear(two)
        with live(open_server) as third, pytest.raises(ConnectionClosed) as closed:
            assert "expected at most 2" in json.loads(third.recv(timeout=20))["error"]["message"]
            third.recv(timeout=20)
        assert closed.value.rcvd.code == 1013
        assert hear(one)["type"] == "state"


def test_messages_of_a_page_are_refused_and_are_no_load(open_server):
    with live(open_server) as socket:
        hear(socket)
        begin = time.monotonic()
        for _ in range(3):
            socket.send('{"type": "state"}')
        for _ in range(3):
            assert "only sends" in hear(socket, "error")["error"]["message"]
        assert time.monotonic() - begin > 0.25
        with pytest.raises(ConnectionClosed):
            socket.send(b"binary")
            while True:
                hear(socket)


def test_a_page_that_does_not_read_misses_states_and_delays_nobody(open_server):
    with live(open_server) as slow, live(open_server) as other:
        hear(slow), hear(other)
        sent = [hear(other)["at"] for _ in range(8)]
        assert max(b - a for a, b in pairwise(sent)) < 5


def test_a_dead_engine_is_reported_to_the_page():
    running = Running(engine=ENGINE, live_interval=0.1)
    with live(running) as socket:
        hear(socket)
        running.app.service.client._lost("the engine was stopped for the test")
        assert "for the test" in hear(socket, "down")["why"]
    running.close()
