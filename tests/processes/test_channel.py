"""Messages through shared memory: whole, in order, each once, whatever their sizes; and an end that is noticed."""

from __future__ import annotations

import mmap
import os
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.processes import channel as module
from minivllm.processes.channel import WORD, Channel, ChannelClosed, Incoming, Outgoing, shared_file


@pytest.fixture
def ends():
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
    """Nothing is written over before it was read, and what has been read leaves room for any piece up to a half."""
    memory = mmap.mmap(-1, WORD + 64)
    writer, reader = Outgoing(memory, 0, 64), Incoming(memory, 0)
    waiting: list[tuple[int, bytes]] = []

    def read():
        at, data = waiting.pop(0)
        assert reader.take(at, len(data)) == data

    for i, (n, reads) in enumerate(pieces):
        data = bytes([i % 251]) * n
        while (at := writer.put(memoryview(data))) < 0:
            assert waiting, "an empty memory has no room"
            read()
        assert 0 <= at <= 64 - n
        assert waiting or at == 0, "all was read: it begins anew"
        waiting.append((at, data))
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
