"""Messages over TCP arrive whole, in order and once, and only peers that have the secret are accepted."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.runtime.processes import gate as module
from minivllm.runtime.processes import wire
from minivllm.runtime.processes.channel import ChannelClosed, ChannelStuck
from minivllm.runtime.processes.gate import MOST, NONCE, ProcessGate, Refused, admit, greet
from minivllm.runtime.processes.wire import GONE, HEAD, Wire, cut_by, watch_peer

SECRET = b"s" * 32


def tcp():
    with socket.create_server(("127.0.0.1", 0)) as listens:
        a = socket.create_connection(listens.getsockname())
        return a, listens.accept()[0]


@contextlib.contextmanager
def wires():
    pair = [Wire(sock) for sock in tcp()]
    try:
        yield pair
    finally:
        for end in pair:
            end.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 200_000)), max_size=12))
def test_messages_come_whole_and_in_order_whatever_their_sizes(messages):
    with wires() as (a, b):
        sent = [(kind, os.urandom(size)) for kind, size in messages]

        def send():
            for kind, data in sent:
                a.send(kind, [data[:7], data[7:]])

        writer = threading.Thread(target=send)
        writer.start()
        found = [b.receive(wait=True) for _ in sent]
        writer.join()
        assert [(m.kind, bytes(m.data)) for m in found] == sent
        assert not b.ready() and b.receive(wait=False) is None


def test_two_who_send_more_than_fits_at_once_do_not_wait_for_each_other():
    with wires() as (a, b):
        data, found = bytes(16 << 20), []

        def other():
            b.send(1, [data])
            found.append(b.receive(wait=True))  # the thread that is done first reads the rest alone

        thread = threading.Thread(target=other)
        thread.start()
        a.send(2, [data])
        assert a.receive(wait=True).kind == 1
        thread.join()
        assert len(found[0].data) == len(data)


def test_who_reads_nothing_keeps_a_writer_waiting_only_so_long():
    with wires() as (a, _):
        a.patience = 0.2
        with pytest.raises(ChannelStuck, match="read nothing"):
            a.send(1, [bytes(64 << 20)])


def test_what_was_sent_before_an_end_is_read_and_the_end_is_told_behind_it():
    with wires() as (a, b):
        a.send(3, [b"last words"])
        a.close()
        assert b.rest(5.0)
        assert bytes(b.receive(wait=True).data) == b"last words"
        with pytest.raises(ChannelClosed):
            b.receive(wait=True)
        with pytest.raises(ChannelClosed):
            for _ in range(20):  # the first may still find room
                b.send(1, [b"more"])
                time.sleep(0.01)


def test_half_a_message_is_none_and_files_stay_on_their_machine():
    a, theirs = tcp()
    b = Wire(theirs)
    a.sendall(HEAD.pack(4, 7) + b"ab")
    time.sleep(0.05)
    assert not b.ready() and b.receive(wait=False) is None
    a.sendall(b"cd")
    assert b.receive(wait=True) == (7, bytearray(b"abcd"))
    with pytest.raises(ValueError, match="another machine"):
        b.send(1, [b""], file=0)
    a.close()
    b.close()


def test_the_kernel_asks_after_a_machine_that_is_silent():
    with wires() as (a, _):
        assert a.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        a, b = tcp()
        watch_peer(a)
        assert a.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * GONE
        a.close()
        b.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such limit")
def test_who_is_busy_for_longer_than_a_machine_may_be_silent_gets_all_that_was_sent(monkeypatch):
    monkeypatch.setitem(wire.WATCH, "TCP_USER_TIMEOUT", 300)
    with wires() as (a, b):
        data = bytes(32 << 20)  # more than the system takes while nobody reads
        other = threading.Thread(target=a.send, args=(1, [data]))
        other.start()
        time.sleep(1.5)
        assert len(b.receive(wait=True).data) == len(data)
        other.join()


def test_a_writer_is_told_when_the_other_machine_is_gone():
    a, theirs = tcp()
    sender = Wire(a, lives=lambda: False)
    with pytest.raises(ChannelClosed, match="out of reach"):
        sender.send(1, [bytes(64 << 20)])
    sender.close()
    theirs.close()


@pytest.mark.parametrize(("number", "cut"), [(errno.EHOSTUNREACH, True), (errno.ETIMEDOUT, True), (errno.EPIPE, False)])
def test_of_a_machine_that_is_out_of_reach_is_told_what_the_system_says(number, cut):
    assert cut_by(OSError(number, "words")) == ("words" if cut else "")


# ---- the gate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate():
    found = ProcessGate(SECRET, "127.0.0.1")
    yield found
    found.close()


def test_who_knows_the_secret_comes_in_on_both_ways_and_says_who_it_is(gate):
    for family, address in ((socket.AF_INET, gate.address), (socket.AF_UNIX, "\0" + gate.name)):
        with socket.socket(family) as sock:
            sock.connect(address)
            greet(sock, SECRET, {"place": 3})
            guest = gate.guests.get(timeout=5)
            assert guest.hello == {"place": 3} and guest.sock.family == family
            sock.sendall(b"x")
            assert guest.sock.recv(1) == b"x"
            guest.sock.close()


@pytest.mark.parametrize(
    "says",
    [
        lambda nonce: b"",
        lambda nonce: b"GET / HTTP/1.1\r\n\r\n" + bytes(200),
        lambda nonce: bytes(2 * NONCE) + (2).to_bytes(4, "little") + b"{}",
        lambda nonce: bytes(2 * NONCE) + (MOST + 1).to_bytes(4, "little") + b"{}",
    ],
    ids=["nothing", "http", "no proof", "too much"],
)
def test_who_does_not_know_it_is_sent_away_and_keeps_nobody_out(gate, says, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    with socket.create_connection(gate.address) as stranger, socket.create_connection(gate.address) as rank:
        stranger.sendall(says(stranger.recv(NONCE)))
        greet(rank, SECRET, {})
        assert gate.guests.get(timeout=5).hello == {}
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert gate.guests.empty() and gate.refused == 1


def test_a_proof_that_was_heard_is_worth_nothing_a_second_time(gate):
    """A stranger who has recorded one greeting sends the same bytes again."""
    heard = []

    class Heard:
        def __init__(self, sock):
            self.sock = sock

        def __getattr__(self, name):
            return getattr(self.sock, name)

        def sendall(self, data):
            heard.append(data)
            self.sock.sendall(data)

    with socket.create_connection(gate.address) as sock:
        greet(Heard(sock), SECRET, {})
    gate.guests.get(timeout=5).sock.close()
    with socket.create_connection(gate.address) as sock:
        sock.recv(NONCE)
        sock.sendall(heard[0])
        assert sock.recv(1) == b""


def test_a_rank_hears_only_who_knows_the_secret_too():
    a, b = tcp()

    def pretends():  # a server that accepts every client
        b.sendall(bytes(NONCE))
        b.recv(1 << 16)
        b.sendall(bytes(NONCE))

    other = threading.Thread(target=pretends)
    other.start()
    with pytest.raises(Refused, match="has another secret"):
        greet(a, SECRET, {})
    other.join()
    a.close()
    b.close()


def test_a_closed_gate_leaves_no_port_and_no_name():
    found = ProcessGate(SECRET, "127.0.0.1")
    address, name = found.address, found.name
    found.close()
    found.close()
    with pytest.raises(OSError):
        socket.create_connection(address, 1)
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError):
        sock.connect("\0" + name)
    assert ProcessGate(SECRET).address is None or pytest.fail("other machines may come, and nobody said so")


def test_what_a_rank_says_of_itself_is_json_and_nothing_that_runs():
    a, b = tcp()
    received = {}
    other = threading.Thread(target=lambda: received.update(admit(b, SECRET)))
    other.start()
    greet(a, SECRET, {"gpus": ["0"], "host": "x" * 200})
    other.join()
    assert json.dumps(received) and received["gpus"] == ["0"]
    a.close()
    b.close()
