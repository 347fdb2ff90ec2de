"""Requests with images under any order of events: features, shared prefixes, chunks, and planted faults."""

from __future__ import annotations

import pytest
from image_machine import drive, machine_of

from minivllm.core.engine import plan_columns
from minivllm.core.engine.image_content import Content
from minivllm.core.engine.images import Images
from minivllm.errors import EngineDeadError
from minivllm.plugins.scheduler.fair import Fair
from minivllm.plugins.scheduler.fcfs import Fcfs

SEEN = (
    "encoded", "reused", "dropped", "failed", "preempted", "hit", "copied", "forked", "aborted", "drafted", "divided",
)  # fmt: skip


def test_images_keep_their_features_and_prefixes_whatever_happens():
    machine = machine_of([Fcfs])
    drive(machine, examples=120)
    machine.seen.require(**dict.fromkeys(SEEN, 3), finished=100)


# ---- planted faults --------------------------------------------------------------------------------------------------


def same_number_for_all_pictures(monkeypatch):
    plain = Images._content
    monkeypatch.setattr(
        Images,
        "_content",
        lambda self, salt, image: next(iter(self.contents.values()), None) or plain(self, salt, image),
    )


def tenants_share_pictures(monkeypatch):
    plain = Images._content
    monkeypatch.setattr(Images, "_content", lambda self, salt, image: plain(self, ("", ""), image))


def prompts_have_the_same_tokens_for_all_pictures(monkeypatch):
    plain = Images.begin

    def begin(self, request):
        plain(self, request)
        return request.prompt.copy()

    monkeypatch.setattr(Images, "begin", begin)


def features_are_freed_early(monkeypatch):
    plain = Images.reach

    def reach(self, slots, at, q_len):
        self.frees += [one.number for one in self.contents.values() if one.encoded and one.rows]
        plain(self, slots, at, q_len)

    monkeypatch.setattr(Images, "reach", reach)


def pictures_change_places(monkeypatch):
    plain = plan_columns.join_rows

    def swapped(seqs):
        rows = plain(seqs)
        rows[:, 1] = rows[::-1, 1]
        return rows

    monkeypatch.setattr(plan_columns, "join_rows", swapped)


def chunks_end_anywhere(monkeypatch):
    monkeypatch.setattr(Images, "undivided", False)


def preempted_rows_keep_their_features(monkeypatch):
    monkeypatch.setattr(Images, "leave", lambda self, seq: self.held.pop(seq, None))


def lost_features_are_remembered(monkeypatch):
    monkeypatch.setattr(Images, "lose", lambda self, numbers: self.frees.extend(numbers))


def the_limit_is_ignored(monkeypatch):
    plain = Images.place

    def place(self, seq):
        limit, self.limit = self.limit, 1 << 30
        try:
            return plain(self, seq)
        finally:
            self.limit = limit

    monkeypatch.setattr(Images, "place", place)


def features_are_read_before_they_are_complete(monkeypatch):
    monkeypatch.setattr(Content, "ready", lambda self, step: self.encoded)


FAULTS = (
    same_number_for_all_pictures, tenants_share_pictures, prompts_have_the_same_tokens_for_all_pictures,
    features_are_freed_early, pictures_change_places, chunks_end_anywhere, preempted_rows_keep_their_features,
    lost_features_are_remembered, the_limit_is_ignored, features_are_read_before_they_are_complete,
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, EngineDeadError)):
        drive(machine_of([Fcfs, Fair]), examples=400)
