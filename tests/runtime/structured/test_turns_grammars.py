"""Grammars of several owners: they are compiled side by side, owners in turn."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from minivllm import RequestError
from minivllm.runtime.structured.helpers import Helpers
from minivllm.server.link.compiling import Compiling

ACTS = ["push", "push", "pop", "remove"]
# ---- grammars --------------------------------------------------------------------------------------------------------


class Library:
    """A library whose compilations end when the test allows it.  ``begun`` lists the started ones, in order."""

    def __init__(self):
        self.begun, self.gates, self.known = [], {}, {}
        self.came = threading.Condition()

    def find(self, params):
        return self.known.get(params.structured_outputs.source)

    def compile(self, params):
        source = params.structured_outputs.source
        with self.came:
            self.begun.append(source)
            gate = self.gates.setdefault(source, threading.Event())
            self.came.notify_all()
        assert gate.wait(60)
        return f"made {source}"

    def until(self, n):
        with self.came:
            assert self.came.wait_for(lambda: len(self.begun) >= n, 60)
        return self.begun[:]

    def end(self, source):
        with self.came:
            assert self.came.wait_for(lambda: source in self.gates, 60)
        self.gates[source].set()


def asks(owner, source, tenant=""):
    params = SimpleNamespace(structured_outputs=SimpleNamespace(source=source), salt=(tenant, ""))
    return SimpleNamespace(request=SimpleNamespace(params=params, owner=owner, grammar=None))


def all_ready(compiling, n):
    found, end = [], time.monotonic() + 60
    while len(found) < n:
        found += compiling.ready()
        assert time.monotonic() < end
        time.sleep(0.001)
    return found


@pytest.fixture
def library():
    made = Library()
    made.compiling = Compiling(made.find, made.compile, 2)
    yield made
    for gate in made.gates.values():
        gate.set()
    made.compiling.close()


def test_forty_slow_grammars_of_one_owner_do_not_hold_up_anothers(library):
    for i in range(40):
        library.compiling.begin(i, asks("a", f"a{i}"))
    assert library.until(1) == ["a0"]
    mine = asks("b", "b0")
    library.compiling.begin(100, mine)
    assert library.until(2) == ["a0", "b0"], "a worker is left for another owner"
    library.end("b0")
    assert all_ready(library.compiling, 1) == [(mine, None)] and mine.request.grammar == "made b0"
    library.compiling.begin(101, asks("b", "b1"))
    library.compiling.begin(102, asks("c", "c0"))
    library.compiling.begin(103, asks("b", "b2"))
    library.end("b1")
    assert library.until(4)[3] == "c0", "owners take turns"


def test_one_whose_clients_have_all_gone_is_not_compiled(library):
    for i in range(10):
        library.compiling.begin(i, asks("a", f"a{i // 2}"))
    library.until(1)
    # a0 runs; a1, a2 and a3 are cancelled one by one
    assert all(library.compiling.cancel(i) for i in (0, 1, 2, 3, 4, 7))
    assert not library.compiling.cancel(4) and len(library.compiling) == 4
    for source in ("a0", "a2", "a3", "a4"):
        library.end(source)
    assert len(all_ready(library.compiling, 4)) == 4
    assert library.begun == ["a0", "a2", "a3", "a4"] and len(library.compiling) == 0


def test_one_that_has_begun_is_stopped_when_its_last_client_has_gone_and_asked_for_again_it_is_made_anew():
    library, stopped = Library(), []
    compiling = Compiling(library.find, library.compile, 3, lambda params: stopped.append(params))
    requested = [asks("a", "slow"), asks("a", "slow")]
    for number, live in enumerate(requested):
        compiling.begin(number, live)
    library.until(1)
    assert compiling.cancel(0) and not stopped, "somebody waits for it still"
    assert compiling.cancel(1) and stopped == [requested[0].request.params]
    again = asks("a", "slow")
    compiling.begin(2, again)
    assert library.until(2) == ["slow", "slow"], "the one that was stopped makes nothing for who asks now"
    library.end("slow")
    assert [live for live, _ in all_ready(compiling, 1)] == [again]
    assert len(compiling) == 0 and again.request.grammar == "made slow"
    compiling.close()


def test_what_is_there_already_waits_for_nobody_and_so_does_what_was_refused(library):
    for i in range(5):
        library.compiling.begin(i, asks("a", f"a{i}"))
    library.known["kept"] = "found"
    mine = asks("a", "kept")
    library.compiling.begin(50, mine)
    assert library.compiling.ready() == [(mine, None)] and mine.request.grammar == "found"
    error = RequestError("no")
    library.compiling._find = lambda params: (_ for _ in ()).throw(error)
    library.compiling.begin(51, mine)
    assert library.compiling.ready() == [(mine, error)]


def test_requests_that_ask_for_the_same_are_compiled_once_and_tenants_apart(library):
    for i in range(4):
        library.compiling.begin(i, asks("a", "same", tenant=f"key-{i % 2}"))
    library.end("same")
    assert len(all_ready(library.compiling, 4)) == 4 and library.begun == ["same", "same"]


def test_helpers_are_made_by_need_and_one_is_ready_before_it_is_needed():
    made = []

    def make():
        made.append(SimpleNamespace(make_ready=ready.set, close=lambda: closed.append(1)))
        return made[-1]

    ready, closed = threading.Event(), []
    helpers = Helpers(make, 2)
    assert not made
    with helpers.one() as first:
        assert ready.wait(60)
        with helpers.one() as second:
            assert first is not second and len(made) == 2
    with helpers.one() as again:
        assert again in made
    helpers.close()
    assert len(closed) == 2
    alone = Helpers(make, 1)
    with alone.one():
        pass
    assert len(alone.made) == 1
