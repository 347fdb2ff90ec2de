"""/v1/ws over a real connection: interleaved requests, keys, cancelling, and errors of clients."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
websockets = pytest.importorskip("websockets.sync.client")

from http_helpers import Running, served  # noqa: E402
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

SUM = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0, "max_tokens": 12}
LONG = {"prompt": "Once", "max_tokens": 800, "ignore_eos": True}
server = served(["sk-1"], max_socket_requests=4, write_timeout=2.0, header_timeout=2.0)


class Talk:
    def __init__(self, socket):
        self.socket = socket

    def ask(self, ident, body=SUM, kind="chat.completions", **more):
        self.say({"type": kind, "id": ident, "body": {**body, **more}})

    def say(self, message):
        self.socket.send(message if isinstance(message, str) else json.dumps(message))

    def hear(self):
        return json.loads(self.socket.recv(timeout=20))

    def until(self, *idents):
        """All messages, up to the last word of each of these requests."""
        found, left = [], set(idents)
        while left:
            found.append(self.hear())
            if found[-1]["type"] != "chunk":
                left.discard(found[-1]["id"])
        return found


@contextmanager
def talking(server, protocols=("minivllm", "key.sk-1"), **more):
    with websockets.connect(
        server.url.replace("http", "ws") + "/v1/ws", subprotocols=protocols or None, proxy=None, **more
    ) as socket:
        yield Talk(socket)


def text(messages, ident):
    chunks = [m["data"]["choices"][0] for m in messages if m["id"] == ident and m["type"] == "chunk"]
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in chunks)


def test_requests_on_one_socket_are_interleaved_and_each_has_the_answer_of_http(server):
    http = server.post("/v1/chat/completions", SUM).json()["choices"][0]["message"]["content"]
    plain = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 60, "temperature": 0}).json()["choices"][0]
    with talking(server) as talk:
        assert talk.socket.subprotocol == "minivllm"
        talk.ask("story", {"prompt": "Once", "max_tokens": 60, "temperature": 0}, "completions")
        talk.ask("a")
        talk.ask("b")
        got = talk.until("story", "a", "b")
        assert text(got, "a") == text(got, "b") == http and text(got, "story") == plain["text"]
        order = [m["id"] for m in got]
        assert order.index("a") < len(order) - 1 - order[::-1].index("story")  # it did not wait for the long one
        talk.ask("whole", stream=False)
        (whole,) = talk.until("whole")
        assert whole["type"] == "done" and whole["data"]["choices"][0]["message"]["content"] == http


@pytest.mark.parametrize("size", [1, 100_000])
def test_the_error_of_a_message_that_is_not_unicode_has_its_id(server, size):
    with talking(server) as talk:
        talk.say('{"type": "completions", "id": "a", "body": {"prompt": "' + "a" * size + '\\ud800"}}')
        (got,) = talk.until("a")
        assert got["type"] == "error" and "surrogate" in got["error"]["message"]


def test_a_cancelled_request_ends_at_once_and_its_id_is_free_again(server):
    with talking(server) as talk:
        talk.ask("x", LONG, "completions")
        assert talk.hear()["type"] == "chunk"
        talk.say({"type": "cancel", "id": "x"})
        last = talk.until("x")[-1]
        assert last == {"type": "done", "id": "x", "cancelled": True}
        talk.ask("x")
        assert talk.until("x")[-1] == {"type": "done", "id": "x"}
        talk.say({"type": "cancel", "id": "x"})  # too late, so nothing is answered
        talk.ask("y")
        assert {m["id"] for m in talk.until("y")} == {"y"}
    server.at_rest()


def test_a_client_that_goes_away_leaves_nothing_running(server):
    with talking(server) as talk:
        for ident in "abc":
            talk.ask(ident, LONG, "completions")
        talk.hear()
    server.at_rest()
    with talking(server) as talk:
        talk.ask("a", LONG, "completions")
        talk.hear()
        talk.socket.socket.close()  # without a word
    server.at_rest()


@pytest.mark.parametrize(
    ("message", "ident", "param", "words"),
    [
        ("{", None, None, "not JSON"),
        ("[1]", None, None, "not a JSON object"),
        ('{"type": "chat.completions", "body": {}}', None, "id", "1 to 128"),
        ({"type": "completions", "id": "i" * 200, "body": {}}, None, "id", "1 to 128"),
        ({"type": "completions", "id": 7, "body": {}}, None, "id", "1 to 128"),
        ({"type": "complete", "id": "i", "body": {}}, "i", "type", "completions"),
        ({"type": ["x"], "id": "i"}, "i", "type", "expected one of"),
        ({"type": "completions", "id": "i"}, "i", "body", "an object"),
        ({"type": "completions", "id": "i", "body": {"prompt": "a", "temperature": 9}}, "i", "temperature", "0"),
        ({"type": "completions", "id": "i", "body": {"prompt": "a", "max_token": 9}}, "i", "max_token", "max_tokens"),
        ({"type": "chat.completions", "id": "i", "body": {"messages": []}}, "i", "messages", "non-empty"),
        ({"type": "completions", "id": "i", "body": {"prompt": "a"}, "n": 2}, "i", "n", "into body"),
        ({"type": "chat.completions", "id": "i", "body": {**SUM, "model": "nobody"}}, "i", "model", "does not exist"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_by_its_id_and_the_socket_lives_on(server, message, ident, param, words):
    with talking(server) as talk:
        talk.say(message)
        error = talk.hear()
        assert error["type"] == "error" and error["id"] == ident, error
        assert words in error["error"]["message"] and error["error"]["param"] == param, error
        talk.ask("golden")
        assert text(talk.until("golden"), "golden") == "2 + 3 = 5"


def test_an_id_runs_once_and_requests_at_once_are_bounded(server):
    with talking(server) as talk:
        for ident in "abcd":
            talk.ask(ident, LONG, "completions")
        talk.ask("a", LONG, "completions")
        talk.ask("e", LONG, "completions")
        errors = []
        while len(errors) < 2:
            message = talk.hear()
            errors += [message] if message["type"] == "error" else []
        codes = {m["id"]: m["error"]["code"] for m in errors}
        assert codes == {None: 400, "e": 429}  # an error with the id "a" would be the last word of the one that runs
    server.at_rest()


def test_who_has_no_key_is_sent_away_and_a_first_frame_may_bring_it(server):
    with talking(server, ()) as talk:
        talk.say({"type": "auth", "key": "sk-1"})
        talk.ask("a")
        assert text(talk.until("a"), "a") == "2 + 3 = 5"
    for first in (
        {"type": "auth", "key": "sk-2"},
        {"type": "auth"},
        {"type": "completions", "id": "a", "body": LONG},
        "{",
    ):
        with talking(server, ("minivllm",)) as talk, pytest.raises(ConnectionClosed) as closed:
            talk.say(first)
            while True:
                assert talk.hear()["type"] == "error"
        assert closed.value.rcvd.code == 1008
    for wrong in ({"protocols": ("minivllm", "key.wrong")}, {"additional_headers": {"Authorization": "Bearer sk-11"}}):
        with pytest.raises(InvalidStatus) as refused, talking(server, **{"protocols": (), **wrong}):
            pass
        assert refused.value.response.status_code == 401
        assert json.loads(refused.value.response.body)["error"]["type"] == "AuthenticationError"
    with talking(server, ()) as talk, pytest.raises(ConnectionClosed):  # the client sends nothing
        begun = time.monotonic()
        talk.socket.recv(timeout=20)
    assert time.monotonic() - begun < 10


def test_a_page_of_another_origin_may_not_connect(server):
    with pytest.raises(InvalidStatus) as refused, talking(server, origin="https://elsewhere.example"):
        pass
    assert refused.value.response.status_code == 403
    with talking(server, origin=server.url) as talk:
        talk.ask("a")
        assert talk.until("a")[-1]["type"] == "done"


def test_a_reader_that_takes_nothing_holds_nobody_up_and_is_sent_away(server):
    with talking(server, max_queue=1) as slow, talking(server) as talk:
        for ident in "abc":
            slow.ask(ident, {**LONG, "logprobs": 20}, "completions")
        slow.socket.recv_bufsize = 1
        begun = time.monotonic()
        talk.ask("fast")
        assert text(talk.until("fast"), "fast") == "2 + 3 = 5"
        assert time.monotonic() - begun < 10
    server.at_rest(20.0)


def test_a_message_that_is_too_large_ends_the_connection_only():
    running = Running(max_body_bytes=2048)
    try:
        with talking(running, ()) as talk, pytest.raises(ConnectionClosed) as closed:
            talk.ask("a", {"prompt": "x" * 5000}, "completions")
            talk.hear()
        assert closed.value.rcvd.code == 1009
        running.at_rest()
    finally:
        running.close()


def example(server, kind):
    """The block of docs/api.md, for this server and its key."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S)
    return text.replace("localhost:8000", f"{server.host}:{server.port}").replace("KEY", "sk-1")


def run_example(*command):
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_python_example_of_the_documentation_runs(server):
    reported = run_example(sys.executable, "-c", example(server, "python"))
    assert "sum done 2 + 3 = 5\n" in reported and re.search(r"^tale done .{20}", reported, re.M), reported
    server.at_rest()


def test_the_browser_example_of_the_documentation_runs(server, tmp_path):
    node = shutil.which("node")
    flags = ["--experimental-websocket"]  # newer ones have it without
    requested = "process.exit(typeof WebSocket === 'function' ? 0 : 1)"
    if node is None or subprocess.run([node, *flags, "-e", requested], capture_output=True).returncode:
        pytest.skip("needs a node that has WebSocket")
    (script,) = re.findall(r"<script[^>]*>(.*?)</script>", example(server, "html"), re.S)
    page = "globalThis.document = {querySelector: () => ({append: (text) => process.stdout.write(text)})};"
    file = tmp_path / "page.mjs"
    file.write_text(page + script)
    assert run_example(node, *flags, os.fspath(file)) == "2 + 3 = 5"
    server.at_rest()
