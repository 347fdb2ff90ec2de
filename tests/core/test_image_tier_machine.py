"""Requests with images over a KV cache with tiers, under any order of events, and planted faults."""

from __future__ import annotations

import pytest
from image_machine import drive
from image_tier_machine import machine_of

from minivllm.core.engine import tiers
from minivllm.core.engine.tiers import Tiers
from minivllm.errors import EngineDeadError


def test_pages_with_parts_of_images_hold_their_own_content_whatever_happens():
    machine = machine_of()
    drive(machine, examples=80)
    machine.seen.require(finished=100, encoded=3, failed=3, loads=30, drafted=100, **{"loaded without an encoder": 3})


# ---- planted faults --------------------------------------------------------------------------------------------------


def keys_lack_the_content_of_images(monkeypatch):
    monkeypatch.setattr(tiers, "digests_by_block", lambda images, *blocks: {})


def keys_have_the_first_image_only(monkeypatch):
    real = tiers.digests_by_block
    monkeypatch.setattr(tiers, "digests_by_block", lambda images, *blocks: real(images[:1], *blocks))


def tenants_share_pages(monkeypatch):
    real = Tiers.root
    monkeypatch.setattr(Tiers, "root", lambda self, salt: real(self, ("", "")))


FAULTS = (keys_lack_the_content_of_images, keys_have_the_first_image_only, tenants_share_pages)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, EngineDeadError)) as caught:
        drive(machine_of(), examples=300)
    received = f"{type(caught.value).__name__}: {caught.value}"
    assert "AssertionError" in received, f"the fault itself is wrong: {received}"
