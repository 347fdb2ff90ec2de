"""Pinned memory of pages: the way back to torch's own where a system cannot register memory."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from minivllm.device.worker import pinned


def test_memory_that_cuda_did_not_register_is_not_unregistered(monkeypatch):
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *args: calls.append("register") or 1,
        cudaHostUnregister=lambda *args: calls.append("unregister"),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned, "TorchSlab", lambda size: ("torch", size))
    monkeypatch.setattr(pinned, "_forget_error", lambda: calls.append("forget"))
    assert pinned.allocate(1 << 20) == ("torch", 1 << 20)
    assert calls == ["register", "forget"]


class Slab:
    """Memory at an address that no other slab has."""

    made = 0

    def __init__(self, size):
        self.size = size
        self.address = 4096 + (1 << 40) * Slab.made
        Slab.made += 1


def next_piece(slabs: pinned.PinnedSlabs):
    """Wait for a piece of 1 MiB; None if there is none after half a second."""
    end = time.monotonic() + 0.5
    while (piece := slabs.at_hand(1 << 20)) is None and time.monotonic() < end:
        time.sleep(1e-3)
    return piece


@pytest.mark.parametrize("share", [0, 3])
def test_threads_keep_pieces_at_hand_up_to_their_limits(monkeypatch, share):
    """Free pieces are refilled while the limit allows it, and pieces that come back are used again."""
    made: list[Slab] = []
    monkeypatch.setattr(pinned, "AHEAD", pinned.SLAB // 2)
    slabs = pinned.PinnedSlabs(lambda size: made.append(Slab(size)) or made[-1])
    assert slabs.at_hand(1 << 20) is None
    slabs.prepare({1 << 20: share * pinned.SLAB}, 6 * pinned.SLAB)
    pieces = [slabs.at_hand(1 << 20)]
    assert pieces[0] is not None, "the first slab is not made before the threads begin"
    while (piece := next_piece(slabs)) is not None:
        pieces.append(piece)
    assert len(made) == 6 and {slab.size for slab in made} == {pinned.SLAB}
    addresses = {piece.__array_interface__["data"][0] for piece in pieces}
    assert len(addresses) == len(pieces) == 6 * pinned.SLAB >> 20
    del pieces
    assert next_piece(slabs).nbytes == 1 << 20
    slabs.close()


def test_threads_leave_the_share_free_and_no_more(monkeypatch):
    made: list[Slab] = []
    monkeypatch.setattr(pinned, "AHEAD", pinned.SLAB // 2)
    slabs = pinned.PinnedSlabs(lambda size: made.append(Slab(size)) or made[-1])
    slabs.prepare({1 << 20: 3 * pinned.SLAB}, 6 * pinned.SLAB)
    end = time.monotonic() + 20
    while len(made) < 3 and time.monotonic() < end:
        time.sleep(1e-3)
    time.sleep(20 * pinned.PAUSE)
    assert len(made) == 3
    slabs.close()
