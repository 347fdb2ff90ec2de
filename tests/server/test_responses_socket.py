"""The WebSocket /v1/responses: turns on one connection, lanes, wrong messages, keys and slow clients."""

import json
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
websockets = pytest.importorskip("websockets.sync.client")

from http_helpers import served  # noqa: E402
from scripted import scripted  # noqa: E402
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

server = served(["sk-1", "sk-2"], max_socket_requests=3, write_timeout=2.0, header_timeout=2.0)
KEY = {"Authorization": "Bearer sk-1"}


class Talk:
    def __init__(self, socket):
        self.socket = socket

    def create(self, **body):
        self.say({"type": "response.create", "input": "hi", **body})

    def say(self, message):
        self.socket.send(message if isinstance(message, str) else json.dumps(message))

    def hear(self):
        return json.loads(self.socket.recv(timeout=20))

    def response(self, **body):
        """The events of a response, up to its end."""
        self.create(**body)
        found = [self.hear()]
        while found[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed", "error"):
            found.append(self.hear())
        return found


@contextmanager
def talking(server, headers=KEY, **more):
    url = server.url.replace("http", "ws") + "/v1/responses"
    with websockets.connect(url, additional_headers=headers, proxy=None, **more) as socket:
        yield Talk(socket)


def test_turns_on_one_connection_have_the_events_of_a_stream(server):
    with scripted(server, ["one", "two", "one"]) as script, talking(server) as talk:
        first = talk.response(input="first question", store=False)
        made = first[-1]["response"]
        second = talk.response(input="more", previous_response_id=made["id"], store=False)
        with server.client.stream("POST", "/v1/responses", json={"input": "first question", "stream": True}) as answer:
            names = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
    assert [event["type"] for event in first] == names
    assert [event["sequence_number"] for event in second] == list(range(len(second)))
    assert "first question" in script.prompts[1] and second[-1]["response"]["output"][0]["content"][0]["text"] == "two"
    assert not any("stream_id" in event for event in first)


def test_a_response_without_store_is_known_to_its_connection_alone(server):
    with scripted(server, ["one", "two"]), talking(server) as talk, talking(server) as other:
        ident = talk.response(store=False)[-1]["response"]["id"]
        (error,) = other.response(previous_response_id=ident)
        assert error["error"]["code"] == "previous_response_not_found" and error["status"] == 400
        assert server.client.get(f"/v1/responses/{ident}").status_code == 404
        stored = other.response()[-1]["response"]["id"]
        assert server.client.get(f"/v1/responses/{stored}").status_code == 200


def test_the_connections_of_a_key_share_the_bytes_that_they_keep(server):
    """The oldest response of the key is dropped, whichever connection made it.  An ended connection keeps nothing."""
    of_keys = server.app.service.socket_responses
    long = "word " * 200
    with scripted(server, ["one", "two", "three", "four"]), talking(server) as talk, talking(server) as other:
        first = talk.response(input=long, store=False)[-1]["response"]["id"]
        (of_key,) = [one for one in of_keys.values() if one._held]
        of_key.most_bytes = of_key._size + 2000  # one more response does not fit
        second = other.response(input=long, store=False)[-1]["response"]["id"]
        assert talk.response(previous_response_id=first)[0]["error"]["code"] == "previous_response_not_found"
        assert other.response(previous_response_id=second, store=False)[-1]["type"] == "response.completed"
        with talking(server, {"Authorization": "Bearer sk-2"}) as stranger:
            stranger.response(store=False)
            assert sum(bool(one._held) for one in of_keys.values()) == 2  # another key keeps its own
    end = time.monotonic() + 10
    while of_key._held or of_key._size:
        assert time.monotonic() < end, of_key._held
        time.sleep(0.05)


def test_wrong_messages_leave_the_connection_open(server):
    wrong = [
        ("{", None),
        ("[]", None),
        ({"type": "response.steer"}, "type"),
        ({}, "type"),
        ({"type": "response.create", "stream_id": 5, "input": "hi"}, "stream_id"),
        ({"type": "response.create"}, "input"),
        ({"type": "response.create", "input": "hi", "max_output_tokens": 0}, "max_output_tokens"),
        ({"type": "response.create", "input": "hi", "background": True}, "background"),
        ({"type": "response.create", "input": "hi", "tools": [{"type": "mcp"}]}, "tools[0].type"),
    ]
    with scripted(server, ["fine"]), talking(server) as talk:
        for message, param in wrong:
            talk.say(message)
            event = talk.hear()
            assert event["type"] == "error" and event["status"] == 400, event
            assert event["error"]["param"] == param and event["error"]["message"]
        assert talk.response()[-1]["type"] == "response.completed"


def test_a_lane_is_in_order_and_lanes_run_together(server):
    long, short = "word " * 30, "x"
    texts = [lambda prompt: long if "long" in prompt else short] * 3
    with scripted(server, texts, pause=0.02), talking(server) as talk:
        talk.create(input="long", stream_id="a")
        talk.create(input="second of a", stream_id="a")
        talk.create(input="only of b", stream_id="b")
        events = []
        while sum(event["type"] == "response.completed" for event in events) < 3:
            events.append(talk.hear())
    lanes = [(e["stream_id"], e["type"]) for e in events if e["type"] in ("response.created", "response.completed")]
    assert [kind for lane, kind in lanes if lane == "a"] == ["response.created", "response.completed"] * 2
    assert lanes.index(("b", "response.completed")) < lanes.index(("a", "response.completed"))


def test_a_response_without_an_answer_can_be_continued(server):
    with scripted(server, ["one"]) as script, talking(server) as talk:
        warm = talk.response(input=[{"role": "user", "content": "first"}], generate=False, store=False)
        assert [e["type"] for e in warm] == ["response.created", "response.in_progress", "response.completed"]
        made = warm[-1]["response"]
        assert made["output"] == [] and made["usage"]["total_tokens"] == 0
        assert talk.response(input="second", previous_response_id=made["id"])[-1]["type"] == "response.completed"
        (error,) = talk.response(generate="no")
    assert error["error"]["param"] == "generate" and len(script.prompts) == 1
    assert "first" in script.prompts[0] and "second" in script.prompts[0]


def test_more_responses_than_allowed_are_refused(server):
    with scripted(server, ["word " * 20] * 3, pause=0.02), talking(server) as talk:
        for _ in range(4):
            talk.create()
        events = [talk.hear()]
        while events[-1]["type"] != "error":
            events.append(talk.hear())
        assert events[-1]["status"] == 429


def test_a_key_is_needed(server):
    with pytest.raises(InvalidStatus) as refused, talking(server, {"Authorization": "Bearer wrong"}):
        pass
    assert refused.value.response.status_code == 401
    for first in ({"type": "response.create", "input": "hi"}, {"type": "auth", "key": "wrong"}):
        with talking(server, {}) as talk:
            talk.say(first)
            assert talk.hear()["error"]["code"] == 401
            with pytest.raises(ConnectionClosed) as closed:
                talk.hear()
            assert closed.value.rcvd.code == 1008
    with scripted(server, ["ok"]), talking(server, {}) as talk:
        talk.say({"type": "auth", "key": "sk-2"})
        assert talk.response()[-1]["type"] == "response.completed"


def test_a_failure_in_the_middle_is_an_event(server):
    with scripted(server, ["one two three four", "ok"], pause=0.3), talking(server) as talk:
        found = talk.response(timeout_s=0.7)
        assert found[-1]["type"] == "error" and talk.hear()["type"] == "response.failed"
        assert talk.response(timeout_s=30)[-1]["type"] == "response.completed"


def test_the_end_of_a_connection_ends_its_responses(server):
    with talking(server) as talk:
        talk.create(input="Tell me a story", ignore_eos=True, max_output_tokens=900)
        while talk.hear()["type"] != "response.output_text.delta":
            pass
    end = time.monotonic() + 10
    while server.app.service.door.inside:
        assert time.monotonic() < end
        time.sleep(0.02)
