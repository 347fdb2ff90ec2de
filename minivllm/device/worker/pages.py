"""Copy pages of the KV cache between the device and the storage tiers (``core.mover``)."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.core.mover import KEPT, QUEUE, READ
from minivllm.device.hardware import free_ram
from minivllm.device.loading.fingerprint import code_of, model_files, processor_files, versions_of
from minivllm.device.native import library

from .capture import ALONE
from .pinned import PinnedSlabs, allocate
from .stores import make_mover

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.mover import Mover

    from .recurrent import StateMemory


STAGING = 1 << 30  # most bytes of device memory for loaded pages that no step has written to blocks yet
# largest share of the device's memory for loaded pages; pages on the way to the host get as much again
STAGING_SHARE = 1 / 128
AT_START = 16 << 30  # most bytes of pinned memory that are allocated at the start, before pages need them
# A kernel copies pages to the device only if it is faster by this factor than the copy engine, because it slows the
# step beside it more: on an H200, reading 8 GiB of weights took 1.25 times as long beside it, and 1.06 times beside the
# copy engine.
FASTER = 1.25
QUEUED = 2  # copies of pages to the device that may be queued at a time
POLL = 5e-5  # seconds between two checks whether one of them has ended
TRIAL = 8 << 20  # bytes that are copied to compare the speeds of a kernel and of the copy engine


class HostBatch:
    """Pages u8 [n, bytes] that are in host memory already, as on a CPU."""

    ready = True

    def __init__(self, pages: np.ndarray) -> None:
        self._pages = pages

    def page(self, i: int, own: bool) -> np.ndarray:
        return self._pages[i].copy() if own else self._pages[i]


class LeavingBatch:
    """Pages u8 [bytes] in pinned memory to which a GPU copies, and the event behind the copies.

    A page is None if no pinned memory was free for it."""

    def __init__(self, pages: list[np.ndarray | None], ended: Any) -> None:
        self.pages = pages
        self.ended = ended

    @property
    def ready(self) -> bool:
        return self.ended.query()

    def page(self, i: int, own: bool) -> np.ndarray | None:
        self.ended.synchronize()
        return self.pages[i]


class LeavingPages:
    """Device memory for pages that are copied to the host, in slots of memory that are used in turn.

    The stream of the steps writes a slot, and another stream copies it to the host.  The next write to the slot waits
    on the device for this copy.
    """

    def __init__(self, total: int, slot: int, device: torch.device) -> None:
        """Prepare slots of ``slot`` bytes each, ``total`` bytes together and at least two, without allocating them
        yet."""
        self._slots: list[Tensor | None] = [None] * max(2, total // slot)
        self._size = slot
        self._device = device
        self._next = 0
        self._ended: list[Any] = [None] * len(self._slots)  # slot -> event behind the last copy from it
        self._batches: deque[LeavingBatch] = deque()  # batches whose copies may still run, so their memory must stay
        self.stream = torch.cuda.Stream(device)

    def take(self, size: int) -> tuple[int, Tensor]:
        """Return the index of the next slot and ``size`` bytes of its memory, which the current stream may write."""
        number = self._next
        self._next = (number + 1) % len(self._slots)
        memory = self._slots[number]
        if memory is None:
            memory = self._slots[number] = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            memory.record_stream(self.stream)
        if self._ended[number] is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ended[number])
        return number, memory[:size]

    def release(self) -> None:
        """Free the memory of the slots.  Later calls allocate it again."""
        self._slots = [None] * len(self._slots)
        self._ended = [None] * len(self._slots)

    def leave(self, number: int, gathered: Tensor, pages: list[np.ndarray | None]) -> LeavingBatch:
        """Copy the rows of ``gathered`` u8 [n, bytes] in slot ``number`` to the n elements of ``pages`` that are not
        None.

        The copy waits for the current stream, which writes ``gathered``."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            for row, page in zip(gathered, [page for page in pages if page is not None], strict=True):
                torch.from_numpy(page).copy_(row, non_blocking=True)
            ended = torch.cuda.Event()
            ended.record(self.stream)
        self._ended[number] = ended
        batch = LeavingBatch(pages, ended)
        self._batches.append(batch)
        while self._batches and self._batches[0].ready:
            self._batches.popleft()
        return batch


