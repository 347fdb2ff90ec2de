"""Ranks on two machines, which are network namespaces.  ``two_machines.py`` plays all scenes."""

from __future__ import annotations

import pytest

from .machines import why_not
from .two_machines import SCENES, play


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["offline", "the cable is out for 3 s", "the cable is cut", "the node is killed"])
def test_ranks_on_two_machines_give_the_tokens_of_one_process_or_say_in_seconds_what_broke(scene):
    if why := why_not():
        pytest.skip(why)
    assert play(scene)


def test_every_scene_says_what_it_does_and_without_namespaces_it_is_said_why(monkeypatch):
    assert len(SCENES) > 12 and all(callable(one) for one in SCENES.values())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in why_not()
    monkeypatch.undo()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert why_not()
