"""The progress of several processes, in a page of shared memory that they write and their parent reads.

    phase   begun   done   calls   operation   met   left     8 words of 8 bytes, a cache line for each process

A process that hangs or was killed cannot report its state, so the parent reads it from the page.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from .channel import WORD

PHASES = ("starts", "meets the others", "loads the model", "is ready")
# begun and done: number of the last step + 1; calls: finished calls between processes, operation: the present call;
# met and left: collective operations that the device of the process has begun and has ended
PHASE, BEGUN, DONE, CALLS, OPERATION, MET, LEFT = range(7)
LINE = 8  # number of 8-byte words that the page has for each process


class StatusPage:
    """The status words (counters of progress) of ``size`` processes, in the memory of
    ``channel.shared_file(StatusPage.room(size))``."""

    def __init__(self, file: int, size: int, operations: Sequence[str]) -> None:
        """Map the page.  ``operations`` has the names of the calls between processes by number; number 0 is no call."""
        self.size, self.operations = size, operations
        self._memory = mmap.mmap(file, self.room(size))
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")
        self.moves()

    @staticmethod
    def room(size: int) -> int:
        """Return the bytes of the memory for ``size`` processes."""
        return size * LINE * WORD

    def set(self, rank: int, word: int, value: int) -> None:
        """Set the word with the index ``word`` of the process ``rank``."""
        self._words[rank * LINE + word] = value

    def get(self, rank: int, word: int) -> int:
        """Return the word with the index ``word`` of the process ``rank``."""
        return self._words[rank * LINE + word]

    def line(self, rank: int) -> bytes:
        """Return all words of the process ``rank`` as bytes, for ``set_line`` of another page."""
        return bytes(self._bytes[rank * LINE * WORD : (rank + 1) * LINE * WORD])

    def set_line(self, rank: int, line: bytes) -> None:
        """Set all words of the process ``rank`` from bytes."""
        self._bytes[rank * LINE * WORD : (rank + 1) * LINE * WORD] = line

    def standstill(self) -> float:
        """Return the seconds since the page last changed or ``moves`` was called."""
        if bytes(self._bytes) != self._last:
            self.moves()
        return time.monotonic() - self._moved

    def moves(self) -> None:
        """Restart the time of ``standstill``, because the processes have work from now on."""
        self._moved = time.monotonic()
        self._last = bytes(self._bytes)

    def describe(self, rank: int) -> str:
        """Return a description of the state of a process: its phase of the start, or its step and the operation that it
        waits in."""
        phase = self.get(rank, PHASE)
        if phase < len(PHASES) - 1:
            return PHASES[phase]
        begun, done, calls = (self.get(rank, word) - 1 for word in (BEGUN, DONE, CALLS))
        step = f"last step {done}" if begun == done else f"in step {begun}"
        if begun < 0:
            step = "no step yet"
        met, left = self.get(rank, MET), self.get(rank, LEFT)
        device = ""
        if met:
            met_all = f"has met the others {met} times"
            device = f", its device {met_all if met == left else f'waits in meeting {met}'}"
        operation = self.get(rank, OPERATION)
        if operation:
            return f"{step}, waits in {self.operations[operation]} number {calls + 1}{device}"
        return f"{step}, {calls + 1} calls to others done{device}"

    def missing(self) -> list[int]:
        """Return the processes for which the other processes wait.

        They are in no collective call, or in an earlier call than the others.  If only devices wait, they are the
        processes whose device does not wait.
        """
        free = [rank for rank in range(self.size) if self.get(rank, MET) == self.get(rank, LEFT)]
        if 0 < len(free) < self.size:
            return free
        calls = [self.get(rank, CALLS) for rank in range(self.size)]
        waits = [bool(self.get(rank, OPERATION)) for rank in range(self.size)]
        most = max(calls)
        return [rank for rank in range(self.size) if not waits[rank] or calls[rank] < most]

    def close(self) -> None:
        """Release the memory.  Further calls do nothing."""
        self._words.release()
        self._bytes.release()
        self._memory.close()
