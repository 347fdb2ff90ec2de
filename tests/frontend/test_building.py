"""The start of an engine leaves the garbage collection of the process as it was."""

from __future__ import annotations

import gc

import pytest

from minivllm.frontend.building import uncollected


@pytest.fixture(params=[True, False], ids=["on", "off"])
def enabled(request):
    """Switch the automatic collection on or off, and afterwards to its state before."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_a_start_restores_the_automatic_collection(enabled):
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    with pytest.raises(ValueError, match="of the start"), uncollected():
        raise ValueError("of the start")
    assert gc.isenabled() is enabled
