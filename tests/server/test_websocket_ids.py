"""/v1/ws: every id of a client gets exactly one final message, in any order of messages, and is free afterwards."""

import asyncio
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from starlette.websockets import WebSocketDisconnect
from test_websocket import LONG, SUM, talking

from minivllm.server.errors import ApiError
from minivllm.server.http.body import Bodies
from minivllm.server.openai import websocket

MOST = 4
IDS = "abcdef"  # more than run at once
server = served(["sk-1"], max_socket_requests=MOST, header_timeout=2.0)


class Pipe:
    """Both ends of a socket in one event loop; ``Connection`` gets the server's end."""

    def __init__(self):
        self.scope = {"state": {"request_id": "ws", "log": {}}, "headers": [], "subprotocols": []}
        self.inbox, self.sent, self.reads = asyncio.Queue(), [], asyncio.Event()
        self.reads.set()

    async def accept(self, subprotocol):
        pass

    async def receive_text(self):
        text = await self.inbox.get()
        if text is None:
            raise WebSocketDisconnect
        return text

    async def send_text(self, text):
        await self.reads.wait()
        self.sent.append(json.loads(text))

    async def close(self, code):
        self.code = code


class Scripted(websocket.Connection):
    """A protocol whose requests follow the test: ``received[number]`` gets "chunk", "end", "fail" or "stray".

    A cancelled request takes some turns of the loop to release its resources.  ``held`` has the requests that have not
    released them, and ``cut_short`` the requests that were cancelled again meanwhile.
    """

    def __init__(self, pipe):
        server = SimpleNamespace(max_socket_requests=MOST, write_timeout=60.0, header_timeout=60.0)
        self.door = SimpleNamespace(ended=asyncio.get_running_loop().create_future())
        keys = SimpleNamespace(tenant=lambda headers: "")
        super().__init__(pipe, SimpleNamespace(server=server, door=self.door, bodies=Bodies(None)), keys)
        self.received, self.held, self.cut_short = {}, set(), set()

    def _work(self, kind, ident, body, state):
        self.received[body["number"]] = asyncio.Queue()
        return self._run(body["number"], ident)

    async def _run(self, number, ident):
        self.held.add(number)
        try:
            while (what := await self.received[number].get()) == "chunk":
                await self.out.put({"type": "chunk", "id": ident, "data": number})
        except asyncio.CancelledError:
            await self._clean_up(number)
            raise
        finally:
            self.held.discard(number)
        if what == "fail":
            raise ApiError(500 if number % 2 else 400, f"{number}")
        if what == "stray":  # somebody inside cancels, not the client
            raise asyncio.CancelledError
        return {"data": number}

    async def _clean_up(self, number):
        try:
            for _ in range(3):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cut_short.add(number)
            raise


WHAT = ["ask", "ask", "cancel", "cancel", "kind", "body", "junk", "auth"]
MESSAGES = st.lists(
    st.tuples(st.sampled_from(WHAT), st.sampled_from(IDS)),
    min_size=1,
    max_size=8,
)
BAD = {
    "kind": {"type": "complete"},
    "body": {"type": "completions", "body": 7},
    "auth": {"type": "auth"},
    "cancel": {"type": "cancel"},
}


