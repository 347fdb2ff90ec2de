"""Adapters on the way to their places (slots of the device's adapters): rows of device memory that are filled next to
the steps.

thread of a load    host memory ──copy engine──► staged row
step                staged row ──► place        a copy within the device, so the step does not wait for the bus
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

ROWS = 2


class Staging:
    """Rows on a GPU for the adapters that were loaded last.

    The copies to the rows run on a stream of their own.  A row that is needed again before its adapter has a place
    is overwritten; that adapter is then copied from the host."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate rows of ``size`` numbers on ``device``, and make the stream."""
        self.rows = torch.empty(ROWS, size, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device)
        self._lock = threading.Lock()
        self._turn = 0
        # the adapter that each row holds or receives, in host memory
        self._weights: list[Tensor | None] = [None] * ROWS
        self._written: list[Any] = [None] * ROWS  # a CUDA event behind the last copy to each row
        self._read: list[Any] = [None] * ROWS  # a CUDA event behind the last copy from each row

    def put(self, weights: Tensor) -> None:
        """Start the copy of an adapter [size] in pinned host memory to the next row.  Any thread may call this."""
        with self._lock, torch.cuda.stream(self._stream):
            row = self._turn
            self._turn = (row + 1) % ROWS
            if self._read[row] is not None:
                self._stream.wait_event(self._read[row])
            self.rows[row].copy_(weights, non_blocking=True)
            self._written[row] = self._stream.record_event()
            self._weights[row] = weights

    def take(self, weights: Tensor, to: Tensor) -> bool:
        """Copy an adapter from its row to the place ``to`` [size] on the current stream.

        Return False if no row has it."""
        with self._lock:
            for row, staged in enumerate(self._weights):
                if staged is weights:
                    stream = torch.cuda.current_stream(to.device)
                    stream.wait_event(self._written[row])
                    to.copy_(self.rows[row])
                    self._read[row] = stream.record_event()
                    self._weights[row] = None
                    return True
        return False
