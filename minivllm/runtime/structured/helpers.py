"""Several helper processes, so that one grammar that takes its time does not hold up the next."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .helper import Helper


log = logging.getLogger("minivllm")


class Helpers:
    """At most ``most`` helpers, each made (by ``make``) when all others are in use.  Thread-safe.

    A process takes a second or more to start, so the next one is started before somebody needs it.
    """

    def __init__(self, make: Callable[[], Helper], most: int) -> None:
        self._make, self._most = make, most
        self.made: list[Helper] = []
        self._idle: list[Helper] = []
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[Helper]:
        """A helper that nobody else has meanwhile; waits for one if need be."""
        with self._changed:
            while not self._idle and len(self.made) >= self._most:
                self._changed.wait()
            helper = self._idle.pop() if self._idle else self._add()  # the one that was used last
            if not self._idle and len(self.made) < self._most:
                threading.Thread(target=self._start, args=(self._add(),), name="minivllm-helper", daemon=True).start()
        try:
            yield helper
        finally:
            self._put_back(helper)

    def _add(self) -> Helper:
        """The lock is held."""
        helper = self._make()
        self.made.append(helper)
        return helper

    def _start(self, helper: Helper) -> None:
        """A spare one, which nobody else has until it is ready."""
        try:
            helper.make_ready()
        except Exception as e:  # whoever needs it meets that again, and is told
            log.debug("a spare helper did not start: %s", e)
        self._put_back(helper)

    def _put_back(self, helper: Helper) -> None:
        with self._changed:
            self._idle.append(helper)
            if self._closed:
                helper.close()
            self._changed.notify()

    def close(self) -> None:
        """End their processes; idempotent."""
        with self._changed:
            self._closed = True
            for helper in self.made:
                helper.close()
