"""Several helper processes, so that a slow grammar does not delay the next one."""

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
    """At most ``most`` helpers.  ``make`` makes a helper when all others are in use.  Thread-safe.

    A process takes a second or more to start, so a spare one is started before a request needs it.
    """

    def __init__(self, make: Callable[[], Helper], most: int) -> None:
        self._make, self._most = make, most
        self.made: list[Helper] = []
        self._idle: list[Helper] = []
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[Helper]:
        """Wait for a helper, and lend it to the caller, and to no other at the same time."""
        with self._changed:
            while not self._idle and len(self.made) >= self._most:
                self._changed.wait()
            # the helper that was used last, whose memory is in the caches
            helper = self._idle.pop() if self._idle else self._add()
            if not self._idle and len(self.made) < self._most:
                threading.Thread(target=self._start, args=(self._add(),), name="minivllm-helper", daemon=True).start()
        try:
            yield helper
        finally:
            self._put_back(helper)

    def _add(self) -> Helper:
        """Add a new helper and return it.  The caller holds the lock."""
        helper = self._make()
        self.made.append(helper)
        return helper

    def _start(self, helper: Helper) -> None:
        """Start the process of a spare helper, then make the helper available."""
        try:
            helper.make_ready()
        except Exception as e:  # the request that uses the helper reports the error
            log.debug("a spare helper did not start: %s", e)
        self._put_back(helper)

    def _put_back(self, helper: Helper) -> None:
        """Make a helper available, or close it if the helpers are closed."""
        with self._changed:
            self._idle.append(helper)
            if self._closed:
                helper.close()
            self._changed.notify()

    def close(self) -> None:
        """End the processes of all helpers.  Further calls do nothing."""
        with self._changed:
            self._closed = True
            for helper in self.made:
                helper.close()