class Ids(RuleBasedStateMachine):
    """Packets of messages in any order, with turns of the server's loop, ends of requests and pauses of the reader
    between.

    The oracle counts.  Each request and each bad message has one answer: a final message of its id, or an error without
    an id if a request with this id runs.  A cancel has an answer only if its id was never used.
    """

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.number, self.wanted, self.unknown, self.used, self.open = 0, Counter(), 0, set(), True
        self.loop.run_until_complete(self._start())

    async def _start(self):
        self.pipe = Pipe()
        self.connection = Scripted(self.pipe)
        self.serving = asyncio.create_task(self.connection.serve())
        await asyncio.sleep(0)

    def turns(self, count):
        async def wait():
            for _ in range(count):
                await asyncio.sleep(0)

        self.loop.run_until_complete(wait())

    @precondition(lambda self: self.open)
    @rule(messages=MESSAGES, turns=st.integers(0, 12))
    def packet(self, messages, turns):
        """Messages that are in the inbox together are taken without a turn of the loop between."""
        for what, ident in messages:
            self.number += 1
            ask = {"type": "completions", "body": {"number": self.number}}
            message = json.dumps({**BAD.get(what, ask), "id": ident})
            if what == "junk":
                self.unknown += 1
                message = "{"
            elif what == "cancel":
                self.wanted[ident] += ident not in self.used
            elif what != "auth":
                self.wanted[ident] += 1
            if what not in ("junk", "auth"):
                self.used.add(ident)
            self.pipe.inbox.put_nowait(message)
        self.turns(turns)

    @precondition(lambda self: self.open)
    @rule(
        what=st.sampled_from(["chunk", "end", "fail", "stray"]),
        times=st.integers(1, 70),
        turns=st.integers(0, 12),
        data=st.data(),
    )
    def work(self, what, times, turns, data):
        if self.connection.received:
            queue = self.connection.received[data.draw(st.sampled_from(sorted(self.connection.received)))]
            for _ in range(times if what == "chunk" else 1):
                queue.put_nowait(what)
        self.turns(turns)

    @rule(turns=st.integers(1, 12))
    def wait(self, turns):
        self.turns(turns)

    @rule(reads=st.booleans())
    def reader(self, reads):
        self.pipe.reads.set() if reads else self.pipe.reads.clear()

    @precondition(lambda self: self.open)
    @rule(turns=st.integers(0, 3), leaves=st.booleans())
    def close(self, turns, leaves):
        """The client leaves, or the server ends."""
        self.open = False
        self.pipe.inbox.put_nowait(None) if leaves else self.connection.door.ended.set_result(None)
        self.turns(turns)

    @invariant()
    def words_of_an_id_come_in_order(self):
        """Check that messages of a request are not mixed with another request of the same id, and that none follows the
        last.
        """
        running = {}
        for message in self.pipe.sent:
            if message["type"] == "chunk":
                assert running.setdefault(message["id"], message["data"]) == message["data"], self.pipe.sent
            elif (first := running.pop(message["id"], None)) is not None and "data" in message:
                assert message["data"] == first, self.pipe.sent
        assert len(self.connection.running) <= MOST and len(self.connection.ended) <= websocket.ENDED_IDS

    def teardown(self):
        try:
            self.pipe.reads.set()
            if self.open:
                self._all_said()
        finally:
            self.pipe.inbox.put_nowait(None)
            self.loop.run_until_complete(asyncio.wait_for(self.serving, 10))
            left = asyncio.all_tasks(self.loop)
            self.loop.close()
        assert not left and not self.connection.held  # a connection that ends ends its requests
        assert not self.connection.cut_short

    def _all_said(self):
        """Once all works have ended: the counts are right, and every id can be used."""
        for _ in range(400):
            if not self.connection.running and self.pipe.inbox.empty() and self.connection.out.empty():
                break
            for queue in self.connection.received.values():
                queue.put_nowait("end")
            self.turns(20)
        self.turns(20)
        reported = Counter(m["id"] for m in self.pipe.sent if m["type"] != "chunk")
        without_id = reported.pop(None, 0)
        assert not reported - self.wanted, (reported, self.wanted)
        assert without_id == self.unknown + (self.wanted - reported).total(), (without_id, reported, self.wanted)
        assert reported.keys() == self.used
        before = len(self.pipe.sent)
        for ident in IDS:
            self.number += 1
            self.pipe.inbox.put_nowait(
                json.dumps({"type": "completions", "id": ident, "body": {"number": self.number}})
            )
            self.turns(5)
            self.connection.received[self.number].put_nowait("end")
            self.turns(20)
        assert [m["type"] for m in self.pipe.sent[before:]] == ["done"] * len(IDS), self.pipe.sent[before:]


TestIds = Ids.TestCase
TestIds.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def say_at_once(talk, *messages):
    """Send all messages in one write to the socket, as a client with many messages may do."""
    connection = talk.socket
    with connection.protocol_mutex:
        for message in messages:
            connection.protocol.send_text(json.dumps(message).encode())
        connection.socket.sendall(b"".join(connection.protocol.data_to_send()))


def requested(ident, body=LONG):
    return {"type": "completions", "id": ident, "body": body}


def cancel(ident):
    return {"type": "cancel", "id": ident}


def lasts_until_rest(talk):
    """Return the final messages, by id, up to the final message of a request that is sent now."""
    talk.ask("end", {"prompt": "Once", "max_tokens": 1}, "completions")
    return Counter(m["id"] for m in talk.until("end") if m["type"] != "chunk")


