"""Messages through shared memory arrive whole, in order and once, for all sizes, and the end of the other side is
noticed.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.runtime.processes import channel as module
from minivllm.runtime.processes.channel import (
    HEAD,
    Channel,
    ChannelClosed,
    ChannelStuck,
    Incoming,
    Outgoing,
    shared_file,
)
from minivllm.runtime.processes.rhythm import Rhythm


@pytest.fixture(params=[True, False], ids=["", "a bell each"])
def ends(request, monkeypatch):
    """With and without a processor that keeps stores in order."""
    monkeypatch.setattr(module, "ORDERED", request.param and module.ORDERED)
    a, b = socket.socketpair()
    file = shared_file(Channel.BYTES)
    pair = Channel(a, file, started=False), Channel(b, file, started=True)
    os.close(file)
    yield pair
    for end in pair:
        end.close()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 32), st.integers(0, 3)), max_size=60))
def test_pieces_are_read_as_they_were_written_however_the_memory_wraps(pieces):
    """Nothing is overwritten before it was read.  After it was read, there is room for any piece of up to a half."""
    memory = mmap.mmap(-1, HEAD + 64)
    writer, reader = Outgoing(memory, 0, 64), Incoming(memory, 0)
    reader.heard = None  # the number of notes is in the memory
    waiting: list[tuple[int, bool, bytes]] = []

    def read():
        assert reader.ready()
        assert reader.take() == waiting.pop(0)
        assert reader.ready() == bool(waiting)

    for i, (n, reads) in enumerate(pieces):
        data = bytes([i % 251]) * n
        while (at := writer.put(data, i % 5, i % 3 == 0)) < 0:
            assert waiting, "an empty memory has no room"
            read()
        assert 0 <= at <= 64 - n
        assert waiting or at == 0, "all was read: it begins anew"
        waiting.append((i % 5, i % 3 == 0, data))
        for _ in range(min(reads, len(waiting))):
            read()
    while waiting:
        read()


def test_messages_arrive_whole_in_order_and_each_once(ends):
    ours, theirs = ends
    assert theirs.receive(wait=False) is None
    sent = [(i % 7, os.urandom(i * i % 5000)) for i in range(200)]
    for kind, data in sent:
        ours.send(kind, [data[:10], data[10:]])
    assert [theirs.receive(wait=True) for _ in sent] == sent
    assert theirs.receive(wait=False) is None


def test_a_message_larger_than_the_ring_goes_in_pieces_while_both_send(ends):
    """Both ends write more than fits before they read: each makes room for the other while it waits for room."""
    ours, theirs = ends
    large = np.random.default_rng(0).bytes(3 * module.BACK)
    found = []

    def both():
        theirs.send(2, [large])
        found.append(theirs.receive(wait=True))

    thread = threading.Thread(target=both)
    thread.start()
    ours.send(1, [large])
    assert ours.receive(wait=True) == (2, large)
    thread.join()
    assert found == [(1, large)]


def test_a_file_arrives_with_its_message(ends):
    ours, theirs = ends
    for content in (b"first", b"second"):
        file = shared_file(16)
        os.write(file, content)
        ours.send(5, [content], file=file)
        os.close(file)
    for content in (b"first", b"second"):
        assert theirs.receive(wait=True) == (5, content)
        file = theirs.file()
        assert os.pread(file, len(content), 0) == content
        os.close(file)


def test_the_end_of_the_other_is_told_after_all_that_it_sent(ends):
    ours, theirs = ends
    theirs.send(1, [b"last words"])
    theirs.close()
    assert ours.receive(wait=True) == (1, b"last words")
    for wait in (True, False):
        with pytest.raises(ChannelClosed):
            ours.receive(wait)
    with pytest.raises(ChannelClosed):
        ours.send(1, [b"nobody hears this"])


def test_more_notes_than_there_is_room_for_wait_for_the_reader(ends):
    """And the bells of all of them do not fit into the socket."""
    ours, theirs = ends
    found = []
    many = 3 * module.NOTES

    def read():
        time.sleep(0.02)
        found.extend(theirs.receive(wait=True).kind for _ in range(many))

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(many):
        ours.send(i, [])
    thread.join()
    assert found == list(range(many))


def test_a_reader_that_makes_no_room_is_waited_for_only_so_long(ends):
    ours, _ = ends
    ours.patience = 0.05
    begun = time.monotonic()
    with pytest.raises(ChannelStuck, match="has read nothing from the channel for"):
        for i in range(2 * module.NOTES):
            ours.send(i, [])
    assert 0.05 < time.monotonic() - begun < 2.0


ANSWERS = """
import os, random, socket, sys, time
from minivllm.runtime.processes import channel as module

module.NAPS = (5.0, 5.0)
module.ORDERED = module.ORDERED and sys.argv[1] == "True"
rounds, ours, theirs, file = 3000, *socket.socketpair(), module.shared_file(module.Channel.BYTES)
child = os.fork() == 0
end = module.Channel(theirs if child else ours, file, started=child)
draw, slowest = random.Random(child), 0.0
for i in range(rounds):
    begun = time.perf_counter()
    if child:
        assert end.receive(True) == (i, b"%d" % i)
    else:
        end.send(i, [b"%d" % i])
    until = time.perf_counter() + draw.randrange(80) * 1e-6
    while time.perf_counter() < until:
        pass
    if child:
        end.send(i, [b"%d" % i])
    else:
        assert end.receive(True) == (i, b"%d" % i)
        slowest = max(slowest, time.perf_counter() - begun)
if not child:
    os.wait()
    print(slowest)
"""


@pytest.mark.parametrize("ordered", [True, False], ids=["", "a bell each"])
def test_no_message_is_missed_by_who_goes_to_sleep(ordered):
    """Two processes answer each other after about the time in which the other one falls asleep.  A wake-up that was
    lost would be noticed after a nap, which takes five seconds here."""
    done = subprocess.run([sys.executable, "-c", ANSWERS, str(ordered)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 4.5


def test_who_waits_for_nothing_uses_no_cpu_and_hears_of_the_end(ends):
    ours, theirs = ends
    rhythm = Rhythm()
    rhythm.begin()
    spent, begun = time.thread_time(), time.monotonic()
    assert not ours.rest(0.5, rhythm)
    assert time.monotonic() - begun >= 0.5
    assert time.thread_time() - spent < 0.02
    theirs.close()
    begun = time.monotonic()
    with pytest.raises(ChannelClosed):
        ours.receive(True, rhythm)
    assert time.monotonic() - begun < 0.2
