"""Pages of the KV cache on the device, for the tiers behind it (``core.mover``)."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from minivllm.device.loading.fingerprint import code_of, model_files
from minivllm.device.native import library

from .capture import ALONE
from .stores import make_mover

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.mover import Mover

    from .recurrent import StateMemory


class HostBatch:
    """Pages u8 [n, bytes] in host memory; ``event`` is a CUDA event behind their copy, None on a CPU."""

    def __init__(self, pages: Tensor, event: Any = None) -> None:
        self._pages, self._event = pages, event

    def pages(self) -> np.ndarray:
        """Wait for the copy, and return the pages."""
        if self._event is not None:
            self._event.synchronize()
        return self._pages.numpy()


class DevicePages:
    """The cache tensors of each KV group, and the recurrent states as one more group.

    On a GPU, pages are gathered on the stream of the steps, and a second stream copies them to pinned memory.
    """

    def __init__(
        self,
        caches: Sequence[Sequence[Mapping[str, Tensor]]],
        states: StateMemory | None,
        device: torch.device,
    ) -> None:
        # with the device's number, because the current device of other threads differs
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        self.groups = [[layer[name] for layer in group for name in sorted(layer)] for group in caches]
        if states is not None:
            tensors = [memory[name] for memory in states.memory for name in sorted(memory)]
            self.groups.append([*tensors, states.valid])
        self.page_bytes = [sum(_row_bytes(t) for t in tensors) for tensors in self.groups]
        self._stream = torch.cuda.Stream(self.device) if device.type == "cuda" else None
        # pages that are being copied to the device, with events before and behind the copies
        self._copied: deque[tuple[Any, Any, list[Tensor]]] = deque()
        self.written_bytes, self.written_seconds = 0, 0.0

    def layout(self) -> list[list[tuple[str, list[int]]]]:
        """Return dtype and shape of a block in each tensor of each group."""
        return [[(str(t.dtype), list(t.shape[1:])) for t in tensors] for tensors in self.groups]

    def read(self, group: int, blocks: Sequence[int]) -> HostBatch:
        index = torch.tensor(blocks, dtype=torch.int64).to(self.device, non_blocking=True)
        with torch.inference_mode():
            parts = [t[index].reshape(len(blocks), -1).view(torch.uint8) for t in self.groups[group]]
            pages = torch.cat(parts, 1)
            if self._stream is None:
                return HostBatch(pages)
            host = torch.empty(pages.shape, dtype=torch.uint8, pin_memory=True)
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                host.copy_(pages, non_blocking=True)
                pages.record_stream(self._stream)
                event = torch.cuda.Event()
                event.record(self._stream)
        return HostBatch(host, event)

    def write(self, group: int, blocks: Sequence[int], pages: Sequence[np.ndarray]) -> None:
        sources = [torch.from_numpy(page) for page in pages]
        begun = self._mark()
        with torch.inference_mode():
            index = torch.tensor(blocks, dtype=torch.int64).to(self.device, non_blocking=True)
            page = torch.stack([source.to(self.device, non_blocking=True) for source in sources])
            at = 0
            for t in self.groups[group]:
                size = _row_bytes(t)
                part = page[:, at : at + size].contiguous().view(t.dtype)
                t[index] = part.reshape(len(blocks), *t.shape[1:])
                at += size
        self._copied.append((begun, self._mark(), sources))
        self._measure()

    def _mark(self) -> Any:
        """Return the time in seconds on a CPU, or an event behind all work queued so far on a GPU."""
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _measure(self) -> None:
        """Add up the bytes and the times of the copies that have ended, and release their pages."""
        while self._copied:
            begun, ended, sources = self._copied[0]
            if self._stream is None:
                seconds = ended - begun
            elif ended.query():
                seconds = begun.elapsed_time(ended) / 1e3
            else:
                return
            self._copied.popleft()
            self.written_bytes += sum(source.nbytes for source in sources)
            self.written_seconds += seconds

    def empty(self, size: int) -> np.ndarray:
        """Return memory u8 [size] of any content, pinned for a GPU."""
        if self._stream is None:
            return np.empty(size, np.uint8)
        with ALONE, torch.cuda.device(self.device):  # the allocation may wait for the device
            return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


def _row_bytes(t: Tensor) -> int:
    """Return the bytes of one block in a tensor."""
    return t[0].numel() * t.element_size()


def identity_of(wiring: Wiring, layout: Any) -> str:
    """Return the digest (hex) of all that determines a page besides its tokens and its salt."""
    seconds = list(wiring.own_models.values())
    if wiring.speculation.draft_model is not None:
        seconds.append(wiring.speculation.draft_model)
    folders = [wiring.model_dir, *(model.model_dir for model in seconds)]
    parts = [wiring.parts[seam] for seam in PAGES]
    for model in seconds:
        parts += model.parts.values()
    facts = {
        "keys": KEYS,
        "code": code_of(part.target for part in parts),
        "files": [dict(model_files(folder)) for folder in folders],
        "load_format": wiring.load_format,
        "seed": wiring.seed if wiring.load_format == "dummy" else None,
        "parts": {seam: [wiring.parts[seam].target, dict(wiring.parts[seam].options)] for seam in PAGES},
        "dtype": wiring.dtype,
        "machine": [torch.__version__, *_machine(wiring.device)],
        "block": wiring.block,
        "ranks": wiring.parallel.tensor_parallel_size,
        "invariant": wiring.batch_invariant,
        "steps": [wiring.steps.graph, wiring.steps.fuse, list(wiring.steps.unfused)],
        "overrides": dict(wiring.hf_overrides),
        "rope_switch": wiring.rope_switch,
        "layout": layout,
    }
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32).hexdigest()


def _machine(device: str) -> list[str]:
    """Return the kind of the device and of its instructions, on which the last bits of keys and values depend."""
    if device == "cpu":
        return ["cpu", library.isa()]
    return [torch.cuda.get_device_name()]


KEYS = 2  # a higher number after a fault that stored pages under wrong keys: 1 did so for beams
PAGES = ("model", "quantizer", "kvformat", "attention")  # seams whose plug-ins determine keys and values


def page_mover(wiring: Wiring, worker: Any) -> Mover | None:
    """Build the stores of a wiring and start their threads; None without any."""
    if not wiring.cache.stores:
        return None
    pages = DevicePages(worker.caches, worker.states, worker.device)
    return make_mover(wiring, pages, identity_of(wiring, pages.layout()), pages.empty)