class Landing:
    """Device memory u8 [bytes] for loaded pages that are copied to the device together, and the events of their
    copies."""

    def __init__(self, memory: Tensor, begun: Any, ended: Any, sources: Sequence[Tensor], freed: deque[int]) -> None:
        self.memory = memory
        self.begun = begun
        self.ended = ended
        self.sources: Sequence[Tensor] = sources  # host pages; dropped when their copies have ended
        self._freed = freed

    def __del__(self) -> None:
        self._freed.append(self.memory.nbytes)

    @property
    def arrived(self) -> bool:
        """Return True if the copies have ended."""
        if self.sources and self.ended.query():
            self.sources = ()
        return not self.sources

    @property
    def seconds(self) -> float:
        """Return the time of the copies, which have ended."""
        return self.begun.elapsed_time(self.ended) / 1e3


class CopyQueue:
    """Limits the number of copies to the device that are queued at a time.

    The copy engine runs copies of all streams in turn, so a step's copy from pinned memory waits for all copies queued
    before: on an H200, 64 KiB took 8.3 ms behind 0.5 GB."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ended: deque[Any] = deque()  # events behind the copies, in their order
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def place(self, alone: bool = False) -> Iterator[deque[Any]]:
        """Wait until another copy may be queued; with ``alone`` at once, because no step runs.  The caller appends the
        event behind the copy to the result."""
        with self._lock:
            while self._ended:
                if self._ended[0].query():
                    self._ended.popleft()
                elif alone or len(self._ended) < self._most:
                    break
                else:
                    time.sleep(POLL)
            yield self._ended


class LandedPage:
    """A page u8 [bytes] on the device that was loaded as a part of a ``Landing``."""

    def __init__(self, landing: Landing, page: Tensor) -> None:
        self.landing = landing
        self.page = page


class DevicePages:
    """Copies between the cache tensors of a device and pages in host memory.  A page has the bytes of a block in all
    tensors of a KV group; recurrent states are one more group.

    On a GPU, blocks are gathered to pages on the stream of the steps, and a second stream copies them to pinned memory.
    Loaded pages are copied to the device by a third stream as soon as they are in host memory, so that the step of
    their request only writes them to its blocks.  If ``STAGING`` bytes are in use, the step copies them itself.
    """

    def __init__(
        self,
        caches: Sequence[Sequence[Mapping[str, Tensor]]],
        states: StateMemory | None,
        device: torch.device,
    ) -> None:
        # the device with its number, because the current device may differ in other threads
        self.on_gpu = device.type == "cuda"
        self.device = device
        if self.on_gpu:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.groups = [_sorted(group) for group in caches]
        if states is not None:
            self.groups.append([*_sorted(states.memory), states.valid])
        self.page_bytes = [sum(_row_bytes(t) for t in tensors) for tensors in self.groups]
        # (event before, event behind, host pages) of each copy to the device that a step has queued
        self._copied: deque[tuple[Any, Any, list[Tensor]]] = deque()
        # (event behind the copies, host pages) of staged pages that a step used before their copies had ended
        self._arriving: deque[tuple[Any, Sequence[Tensor]]] = deque()
        self.alone = False
        self.written_bytes = 0
        self.written_seconds = 0.0
        self._staged = 0  # bytes of staging memory in use; ``_freed`` has the sizes of parts that are free again
        self._freed: deque[int] = deque()
        self._tables: list[Any] = [None] * len(self.groups)
        # KV group -> whether a kernel copies its pages to the device, instead of the copy engine
        self.queue = QUEUE
        self.copy_seconds: float | None = None
        self.by_kernel = [False] * len(self.groups)
        self.notes: list[str] = []
        if self.on_gpu:
            self._loads = torch.cuda.Stream(self.device)
            self._queued = CopyQueue(QUEUED)
            total = torch.cuda.get_device_properties(self.device).total_memory
            self.staging = self.queue = staging_bytes(total)
            self._pinned = PinnedSlabs(self._allocate)
            largest = max(READ, *self.page_bytes)
            self._leaving = LeavingPages(self.queue, largest, self.device)
            if find_spec("triton") is not None:
                self._build_tables()

    def _build_tables(self) -> None:
        """Prepare the kernel that copies pages, for KV groups with contiguous tensors, and measure for each group
        whether the kernel or the copy engine is faster."""
        from minivllm.device.kernels.pages import PageTable

        for group, tensors in enumerate(self.groups):
            if not all(t.is_contiguous() for t in tensors):
                continue
            self._tables[group] = PageTable(tensors)
            with torch.inference_mode():  # compiles the kernel; nothing reads block 0
                page = torch.empty(1, self.page_bytes[group], dtype=torch.uint8, device=self.device)
                gathered = self._gather(group, [0], page)
                self._scatter(group, [0], gathered.unbind())
            self._choose(group)

    def layout(self) -> list[list[tuple[str, list[int]]]]:
        """Return dtype and shape of a block in each tensor of each group."""
        found = []
        for tensors in self.groups:
            found.append([(str(t.dtype), list(t.shape[1:])) for t in tensors])
        return found

    # ---- to the host -------------------------------------------------------------------------------------------------

    def read(self, group: int, blocks: Sequence[int]) -> HostBatch | LeavingBatch:
        size = self.page_bytes[group]
        with torch.inference_mode():
            if not self.on_gpu:
                pages = torch.empty(len(blocks), size, dtype=torch.uint8)
                return HostBatch(self._gather(group, blocks, pages).numpy())
            self._measure()  # releases host memory
            host = [self._pinned.at_hand(size) for _ in blocks]
            own = [block for block, page in zip(blocks, host, strict=True) if page is not None]
            number, memory = self._leaving.take(len(own) * size)
            gathered = self._gather(group, own, memory.view(len(own), size))
            return self._leaving.leave(number, gathered, host)

    def _gather(self, group: int, blocks: Sequence[int], pages: Tensor) -> Tensor:
        """Copy blocks to ``pages`` u8 [n, bytes] on the device, and return these."""
        table = self._tables[group]
        size = self.page_bytes[group]
        if not blocks:
            return pages
        if table is not None:
            first = pages.data_ptr()
            addresses = [first + i * size for i in range(len(blocks))]
            table.move(blocks, addresses, pack=True)
            return pages
        index = torch.tensor(blocks, dtype=torch.int64).to(self.device, non_blocking=True)
        parts = [t[index].reshape(len(blocks), -1).view(torch.uint8) for t in self.groups[group]]
        return torch.cat(parts, 1, out=pages)

    # ---- to the device -----------------------------------------------------------------------------------------------

    def stage(self, group: int, pages: Sequence[np.ndarray]) -> Sequence[Any]:
        """Start the copies of loaded pages to the device, and return one object per page for ``write``.

        A thread of a storage tier calls this.  While rows run, it waits until fewer than ``QUEUED`` earlier copies are
        left.
        """
        if not self.on_gpu:
            return pages
        size = sum(page.nbytes for page in pages)
        sources = [torch.from_numpy(page) for page in pages]
        # the allocation may wait for the device, so no capture may begin at the same time
        device = torch.cuda.device(self.device)
        with (
            self._queued.place(self.alone) as queued,
            ALONE,
            torch.inference_mode(),
            device,
            torch.cuda.stream(self._loads),
        ):
            while self._freed:
                self._staged -= self._freed.popleft()
            if size + self._staged > self.staging:
                return pages
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
            begun = self._mark()
            parts = memory.split([page.nbytes for page in pages])
            self._copy(group, sources, parts)
            landing = Landing(memory, begun, self._mark(), sources, self._freed)
            queued.append(landing.ended)
            self._staged += size
        return [LandedPage(landing, part) for part in parts]

    def _copy(self, group: int, sources: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """Copy pages of a KV group from host memory (``sources``) to device memory (``parts``), on the current
        stream."""
        if self.by_kernel[group] and all(s.data_ptr() % 8 == 0 and s.is_pinned() for s in sources):
            from minivllm.device.kernels.pages import copy_pages

            copy_pages(sources, parts)
            return
        for source, part in zip(sources, parts, strict=True):
            part.copy_(source, non_blocking=True)

    def arrived(self, page: Any) -> float | None:
        """Return the seconds that the copy of a staged page took; None while it runs, 0 if ``write`` copies the
        page."""
        if not isinstance(page, LandedPage):
            return 0.0
        landing = page.landing
        if not landing.arrived:
            return None
        share = page.page.nbytes / landing.memory.nbytes
        return landing.seconds * share

    def write(self, group: int, blocks: Sequence[int], pages: Sequence[Any]) -> None:
        sources = [torch.from_numpy(page) for page in pages if not isinstance(page, LandedPage)]
        landings = {page.landing for page in pages if isinstance(page, LandedPage)}
        begun = self._mark() if sources else None
        with torch.inference_mode():
            for landing in landings:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(landing.ended)
                landing.memory.record_stream(stream)
                if not landing.arrived:  # the host pages must stay until their copies have ended
                    self._arriving.append((landing.ended, landing.sources))
            copied = iter([source.to(self.device, non_blocking=True) for source in sources])
            found = [page.page if isinstance(page, LandedPage) else next(copied) for page in pages]
            self._scatter(group, blocks, found)
        if sources:
            self._copied.append((begun, self._mark(), sources))
        self._measure()

    def _scatter(self, group: int, blocks: Sequence[int], pages: Sequence[Tensor]) -> None:
        """Write pages u8 [bytes] on the device to blocks."""
        table = self._tables[group]
        addresses = [page.data_ptr() for page in pages]
        if table is not None and not any(address % table.unit for address in addresses):
            table.move(blocks, addresses, pack=False)
            return
        index = torch.tensor(blocks, dtype=torch.int64).to(self.device, non_blocking=True)
        page = torch.stack(list(pages))
        at = 0
        for t in self.groups[group]:
            size = _row_bytes(t)
            part = page[:, at : at + size].contiguous().view(t.dtype)
            t[index] = part.reshape(len(blocks), *t.shape[1:])
            at += size

    # ---- times -------------------------------------------------------------------------------------------------------

    def _choose(self, group: int) -> None:
        """Choose a kernel or the copy engine for the copies of pages of a group, by the speeds of both."""
        size = self.page_bytes[group]
        if size % 8:
            return
        n = max(2, min(64, TRIAL // size))
        sources = [torch.from_numpy(self.empty(size)) for _ in range(n)]
        parts = torch.empty(n, size, dtype=torch.uint8, device=self.device).unbind()
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(8):
            by_kernel = turn % 2 == 1
            self.by_kernel[group] = by_kernel
            begun = self._mark()
            self._copy(group, sources, parts)
            ended = self._mark()
            ended.synchronize()
            times[by_kernel].append(begun.elapsed_time(ended))
        best = {way: min(found) for way, found in times.items()}
        self.by_kernel[group] = best[True] * FASTER < best[False]
        copied = n * size
        seconds = best[self.by_kernel[group]] / 1e3
        self.copy_seconds = max(self.copy_seconds or 0.0, seconds / copied)
        speeds = {way: copied / 1e6 / milliseconds for way, milliseconds in best.items()}
        chosen = "a kernel" if self.by_kernel[group] else "the copy engine"
        self.notes.append(
            f"pages of {size} bytes are copied to the device by {chosen} (copy engine {speeds[False]:.1f} GB/s, "
            f"kernel {speeds[True]:.1f} GB/s)"
        )

    def _mark(self) -> Any:
        """Return the time in seconds on a CPU; on a GPU return an event behind the work queued so far."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _measure(self) -> None:
        """Add up the bytes and the times of the copies that have ended, and release their pages."""
        while self._arriving and self._arriving[0][0].query():
            self._arriving.popleft()
        while self._copied:
            begun, ended, sources = self._copied[0]
            if not self.on_gpu:
                seconds = ended - begun
            elif ended.query():
                seconds = begun.elapsed_time(ended) / 1e3
            else:
                return
            self._copied.popleft()
            self.written_bytes += sum(source.nbytes for source in sources)
            self.written_seconds += seconds

    # ---- host memory -------------------------------------------------------------------------------------------------

    def empty(self, size: int) -> np.ndarray:
        """Return memory u8 [size] of any content, pinned for a GPU."""
        return self._pinned.empty(size) if self.on_gpu else np.empty(size, np.uint8)

    def prepare(self, kept: int) -> None:
        """Allocate pinned memory in threads for pages that are copied from a GPU to the host.

        It holds ``kept`` bytes of pages that stay in stores in host memory, and the pages that are being copied.
        """
        if self.on_gpu:
            most = kept + self.queue * KEPT
            share = min(most, AT_START, free_ram() // 2) // len(self.page_bytes)
            self._pinned.prepare(dict.fromkeys(self.page_bytes, share), most)

    def _allocate(self, size: int) -> Any:
        """Return a slab of pinned memory."""
        return allocate(size, self._alone)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock without which CUDA must not wait for the device, because another thread may record a graph."""
        with ALONE, torch.cuda.device(self.device):
            yield

    def release(self) -> None:
        """Free the device memory for pages on the way to the host."""
        if self.on_gpu:
            self._leaving.release()

    def close(self) -> None:
        """End the threads that allocate pinned memory, and free the device memory of pages."""
        if self.on_gpu:
            self._pinned.close()
            self._leaving.release()


def staging_bytes(total: int) -> int:
    """Return the bytes of device memory for loaded pages, and also for pages on the way to the host.

    ``total`` is the size of the device's memory in bytes."""
    return min(STAGING, int(total * STAGING_SHARE))


def _sorted(memories: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the tensors of all layers; the tensors of a layer are sorted by their names."""
    return [memory[name] for memory in memories for name in sorted(memory)]


def _row_bytes(t: Tensor) -> int:
    """Return the bytes of one block in a tensor."""
    return t[0].numel() * t.element_size()


def identity_of(wiring: Wiring, layout: Any) -> str:
    """Return a digest (hex) of everything besides tokens and salt on which the content of a page depends."""
    seconds = list(wiring.own_models.values())
    if wiring.speculation.draft_model is not None:
        seconds.append(wiring.speculation.draft_model)
    folders = [wiring.model_dir]
    served = {seam: wiring.parts[seam] for seam in PAGES}
    parts = list(served.values())
    for model in seconds:
        folders.append(model.model_dir)
        parts += model.parts.values()
    facts: dict[str, Any] = {"keys": KEYS, "layout": layout}
    facts["code"] = code_of(part.target for part in parts)
    facts["files"] = [dict(model_files(folder)) for folder in folders]
    facts["load_format"] = wiring.load_format
    facts["seed"] = wiring.seed if wiring.load_format == "dummy" else None
    facts["parts"] = {seam: [part.target, dict(part.options)] for seam, part in served.items()}
    facts["dtype"] = wiring.dtype
    facts["machine"] = [torch.__version__, *_machine(wiring.device)]
    facts["block"] = wiring.block
    facts["ranks"] = wiring.parallel.tensor_parallel_size
    facts["invariant"] = wiring.batch_invariant
    facts["steps"] = [wiring.steps.graph, wiring.steps.fuse, list(wiring.steps.unfused)]
    facts["overrides"] = dict(wiring.hf_overrides)
    facts["rope_switch"] = wiring.rope_switch
    if "encoder" in wiring.parts:
        facts["images"] = _encoder_facts(wiring)
    text = json.dumps(facts, sort_keys=True)
    return blake2b(text.encode(), digest_size=32).hexdigest()


def _encoder_facts(wiring: Wiring) -> list[Any]:
    """Return the facts on which the features of an image depend besides its pixels and the files of weights: the
    encoder, the configuration of the image processor, and the versions of the packages that compute them."""
    part = wiring.parts["encoder"]
    code = code_of([part.target])
    return [part.target, dict(part.options), code, dict(processor_files(wiring.model_dir)), versions_of(LIBRARIES)]


def _machine(device: str) -> list[str]:
    """Return the name of the GPU, or the instruction set of the CPU; the last bits of keys and values depend on it."""
    if device == "cpu":
        return ["cpu", library.isa()]
    return [torch.cuda.get_device_name()]


KEYS = 2  # increased when a fault stored pages under wrong keys, as version 1 did for beam search
LIBRARIES = ("transformers", "torchvision", "pillow")  # they resize images and compute their features
PAGES = ("model", "quantizer", "kvformat", "attention")  # kinds of plug-ins that affect keys and values


def page_mover(wiring: Wiring, worker: Any) -> Mover | None:
    """Build the stores of a configuration for pages of the KV cache, and start their threads; None without stores."""
    if not wiring.cache.stores:
        return None
    pages = DevicePages(worker.caches, worker.states, worker.device)
    worker.notes += pages.notes
    mover = make_mover(wiring, pages, identity_of(wiring, pages.layout()), pages.empty)
    stores = [thread.store for thread in mover.tiers]
    kept = sum(store.limit for store in stores if store.keeps_pages)
    pages.prepare(kept // wiring.parallel.tensor_parallel_size)
    return mover
