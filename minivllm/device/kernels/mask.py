"""Token masks, applied in place to logits [rows, V]: the logits of tokens whose bit is 0 become -inf.

    grid (rows, V / BLOCK)      V / 8 bytes read per row, and 2 to 4 bytes written per forbidden token

The reference is ``device.worker.sampling.apply_mask``.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from .launch import cdiv, kernel, pdl, wait

BLOCK = 4096


@kernel("index", "mask")
def _apply(x, stride, index, mask, WORDS, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    which = tl.load(index + row).to(tl.int64)
    if which >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        on = at < V
        word = tl.load(mask + which * WORDS + at // 32, mask=on, other=-1)
        banned = ((word >> (at % 32)) & 1) == 0
        tl.store(x + row * stride + at, float("-inf"), mask=on & banned)


def apply(x: Tensor, index: Tensor, mask: Tensor) -> None:
    """Set logits x [rows, V] of forbidden tokens to -inf, in place.  x has any float dtype, and contiguous rows.

    ``index`` i32 [rows] is the row of ``mask`` i32 [n, ceil(V / 32)] for each row, -1 for none.
    """
    rows, width = x.shape
    if rows:
        grid = (rows, cdiv(width, BLOCK))
        stride = x.stride(0)
        words = mask.shape[1]
        _apply[grid](x, stride, index, mask, words, width, BLOCK=BLOCK, num_warps=4, **pdl(x))


class DeviceMasks:
    """The token masks of one step in device memory that captures use, for up to ``rows`` rows with a mask.

    ``host`` i32 [rows, words] is pinned memory.  Masks that were written to its leading rows need no further copy on
    the host.  It may be written again once the step that uses the masks has been collected.

    Copies run on their own stream.  The stream first waits for the stream that allocated the memory, because kernels in
    flight may still use that memory, and the initial fill must not overwrite the first masks.  The stream has its own
    priority, because torch hands out streams from a small pool for each priority.  Captures use the other pool.  A copy
    on a stream that is being captured would become part of the graph.
    """

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        words = -(-vocab // 32)
        on_cuda = device.type == "cuda"
        self.rows = rows
        self.words = words
        numbers = rows * (1 + words)
        self._held = torch.full((numbers,), -1, dtype=torch.int32, device=device)
        self.index = self._held[:rows]
        self.mask = self._held[rows:].view(rows, words)
        self._host = torch.full((numbers,), -1, dtype=torch.int32, pin_memory=on_cuda)
        self._numpy = self._host.numpy()
        self.host = self._numpy[rows:].reshape(rows, words)
        self._stream = self._copied = self._read = None
        if on_cuda:
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._copied = torch.cuda.Event()
            self._read = torch.cuda.Event()
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def put(self, rows, mask) -> None:
        """Copy ``mask`` i32 [n, words] (numpy) for these rows to the device; other rows have no mask.

        The copy runs in parallel with the device's current work.  Work that is enqueued later waits for it.  Call
        ``read_now`` after the last use.
        """
        n = len(rows)
        used = self.rows + n * self.words
        if self._copied is not None:
            # the host memory of the masks is written again below; the last copy from it has normally ended long ago
            self._copied.synchronize()
        self._numpy[: self.rows] = -1
        self._numpy[rows] = np.arange(n)
        if mask.ctypes.data != self.host.ctypes.data:
            self.host[:n] = mask
        if self._stream is None:
            self._held[:used].copy_(self._host[:used])
            return
        self._stream.wait_event(self._read)  # returns at once for an event that was never recorded
        with torch.cuda.stream(self._stream):
            self._held[:used].copy_(self._host[:used], non_blocking=True)
            self._copied.record()
        torch.cuda.current_stream().wait_event(self._copied)

    def read_now(self) -> None:
        """Record an event behind the last operation that reads these masks, so that the next copy waits for it."""
        if self._stream is not None:
            self._read.record()