def test_a_request_and_its_cancel_in_one_packet_end_with_one_last_word_as_often_as_one_likes(server):
    with talking(server) as talk:
        for _ in range(20):
            say_at_once(talk, *(m for _ in range(10) for m in (requested("x"), cancel("x"))))
            # the first pair runs and is cancelled; the others find the id in use, or free again
            reported = [m for m in (talk.hear() for _ in range(10)) if m["type"] != "chunk"]
            assert len(reported) == 10 and {m["id"] for m in reported} <= {"x", None}, reported
            assert any(m == {"type": "done", "id": "x", "cancelled": True} for m in reported), reported
        names = [f"{number}" for number in range(200)]
        for first in range(0, len(names), MOST):
            some = names[first : first + MOST]
            say_at_once(talk, *(m for name in some for m in (requested(name), cancel(name))))
            assert [m for m in talk.until(*some) if m["type"] != "chunk"] == [
                {"type": "done", "id": name, "cancelled": True} for name in some
            ]
        assert lasts_until_rest(talk) == {"end": 1}
    server.at_rest()


def test_a_cancel_says_one_last_word_of_an_id_never_used_and_none_of_one_that_has_ended(server):
    with talking(server) as talk:
        say_at_once(talk, cancel("x"), cancel("x"), cancel("x"))
        assert lasts_until_rest(talk) == {"x": 1, "end": 1}
        talk.say(cancel("nobody"))
        error = talk.hear()
        assert error["type"] == "error" and error["id"] == "nobody" and error["error"]["code"] == 404
        talk.ask("nobody")  # and is free
        assert talk.until("nobody")[-1] == {"type": "done", "id": "nobody"}
        say_at_once(talk, cancel("nobody"), requested("bad", {"prompt": 7.5}), cancel("bad"), cancel("bad"))
        assert lasts_until_rest(talk) == {"bad": 1, "end": 1}
    with talking(server) as talk:  # another connection has other ids
        talk.say(cancel("nobody"))
        assert talk.hear()["error"]["code"] == 404


def test_an_error_about_a_message_with_a_running_id_is_not_the_last_word_of_that_request(server):
    wrong = [
        requested("x"),
        {"type": "complete", "id": "x"},
        {"type": "completions", "id": "x", "body": 7},
        {"id": "x"},
    ]
    with talking(server) as talk:
        say_at_once(talk, requested("x"), *wrong, cancel("x"), cancel("x"))
        reported = [m for m in (talk.hear() for _ in range(5)) if m["type"] != "chunk"]
        assert [m["id"] for m in reported] == [None] * 4 + ["x"], reported
        assert reported[-1] == {"type": "done", "id": "x", "cancelled": True}
        assert "'x'" in reported[0]["error"]["message"]
        assert lasts_until_rest(talk) == {"end": 1}
    server.at_rest()


@pytest.mark.parametrize("seed", range(4))
def test_cancels_and_closes_at_any_moment_leave_nothing_behind(server, seed):
    """Requests of all kinds run, some of them cancelled after a random time, and some sockets close meanwhile."""
    rng = random.Random(seed)
    bodies = [
        LONG, {**LONG, "stream": False}, {**LONG, "n": 3}, {"prompt": ["Once", "A fox"], "max_tokens": 40},
        {"prompt": "Once", "max_tokens": 16, "structured_outputs": {"regex": f"[a-{'cdef'[seed]}]{{1,9}}"}},
        {"prompt": "Once", "max_tokens": 8, "beam_width": 3, "stream": False}, {**SUM, "prompt": "Once"},
    ]  # fmt: skip
    for _ in range(6):
        with talking(server) as talk:
            names = [f"{number}" for number in range(MOST)]
            for name in names:
                say_at_once(talk, requested(name, rng.choice(bodies)), *[cancel(name)] * rng.choice([0, 0, 1, 2]))
                if rng.random() < 0.5:
                    server.do(lambda: asyncio.sleep(rng.choice([0, 0, 0.001, 0.01, 0.05])))
            if rng.random() < 0.3:
                talk.socket.socket.close()
                continue
            say_at_once(talk, *map(cancel, names))
            reported = Counter(m["id"] for m in talk.until(*names) if m["type"] != "chunk")
            assert reported == dict.fromkeys(names, 1), reported
            assert lasts_until_rest(talk) == {"end": 1}
    server.at_rest()
