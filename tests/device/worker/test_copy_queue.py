"""The limit of copies to a GPU that are queued at a time, with events that the test ends."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from minivllm.core.mover import Mover
from minivllm.device.worker.pages import CopyQueue
from minivllm.plugins.executor.sim_pages import SimPages


class Event:
    """The event behind a copy that has ended after some queries."""

    def __init__(self, queries: int) -> None:
        self.queries = queries

    def query(self) -> bool:
        self.queries -= 1
        return self.queries < 0


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_copies_are_queued_than_the_limit(most):
    queue, all_events = CopyQueue(most), []
    for i in range(20):
        with queue.place() as queued:
            running = [event for event in all_events if event.queries >= 0]
            assert len(running) < most
            assert len(queued) < most, "events of copies that have ended are kept"
            all_events.append(Event(i % 7))
            queued.append(all_events[-1])


def test_a_place_that_is_not_used_stays_free():
    queue = CopyQueue(1)
    for _ in range(3):
        with queue.place():
            pass
    with queue.place() as queued:
        assert not queued


def test_a_copy_waits_until_an_earlier_one_has_ended():
    queue, ended, entered = CopyQueue(1), threading.Event(), threading.Event()
    first = Event(0)
    first.query = ended.is_set
    with queue.place() as queued:
        queued.append(first)

    def enter() -> None:
        with queue.place():
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.wait(0.05), "the copy did not wait"
    ended.set()
    thread.join(5)
    assert entered.is_set()


def test_copies_wait_for_none_while_no_step_runs():
    queue = CopyQueue(1)
    for i in range(5):
        with queue.place(alone=True) as queued:
            assert len(queued) == i
            queued.append(Event(1000))


def test_an_error_of_the_device_leaves_the_queue_usable():
    queue, broken = CopyQueue(1), Event(0)

    def fail() -> bool:
        raise RuntimeError("the device failed")

    broken.query = fail
    with queue.place() as queued:
        queued.append(broken)
    with pytest.raises(RuntimeError, match="device failed"), queue.place():
        pass
    broken.query = lambda: True
    with queue.place() as queued:
        assert not queued


def test_copies_are_limited_once_a_row_runs():
    memory = SimPages([np.zeros((4, 2), np.uint64)], None)
    mover = Mover([], memory, "00", threaded=False)
    mover.call({"begun": True})
    assert memory.alone
    mover.call({})
    assert not memory.alone
