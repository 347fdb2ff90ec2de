"""The start of an engine leaves the garbage collection of the process as it was."""

from __future__ import annotations

import gc

import pytest

from minivllm.frontend.building import uncollected


class Cycle:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self, freed: list[str]) -> None:
        self.me, self.freed = self, freed

    def __del__(self) -> None:
        self.freed.append("freed")


@pytest.fixture(params=[True, False], ids=["on", "off"])
def enabled(request):
    """Switch the automatic collection on or off, and afterwards to its state before."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("live", [True, False])
def test_a_start_restores_the_automatic_collection(enabled, live):
    with uncollected(live):
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    with pytest.raises(ValueError, match="of the start"), uncollected(live):
        raise ValueError("of the start")
    assert gc.isenabled() is enabled


def test_a_start_collects_its_garbage_unless_a_server_does(enabled):
    freed: list[str] = []
    gc.collect()
    with uncollected(live=True):
        Cycle(freed)
    assert not freed
    with uncollected(live=False):
        Cycle(freed)
    assert len(freed) == (2 if enabled else 0)
    gc.collect()
    assert len(freed) == 2
