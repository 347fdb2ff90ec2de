"""The loop that runs an engine on one thread, and the inbox through which other threads reach it.

    any thread ──► Inbox or socket ──► turn: read new items, Engine.step, send results ──► turn ──► ...

``AsyncLLM`` puts functions into the inbox (``JobLoop``); the server puts frames
(``server.link.engine_loop.EngineLoop``).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from minivllm.errors import EngineDeadError, describe_error
from minivllm.runtime.energy.account import LOOK

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine

T = TypeVar("T")
STOPPED = "the engine was stopped"
log = logging.getLogger("minivllm")


class Inbox(Generic[T]):
    """A queue to which all threads add items, and from which one thread removes them.

    A closed inbox accepts no more items, but its items can still be removed.
    """

    def __init__(self) -> None:
        self._urgent: deque[T] = deque()  # entries that are taken before all others
        self._items: deque[T] = deque()
        self._arrived = threading.Condition()
        self.closed = False

    def put(self, item: T, urgent: bool = False) -> bool:
        """Append an item.  Return False if the inbox is closed."""
        with self._arrived:
            if not self.closed:
                (self._urgent if urgent else self._items).append(item)
                self._arrived.notify()
            return not self.closed

    def take(self) -> T | None:
        """Remove and return the next item, or None."""
        with self._arrived:
            queue = self._urgent or self._items
            return queue.popleft() if queue else None

    def remove(self, wanted: Callable[[T], bool]) -> T | None:
        """Remove and return the first item that is not urgent and for which ``wanted`` returns True, or None."""
        with self._arrived:
            found = next(filter(wanted, self._items), None)
            if found is not None:
                self._items.remove(found)
            return found

    def wait(self, seconds: float | None) -> None:
        """Wait until there is an item or the inbox is closed, for at most ``seconds``.  None means no limit."""
        with self._arrived:
            if not (self._urgent or self._items or self.closed) and seconds != 0.0:
                self._arrived.wait(seconds)

    def close(self) -> None:
        """Accept no more items, and wake the waiting thread."""
        with self._arrived:
            self.closed = True
            self._arrived.notify()


def settles(engine: Engine) -> bool:
    """Read the energy counter after the last step of a busy period, because it reports late.

    Return True if it must be read again in ``LOOK`` seconds.
    """
    if engine.energy is None or not engine.energy.settling:
        return False
    engine.energy.look()
    return True


class TurnLoop:
    """Runs turns until ``over`` is true.  A subclass defines a turn, and the work after the last one.

    External code cannot end the loop, because its exceptions are reported to its request.  Only a KeyboardInterrupt
    reaches this loop as well.  Any other exception is a bug of the loop or comes from another thread.  The affected
    requests are then unknown, so the loop ends, and all requests receive the error.
    """

    longest: float = 1.0  # seconds that an idle turn waits before the executor is checked again

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def over(self) -> bool:
        """Return whether the loop must end."""
        raise NotImplementedError

    def turn(self, wait: float | None) -> bool:
        """Read new items and run one step, and return False if no step was run.

        It waits up to ``wait`` seconds for the first item.
        """
        raise NotImplementedError

    def leave(self, error: BaseException | None) -> None:
        """Finish after the engine has ended its requests.  ``error`` is the exception that ended the loop, or None."""
        raise NotImplementedError

    def patience(self) -> float:
        """Return the seconds to wait for an item after a turn without a step."""
        if settles(self.engine):
            return LOOK
        if self.engine.busy and not self.engine.dead:
            return self.engine.idle()
        pause = self.engine.captures.pause
        return self.longest if pause is None else pause

    def start(self) -> threading.Thread:
        """Run the loop on a new thread, and return the thread."""
        thread = threading.Thread(target=self.run, name="minivllm-engine", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Run turns until the loop ends, then end all requests.  A fault of the engine ends the loop, and its text is
        the error of the requests."""
        worked = False
        reason = STOPPED
        error: BaseException | None = None
        while not self.over:
            try:
                worked = self.turn(0.0 if worked else self.patience())
                if not worked and not self.engine.busy:
                    self.engine.watch()
            except KeyboardInterrupt:  # raised by a plug-in, as Ctrl-C reaches only the main thread
                log.exception("the engine's loop met an interrupt")
            except EngineDeadError as e:
                reason = str(e)
                error = e
                break
            except BaseException as e:
                reason = f"the engine's thread ended: {describe_error(e)}"
                error = e
                log.critical(reason, exc_info=e)
                break
        try:
            self.engine.fail_all(reason)
        finally:
            self.leave(error)
