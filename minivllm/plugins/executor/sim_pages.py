"""KV pages of the simulated device, for tests of the tiers (CPU memory, disk).  They contain hashes of tokens instead
of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from minivllm.core.interfaces.executor import Wiring
from minivllm.core.mover import QUEUE, Mover
from minivllm.device.worker.stores import make_mover

if TYPE_CHECKING:
    from .sim_states import SimStates


class SimBatch:
    """Pages u8 [n, bytes] that the simulated device has copied to host memory, ready at once."""

    ready = True

    def __init__(self, pages: np.ndarray) -> None:
        self._pages = pages

    def page(self, i: int, own: bool) -> np.ndarray:
        return self._pages[i].copy() if own else self._pages[i]


class SimPages:
    """The KV slots u64 [blocks, tokens] of each group, and the recurrent states as one more group."""

    queue = QUEUE
    copy_seconds: float | None = None
    alone = False

    def __init__(self, kv: Sequence[np.ndarray], states: SimStates | None) -> None:
        self.groups = [[array] for array in kv]
        if states is not None:
            self.groups.append([states.covered, states.hashes])
        # copies take no time in a simulation
        self.written_bytes = 0
        self.written_seconds = 0.0
        self.page_bytes: list[int] = [sum(array[0].nbytes for array in arrays) for arrays in self.groups]

    def read(self, group: int, blocks: Sequence[int]) -> SimBatch:
        parts = [array[list(blocks)].reshape(len(blocks), -1).view(np.uint8) for array in self.groups[group]]
        return SimBatch(np.concatenate(parts, 1))

    def stage(self, group: int, pages: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return pages

    def arrived(self, page: np.ndarray) -> float | None:
        return 0.0

    def write(self, group: int, blocks: Sequence[int], pages: Sequence[np.ndarray]) -> None:
        page = np.stack(pages)
        at = 0
        for array in self.groups[group]:
            size = array[0].nbytes
            part = np.ascontiguousarray(page[:, at : at + size]).view(array.dtype)
            array[list(blocks)] = part.reshape(len(blocks), *array.shape[1:])
            at += size

    def release(self) -> None:
        """Do nothing, because copies use no separate memory."""

    close = release


def sim_mover(wiring: Wiring, kv: Sequence[np.ndarray], states: SimStates | None, threaded: bool) -> Mover | None:
    """Build the stores of a wiring, None without any.  Without ``threaded`` the caller runs their work."""
    if not wiring.cache.stores:
        return None
    facts = f"sim {wiring.block} {[array.shape[1:] for array in kv]} {states is not None}"
    identity = blake2b(facts.encode(), digest_size=32).hexdigest()
    return make_mover(wiring, SimPages(kv, states), identity, threaded=threaded)
