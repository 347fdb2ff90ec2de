"""How far each of several processes has come: a page of shared memory that each writes to and who started them reads.

    phase   begun   done   calls   operation   met   left     8 words of 8 bytes, a cache line for each process

A process that hangs cannot say so, and one that has been killed says nothing: the page still has their last words.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence

from .channel import WORD

PHASES = ("starts", "meets the others", "loads the model", "is ready")
# steps by their numbers + 1; calls between the processes; meetings that their devices have begun, and have ended
PHASE, BEGUN, DONE, CALLS, OPERATION, MET, LEFT = range(7)
LINE = 8  # words


class StatusPage:
    """The words of ``size`` processes, in the memory of ``channel.shared_file(StatusPage.room(size))``."""

    def __init__(self, file: int, size: int, operations: Sequence[str]) -> None:
        """``operations``: the names of the calls by their numbers, "" for none."""
        self.size, self.operations = size, operations
        self._memory = mmap.mmap(file, self.room(size))
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")
        self._moved, self._last = time.monotonic(), self._all()

    @staticmethod
    def room(size: int) -> int:
        """Bytes of the memory."""
        return size * LINE * WORD

    def set(self, rank: int, word: int, value: int) -> None:
        self._words[rank * LINE + word] = value

    def get(self, rank: int, word: int) -> int:
        return self._words[rank * LINE + word]

    def line(self, rank: int) -> bytes:
        """All words of a process, as another page's ``set_line`` takes them."""
        return bytes(self._bytes[rank * LINE * WORD : (rank + 1) * LINE * WORD])

    def set_line(self, rank: int, line: bytes) -> None:
        self._bytes[rank * LINE * WORD : (rank + 1) * LINE * WORD] = line

    def _all(self) -> bytes:
        return bytes(self._bytes)

    def standstill(self) -> float:
        """Seconds since any process was seen to go on."""
        now = self._all()
        if now != self._last:
            self.moves()
        return time.monotonic() - self._moved

    def moves(self) -> None:
        """Something is to be done from now on."""
        self._moved, self._last = time.monotonic(), self._all()

    def told(self, rank: int) -> str:
        """Where a process is, in words."""
        if (phase := self.get(rank, PHASE)) < len(PHASES) - 1:
            return PHASES[phase]
        begun, done, calls = (self.get(rank, word) - 1 for word in (BEGUN, DONE, CALLS))
        step = "no step yet" if begun < 0 else f"in step {begun}" if begun != done else f"last step {done}"
        met, left = self.get(rank, MET), self.get(rank, LEFT)
        device = (
            f", its device waits in meeting {met}" if met != left else f", its device has met the others {met} times"
        )
        where = device if met else ""
        if operation := self.get(rank, OPERATION):
            return f"{step}, waits in {self.operations[operation]} number {calls + 1}{where}"
        return f"{step}, {calls + 1} calls to others done{where}"

    def missing(self) -> list[int]:
        """The processes that others wait for: those that wait in no call, or in an earlier one.  Where devices wait,
        and not the processes, those whose device waits for nobody."""
        free = [rank for rank in range(self.size) if self.get(rank, MET) == self.get(rank, LEFT)]
        if 0 < len(free) < self.size:
            return free
        calls = [self.get(rank, CALLS) for rank in range(self.size)]
        waits = [bool(self.get(rank, OPERATION)) for rank in range(self.size)]
        most = max(calls)
        return [rank for rank in range(self.size) if not waits[rank] or calls[rank] < most]

    def close(self) -> None:
        """Idempotent."""
        self._words.release()
        self._bytes.release()
        self._memory.close()
