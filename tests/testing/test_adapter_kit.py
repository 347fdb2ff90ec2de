"""The suite of adapters under test: faults planted in the engine fail its rule about requests."""

from __future__ import annotations

import numpy as np
import pytest

from minivllm.core.engine import engine as engine_module
from minivllm.core.engine.adapter_set import ResidentSet
from minivllm.device.worker.adapters import Adapters
from minivllm.testing.session import run

SERVED = "test_the_engine_serves_it"


def another_row(monkeypatch):
    set_rows = Adapters._set
    monkeypatch.setattr(Adapters, "_set", lambda self, slots, places: set_rows(self, slots, np.roll(places, 1)))


def place_taken_from_a_running_row(monkeypatch):
    evict = ResidentSet.evict
    monkeypatch.setattr(ResidentSet, "evict", lambda self, busy: evict(self, lambda one: False))


def prefix_shared(monkeypatch):
    monkeypatch.setattr(engine_module, "salt_of", lambda request, wiring: request.params.salt)


def place_never_written(monkeypatch):
    store = Adapters._store

    def first_only(self, place, adapter):
        if self.of_place[place] is None:
            store(self, place, adapter)

    monkeypatch.setattr(Adapters, "_store", first_only)


def points_left_out(monkeypatch):
    """Leave the points of adapters out of steps."""
    of_step = Adapters.of_step
    monkeypatch.setattr(Adapters, "of_step", lambda self, plan: (of_step(self, plan)[0], ()))


FAULTS = [
    ("lora", another_row),
    ("lora", place_taken_from_a_running_row),
    ("lora", prefix_shared),
    ("steering", prefix_shared),
    ("ia3", place_never_written),
    ("steering", place_never_written),
    ("steering", points_left_out),
]


@pytest.mark.parametrize(("name", "plant"), FAULTS, ids=lambda one: getattr(one, "__name__", one))
def test_a_fault_of_the_engine_fails_the_rule_about_requests(monkeypatch, name, plant):
    plant(monkeypatch)
    outcomes = run([("adapter", f"minivllm/{name}")], select=SERVED, shrink=False)
    assert [o.test for o in outcomes if o.status == "failed"] == [SERVED]
