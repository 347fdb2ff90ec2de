"""The adapters (LoRA) of one process.  A thread loads them during steps, and deltas copy them to the device.

verb "adapters" ──► thread reads the folder ──► host memory, by number
Delta.adapter (place, number) ──► place on the device
Join.adapter ──► column of the slots
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core.external_calls import as_exception
from minivllm.device.layers.adapters import AdapterMemory
from minivllm.device.loading.adapter_weights import AdapterReader, HostAdapter
from minivllm.errors import MinivllmError, describe_error

from .capture import ALONE

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnMeta
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.plan import Delta, StepPlan
    from minivllm.device.layers.parts import ModelParts


class Adapters:
    """The adapters in host memory and on the device, and the adapter of each slot.

    ``column`` i64 [slots] has the place of each slot's adapter, -1 for none; ``of_slot`` is the same on the host."""

    def __init__(self, wiring: Wiring, cfg: Any, parts: ModelParts, device: torch.device) -> None:
        limits, slots = wiring.adapters, wiring.max_num_seqs + 1
        self.memory = AdapterMemory(
            parts.modules, limits.max_loras, limits.max_lora_rank, parts.dtype, device, wiring.batch_invariant
        )
        # the device with its number, because other threads may have another current device
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        self.column = torch.full((slots,), -1, dtype=torch.int32, device=device)
        self.of_slot = np.full(slots, -1, np.int32)
        self.loaded: dict[int, HostAdapter] = {}
        # on a GPU, copies to the device that may not have ended, with the event after each
        self._copied: deque[tuple[Any, HostAdapter]] = deque()
        self._reader = AdapterReader(wiring, cfg, parts, self.memory, self._zeros)
        self._orders: deque[tuple[int, str]] = deque()
        self._ended: deque[tuple[int, str | None]] = deque()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    # ---- loads ---------------------------------------------------------------------------------------------------

    def answer(self, args: Mapping[str, Any]) -> list[list[Any]]:
        """Free and order adapters, and return (number, error or None) of the loads that have ended since the last
        call.  No step in flight uses the freed ones."""
        with self._wake:
            for number in args.get("free", ()):
                self.loaded.pop(int(number), None)
            self._orders.extend((int(number), str(folder)) for number, folder in args.get("load", ()))
            if self._orders and self._thread is None:
                self._thread = threading.Thread(target=self._load, name="minivllm-adapters", daemon=True)
                self._thread.start()
            self._wake.notify()
            ended = [list(one) for one in self._ended]
            self._ended.clear()
        return ended

    def _zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros [size] in host memory, pinned for a GPU."""
        if self.device.type != "cuda":
            return torch.zeros(size, dtype=dtype)
        with ALONE, torch.cuda.device(self.device):  # the allocation may wait for the device
            return torch.zeros(size, dtype=dtype, pin_memory=True)

    def _load(self) -> None:
        """Read the ordered folders, on the thread."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._orders or self._closed)
                if self._closed:
                    return
                number, folder = self._orders.popleft()
            error = None
            try:
                loaded = self._reader.read(folder)
            except BaseException as e:
                error = str(e) if isinstance(e, MinivllmError) else describe_error(as_exception(e))
            with self._wake:
                if error is None:
                    self.loaded[number] = loaded
                self._ended.append((number, error))

    # ---- steps ---------------------------------------------------------------------------------------------------

    def apply(self, delta: Delta) -> None:
        """Copy adapters to the device and set the places of slots that join or fork."""
        for place, number in delta.adapter.tolist():
            if place < 0:
                self.loaded.pop(number, None)
            else:
                self._store(place, self.loaded[number])
        if (join := delta.join) is not None:
            places = join.adapter if len(join.adapter) else np.full(len(join.slot), -1, np.int32)
            if (places >= 0).any() or (self.of_slot[join.slot] >= 0).any():
                self._set(join.slot, places)
        if len(delta.fork):
            source, to = delta.fork[:, 0], delta.fork[:, 1]
            if (self.of_slot[source] >= 0).any() or (self.of_slot[to] >= 0).any():
                self._set(to, self.of_slot[source])

    def _set(self, slots: np.ndarray, places: np.ndarray) -> None:
        """Set the places i32 [n] of the adapters of ``slots`` [n]."""
        self.of_slot[slots] = places
        both = torch.from_numpy(np.stack([slots, places]).astype(np.int64)).to(self.device, non_blocking=True)
        self.column[both[0]] = both[1].int()

    def _store(self, place: int, adapter: HostAdapter) -> None:
        self.memory.store(place, adapter.weights, adapter.ranks)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._copied.append((event, adapter))
            while self._copied and self._copied[0][0].query():
                self._copied.popleft()

    def serves(self, plan: StepPlan) -> bool:
        """Return whether a row of a step has an adapter."""
        return bool((self.of_slot[plan.slots] >= 0).any())

    def step(self, meta: AttnMeta) -> AbstractContextManager[None]:
        """Return the context in which the layers of a step apply the adapters of its rows."""
        return self.memory.step(self.column[meta.slots[meta.row]])

    def close(self) -> None:
        """End the thread after the load that it is running."""
        with self._wake:
            self._closed = True
            self._wake.notify()


def applied(adapters: Adapters | None, meta: AttnMeta, on: bool) -> AbstractContextManager[None]:
    """Return the context of a step's layers: with adapters if ``on``, else without."""
    return adapters.step(meta) if adapters is not None and on else nullcontext()
