"""An adapter (LoRA) as the engine handles it, and the set of adapters in one memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.evictor import Evictor

from .evicted import block_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from minivllm.core.interfaces.adapters import AdapterFiles, LoRARequest

# states of an adapter's weights in host memory
NEW, LOADING, READY, FAILED = range(4)


@dataclass(eq=False)
class Adapter:
    """A LoRA adapter that at least one request uses, or whose weights are in host memory."""

    number: int  # number by which the worker processes find its weights
    request: LoRARequest
    files: AdapterFiles
    state: int = NEW
    place: int = -1  # index of the adapter's memory on the device; -1 means not on the device
    users: int = 0  # count of unfinished requests with this adapter
    # counter value at the newest admission of a request with this adapter; larger is newer
    used: int = 0
    waiting: int = 0  # count of worker processes that have not finished loading it
    error: str = ""

    @property
    def key(self) -> np.ndarray:
        """Return the adapter's number as the key u64 [1] that an evictor plug-in receives."""
        return np.array([self.number], np.uint64)


class ResidentSet:
    """The adapters of one memory for ``size`` adapters, and the evictor that chooses the adapter to remove.

    Adapters in use are held, so the evictor cannot choose them.  They are released to the evictor, in the order of
    their last use, when an adapter must be removed.
    """

    def __init__(self, size: int, evictor: Evictor) -> None:
        self.size = size
        self.evictor = evictor
        self.adapters: dict[int, Adapter] = {}  # by number
        self._released: set[int] = set()

    def add(self, adapter: Adapter) -> None:
        """Add an adapter to the set, and report it to the evictor as in use."""
        info = block_info([(0, 0, 1, 1.0, 0, 0, 0, False)])
        self.adapters[adapter.number] = adapter
        self.evictor.add(adapter.key, info)

    def use(self, adapter: Adapter) -> None:
        """Report the use of an adapter of the set to the evictor."""
        self.evictor.hit(adapter.key)
        if adapter.number in self._released:
            self._released.remove(adapter.number)
            self.evictor.hold(adapter.key)

    def drop(self, adapter: Adapter) -> None:
        """Remove an adapter from the set although there is room for it, for example because it was unloaded."""
        if self.adapters.pop(adapter.number, None) is not None:
            self._released.discard(adapter.number)
            self.evictor.drop(adapter.key)

    def evict(self, busy: Callable[[Adapter], bool]) -> Adapter | None:
        """Remove one adapter to make room, and return it.  The evictor chooses it among the adapters for which ``busy``
        returns False.  None if ``busy`` holds for all of them."""
        idle = [one for one in self.adapters.values() if not busy(one)]
        for one in sorted(idle, key=lambda one: one.used):
            if one.number not in self._released:
                self._released.add(one.number)
                self.evictor.free(one.key)
        for number in [n for n in self._released if busy(self.adapters[n])]:
            self._released.remove(number)
            self.evictor.hold(self.adapters[number].key)
        victims = self.evictor.victims(1)
        if not len(victims):
            return None
        number = int(victims[0])
        self._released.remove(number)
        return self.adapters.pop(number)

    @property
    def full(self) -> bool:
        return len(self.adapters) >= self.size
