"""The loop that runs an engine on one thread, and how other threads reach it.

    any thread ──► Inbox or socket ──► turn: what has come, Engine.step, what there is to tell ──► turn ──► ...

``AsyncLLM`` puts functions into the inbox (``JobLoop``), the server frames (``server.link.engine_loop.EngineLoop``).
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
    """Items that any thread puts in and one takes out.  A closed one takes nothing in; what it has can be taken."""

    def __init__(self) -> None:
        self._urgent: deque[T] = deque()  # overtakes the rest
        self._items: deque[T] = deque()
        self._arrived = threading.Condition()
        self.closed = False

    def put(self, item: T, urgent: bool = False) -> bool:
        """False if it is closed."""
        with self._arrived:
            if not self.closed:
                (self._urgent if urgent else self._items).append(item)
                self._arrived.notify()
            return not self.closed

    def take(self) -> T | None:
        """The next one, or None."""
        with self._arrived:
            return self._urgent.popleft() if self._urgent else self._items.popleft() if self._items else None

    def remove(self, wanted: Callable[[T], bool]) -> T | None:
        """Take out the first that is not urgent and is ``wanted``."""
        with self._arrived:
            found = next(filter(wanted, self._items), None)
            if found is not None:
                self._items.remove(found)
            return found

    def wait(self, seconds: float | None) -> None:
        """Until there is something, or it is closed, at most that long; None: however long."""
        with self._arrived:
            if not (self._urgent or self._items or self.closed) and seconds != 0.0:
                self._arrived.wait(seconds)

    def close(self) -> None:
        with self._arrived:
            self.closed = True
            self._arrived.notify()


def settles(engine: Engine) -> bool:
    """Behind the last step of a busy time, look at the counter of joules, which tells late; whether it was waited for
    and is to be looked at again in ``LOOK`` seconds."""
    if engine.energy is None or not engine.energy.settling:
        return False
    engine.energy.look()
    return True


class TurnLoop:
    """Turn after turn until ``over``.  A subclass says what a turn is, and what is left to do once all have been told.

    Code that is not the engine's cannot end the loop: whatever it raises was told to its request by then, and of that
    a KeyboardInterrupt alone comes here.  Anything else is a fault of the loop itself, or came from another thread:
    which requests it concerns nobody knows, so the loop ends, and everyone who waits is told why.
    """

    longest: float = 1.0  # seconds that an idle turn waits, between looks at the executor

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def over(self) -> bool:
        raise NotImplementedError

    def turn(self, wait: float | None) -> bool:
        """What has come (the first is waited for that long), and one step; False if there was nothing to run."""
        raise NotImplementedError

    def leave(self, error: BaseException | None) -> None:
        """The engine takes nothing more and has ended its requests, because of ``error`` if the loop met one."""
        raise NotImplementedError

    def patience(self) -> float:
        """Seconds to wait for something after a turn in which nothing ran."""
        if settles(self.engine):
            return LOOK
        return self.engine.idle() if self.engine.busy and not self.engine.dead else self.longest

    def start(self) -> threading.Thread:
        """Run on a thread of its own."""
        thread = threading.Thread(target=self.run, name="minivllm-engine", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        worked, why = False, STOPPED
        error: BaseException | None = None
        while not self.over:
            try:
                worked = self.turn(0.0 if worked else self.patience())
                if not worked and not self.engine.busy:
                    self.engine.watch()
            except KeyboardInterrupt:  # raised by a plug-in, whose request was told: Ctrl-C does not come here
                log.exception("the engine's loop met an interrupt")
            except EngineDeadError as e:  # nobody is there any more
                why, error = str(e), e
                break
            except BaseException as e:
                why, error = f"the engine's thread ended: {describe_error(e)}", e
                log.critical(why, exc_info=e)
                break
        try:
            self.engine.fail_all(why)
        finally:
            self.leave(error)
