"""Pinned memory of pages: the way back to torch's own where a system cannot register memory."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minivllm.device.worker import pinned
from minivllm.device.worker.adapters import Adapters
from minivllm.device.worker.pages import DevicePages, LandedPage, Landing


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


def test_a_load_of_an_adapter_leaves_free_memory_for_another_one():
    made: list[Slab] = []
    adapters = Adapters.__new__(Adapters)
    adapters.device = torch.device("cuda")
    adapters._pinned = pinned.PinnedSlabs(lambda size: made.append(RealSlab(size)) or made[-1])
    adapters._sparing = threading.Lock()
    size = 3 * pinned.SLAB // 2  # a slab has one piece of this size
    first = adapters._empty(size // 2, torch.bfloat16)
    assert first.nbytes == size and len(made) == 1
    for _ in range(2):
        adapters._keep_spare()
        assert len(made) == 2
    second = adapters._empty(size // 2, torch.bfloat16)
    assert len(made) == 2 and second.data_ptr() != first.data_ptr()


def test_loads_that_end_at_once_leave_one_free_piece():
    made: list[Slab] = []
    adapters = Adapters.__new__(Adapters)
    adapters._bytes = 3 * pinned.SLAB // 2
    adapters._sparing = threading.Lock()
    taken = threading.Barrier(2)

    class Slow(pinned.PinnedSlabs):
        def empty(self, size):
            piece = super().empty(size)
            if len(made) == 1:  # the first piece is not free again when another thread looks for one
                with contextlib.suppress(threading.BrokenBarrierError):
                    taken.wait(0.2)
            return piece

    adapters._pinned = Slow(lambda size: made.append(Slab(size)) or made[-1])
    threads = [threading.Thread(target=adapters._keep_spare) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


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


def test_a_failed_allocation_ends_the_threads_and_leaves_the_slabs_in_use(monkeypatch, caplog):
    """Pages use the slabs that exist, the bytes of the failed slab are not counted, and no thread raises."""
    raised, made = [], []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))

    def allocate(size):
        if made:
            raise MemoryError("no memory")
        made.append(Slab(size))
        return made[-1]

    slabs = pinned.PinnedSlabs(allocate)
    before = set(threading.enumerate())
    slabs.prepare({1 << 20: 3 * pinned.SLAB}, 6 * pinned.SLAB)
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
    assert not raised and "no memory" in caplog.text
    pieces = [slabs.at_hand(1 << 20) for _ in range(pinned.SLAB >> 20)]
    assert all(piece is not None for piece in pieces) and slabs.at_hand(1 << 20) is None
    with pytest.raises(MemoryError):
        slabs.empty(1 << 20)
    made.clear()
    assert slabs.empty(1 << 20).nbytes == 1 << 20, "the memory that is there again cannot be used"
    assert slabs._made == {1 << 20: 2 * pinned.SLAB}


class Event:
    """An event of a GPU, which has come once ``ended`` is true."""

    ended = False

    def query(self):
        return self.ended


class RealSlab:
    """Ordinary memory."""

    def __init__(self, size):
        self.memory = np.zeros(size + pinned.ALIGNED, np.uint8)
        first = self.memory.__array_interface__["data"][0]
        self.address = -(-first // pinned.ALIGNED) * pinned.ALIGNED


def test_host_memory_of_a_page_is_not_used_again_before_its_copy_has_ended(monkeypatch):
    """The step of a request may write a staged page, and release it, while the page is still copied to the device."""
    stream = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    size = 4096
    slabs = pinned.PinnedSlabs(RealSlab)
    memory = DevicePages([[{"k": torch.zeros(8, size, dtype=torch.uint8)}]], None, torch.device("cpu"))
    source, event = slabs.empty(size), Event()
    address = source.__array_interface__["data"][0]
    staged = SimpleNamespace(nbytes=size, record_stream=lambda stream: None)
    landing = Landing(staged, None, event, [torch.from_numpy(source)], deque())
    page = LandedPage(landing, torch.ones(size, dtype=torch.uint8))
    memory.write(0, [3], [page])
    assert memory.groups[0][0][3].eq(1).all()
    del landing, page, source  # the mover has released the page, and no store keeps it

    def free_addresses():
        return {at for _, at in slabs._free[size]}

    gc.collect()
    assert address not in free_addresses(), "a thread could overwrite a page that is still copied"
    event.ended = True
    memory.write(0, [4], [np.zeros(size, np.uint8)])
    gc.collect()
    assert address in free_addresses(), "the memory is never used again"
