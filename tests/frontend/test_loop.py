"""The loop that runs an engine on one thread: its messages, its ends, and the reports of an end."""

import threading
import time

import pytest

from minivllm import EngineDeadError, RequestError
from minivllm.frontend.async_llm import JobLoop
from minivllm.frontend.loop import Inbox, TurnLoop
from minivllm.testing.sim import request, sim_engine


def test_what_is_urgent_overtakes_the_rest_and_each_keeps_its_order():
    inbox = Inbox()
    assert all(inbox.put(item, urgent=item in "xy") for item in "axby")
    assert list(iter(inbox.take, None)) == ["x", "y", "a", "b"] and inbox.take() is None


def test_a_closed_inbox_takes_nothing_in_and_gives_what_it_has():
    inbox = Inbox()
    inbox.put(1)
    inbox.close()
    assert not inbox.put(2) and not inbox.put(3, urgent=True)
    assert list(iter(inbox.take, None)) == [1]


def test_the_first_that_is_wanted_leaves_alone_and_what_is_urgent_never():
    inbox = Inbox()
    for item in (3, 4, 6):
        inbox.put(item)
    inbox.put(8, urgent=True)
    even = lambda item: item % 2 == 0  # noqa: E731
    assert [inbox.remove(even) for _ in range(3)] == [4, 6, None]
    assert list(iter(inbox.take, None)) == [8, 3]


@pytest.mark.parametrize("act", [lambda inbox: inbox.put(1), lambda inbox: inbox.put(1, urgent=True), Inbox.close])
def test_who_waits_is_woken_by_whatever_happens(act):
    inbox, woken = Inbox(), threading.Event()
    thread = threading.Thread(target=lambda: (inbox.wait(None), woken.set()), daemon=True)
    thread.start()
    time.sleep(0.02)
    assert not woken.is_set()
    act(inbox)
    assert woken.wait(10)
    inbox.wait(None)  # no wait for an item that is there


class Scripted(TurnLoop):
    """A loop whose turns raise the exceptions of the script; None raises nothing."""

    def __init__(self, engine, script):
        super().__init__(engine)
        self.script, self.waits, self.left = list(script), [], []

    @property
    def over(self):
        return not self.script

    def turn(self, wait):
        self.waits.append(wait)
        if (error := self.script.pop(0)) is not None:
            raise error
        return self.engine.step()

    def leave(self, error):
        self.left.append((error, self.engine.dead))


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), SystemExit(3), EngineDeadError("gone"), RequestError("x")], ids=repr
)
def test_what_a_turn_raises_ends_the_loop_and_every_request_with_the_reason(error):
    engine = sim_engine()
    requested = request(engine, "r", [1, 2], max_tokens=9, ignore_eos=True)
    loop = Scripted(engine, [None, error, None])
    loop.run()
    assert str(error) in engine.dead and requested.sequences[0].error == engine.dead
    assert loop.left == [(error, engine.dead)] and loop.script == [None]


def test_the_loop_is_left_even_if_not_everyone_could_be_told(monkeypatch):
    engine = sim_engine()
    loop = Scripted(engine, [None])
    monkeypatch.setattr(engine, "fail_all", lambda why: (_ for _ in ()).throw(SystemExit(4)))
    with pytest.raises(SystemExit):
        loop.run()
    assert loop.left == [(None, None)]


def test_an_interrupt_of_a_plug_in_ends_nothing():
    engine = sim_engine()
    requested = request(engine, "r", [1, 2], max_tokens=9, ignore_eos=True)
    Scripted(engine, [KeyboardInterrupt(), *[None] * 9]).run()
    assert requested.sequences[0].finish_reason == "length" and engine.dead == "the engine was stopped"


def test_an_idle_loop_waits_and_a_busy_one_does_not():
    engine = sim_engine()
    loop = Scripted(engine, [None])
    loop.longest = 7.0
    assert loop.patience() == 7.0
    request(engine, "r", [1, 2], max_tokens=9, ignore_eos=True)
    assert loop.patience() <= 0.05
    loop.script = [None] * 3
    loop.run()
    assert loop.waits[1:] == [0.0, 0.0]


def test_a_job_that_raises_ends_nothing_but_itself():
    loop, done = JobLoop(sim_engine()), []
    for error in (ValueError("x"), KeyboardInterrupt()):
        loop.send(lambda error=error: (_ for _ in ()).throw(error))
    loop.send(lambda: done.append(1))
    loop.turn(0.0)
    assert done == [1] and not loop.over


@pytest.mark.parametrize("later", [False, True])
def test_an_abort_ends_a_request_that_is_still_to_be_added_and_none_that_is_sent_after_it(later):
    engine = sim_engine()
    loop, made = JobLoop(engine), []

    def add():
        made.append(request(engine, "mine", [1, 2], max_tokens=9, ignore_eos=True))

    loop.send(lambda: None)
    if not later:
        loop.send(add, adds="mine")
    loop.abort("mine")
    if later:
        loop.send(add, adds="mine")
    loop.turn(0.0)
    assert made[0].sequences[0].finish_reason == (None if later else "abort")


def test_what_comes_last_is_done_when_the_engine_has_told_everyone():
    loop, found = JobLoop(sim_engine()), []
    loop.send(lambda: found.append(loop.engine.dead))
    loop.inbox.close()
    loop.run()
    assert found == ["the engine was stopped"] and not loop.send(lambda: None)
