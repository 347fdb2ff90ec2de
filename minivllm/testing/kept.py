"""The leak test of all suites: it uses an instance many times, and counts its memory, threads and open files."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from .base import since

FIRST = 6  # uses of the instance before the first count
ROUNDS = 24  # uses of the instance between two counts
WINDOWS = 3  # pairs of counts; a leak increases the numbers within each pair
# largest number of such pairs, so that a cache that is emptied after up to 400 uses is no leak
MOST_WINDOWS = 18
FILLING = 1000  # most uses of the instance that are made to fill a cache of bounded size
SECONDS = 8.0  # time limit in seconds for filling such a cache, and again for the pairs after the first ones
SLACK = 16  # allowed growth in bytes per use, which is less than one number in a list
# types of objects that all code shares, so that their bytes do not count as held by a plug-in's instance
NOT_OWNED = (type, ModuleType, FrameType, BuiltinFunctionType)
CONTAINERS = (dict, list, set, bytearray)


def held(*roots: Any) -> int:
    """Return the total bytes of all objects that ``roots`` refer to, directly or not, without modules and types."""
    seen = set()
    todo = list(roots)
    total = 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, NOT_OWNED):
            continue
        seen.add(id(item))
        total += size(item)
        todo += parts(item)
    return total


def size(item: Any) -> int:
    """Return the bytes of an object without the objects that it refers to; a tensor counts with its storage."""
    own = sys.getsizeof(item, 0)
    if hasattr(item, "untyped_storage") and item.device.type != "meta":
        return own + item.untyped_storage().nbytes()
    return own


def parts(item: Any) -> Iterable[Any]:
    """Return the objects that an object refers to directly.

    For a function these are its closure and defaults, without the globals of its module.
    """
    if isinstance(item, FunctionType):
        return [*(item.__closure__ or ()), *(item.__defaults__ or ())]
    if isinstance(item, dict):  # get_referents omits the keys of a dict if all keys are strings
        return [*item.keys(), *item.values()]
    if isinstance(item, MethodType):
        return [item.__self__, item.__func__]
    return gc.get_referents(item)


# modules of the contract and of Python; attributes of their classes are not counted
FOREIGN = ("minivllm.core.", "minivllm.device.worker.", "builtins", "abc")


def roots_of(instance: Any) -> list[Any]:
    """Return an instance, and the containers that are attributes of its classes and of their modules.

    Classes of minivllm's contract and of Python are left out.
    """
    roots = [instance]
    classes = [cls for cls in type(instance).__mro__ if not cls.__module__.startswith(FOREIGN)]
    modules = [sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules]
    for owner in (*classes, *modules):
        for name, value in vars(owner).items():
            if isinstance(value, CONTAINERS) and not name.startswith("__"):
                roots.append(value)
    return roots


def files() -> int:
    """Return the number of open files of this process, or 0 on a system without /proc."""
    if os.path.isdir("/proc/self/fd"):
        return len(os.listdir("/proc/self/fd"))
    return 0


class Lasting:
    """The leak test of a suite, a base class of all suites with instances that serve for long.

    The suite defines ``lasting``, which creates an instance, and ``once_more``, which uses the instance once.  After a
    use, every request or sequence of it has ended.  Each use has new names, tenants, tokens, seeds and lengths, so
    that a table keyed by any of them would grow.
    """

    if TYPE_CHECKING:
        build: Callable[..., Any]
        context: Callable[[], tuple[Any, ...]]
        exercise: Callable[[Any], Any]

    def lasting(self) -> Any:
        """Create the instance of the leak test."""
        return self.build(*self.context())

    def once_more(self, instance: Any, number: int) -> None:
        """Use the instance once; ``number`` differs in each call."""
        self.exercise(instance)

    def let_go(self, instance: Any) -> None:
        """Stop the threads, processes or engine that ``lasting`` has started."""

    @since(1, 0)
    def test_what_has_ended_leaves_nothing_behind(self) -> None:
        """Check that an instance that is used again and again does not leak memory, threads or open files.

        A server runs for weeks.  A cache of bounded size may fill up, but no data of a past call, sequence, tenant or
        key may stay for ever.
        """
        instance = self.lasting()
        try:
            self._check_growth(instance)
        finally:
            self.let_go(instance)

    def _check_growth(self, instance: Any) -> None:
        """Fail if the memory, threads or files of an instance grow with its use after bounded caches are full."""
        done = 0

        def use(n: int, seconds: float = 1e9) -> None:
            nonlocal done
            end = time.monotonic() + seconds
            for _ in range(n):
                if time.monotonic() < end:
                    self.once_more(instance, done)
                    done += 1

        use(FIRST)
        growth = self._growth(instance, lambda: use(ROUNDS))
        if growth:
            use(FILLING, SECONDS)
            gc.collect()  # ends threads and closes files of objects that are no longer used
            growth = self._least_growth(instance, lambda: use(ROUNDS))
        assert not growth, (
            f"used {ROUNDS} times more, after {done - ROUNDS} times, it holds {' and '.join(growth)} more"
        )

    def _least_growth(self, instance: Any, use: Callable[[], None]) -> list[str]:
        """Return the shortest result of ``_grown`` of several pairs of counts.

        A hash table is resized from time to time, and a full cache may be emptied, but not within every pair of counts.
        """
        end = time.monotonic() + SECONDS
        counts = [self._counts(instance)]
        least = list[str]()
        for made in range(MOST_WINDOWS):
            use()
            counts.append(self._counts(instance))
            growth = _grown(counts[-2], counts[-1])
            least = min(least, growth, key=len) if made else growth
            if not least or (made + 1 >= WINDOWS and time.monotonic() > end):
                break
        sizes = [count["bytes"] for count in counts]
        emptied = sizes[-2] - sizes[-1] > SLACK * ROUNDS
        if emptied and not least:
            return self._growth_of_peaks(instance, use, sizes)
        return least

    def _growth_of_peaks(self, instance: Any, use: Callable[[], None], sizes: list[int]) -> list[str]:
        """Return, as a text, the growth of the bytes before two clearings of a cache.

        ``sizes`` are the bytes so far, before and after each call of ``use``; the cache was emptied in the last one.
        There is no growth if the cache is not emptied again in time.
        """
        end = time.monotonic() + SECONDS
        sizes = list(sizes)
        for _ in range(MOST_WINDOWS):
            use()
            sizes.append(self._counts(instance)["bytes"])
            if time.monotonic() > end:
                break
        pairs = list(pairwise(sizes))
        peaks = [before for before, after in pairs if before - after > SLACK * ROUNDS]
        steps = sorted(after - before for before, after in pairs if after > before)
        # the counts are up to one call of ``use`` apart from the clearings
        step = steps[len(steps) // 2] if steps else 0
        added = peaks[-1] - peaks[0]
        return [f"{added} bytes"] if added > step + SLACK * ROUNDS else []

    def _growth(self, instance: Any, use: Callable[[], None]) -> list[str]:
        """Return, as texts, which counts of an instance grow by more than the tolerance in a call of ``use``."""
        before = self._counts(instance)
        use()
        return _grown(before, self._counts(instance))

    def _counts(self, instance: Any) -> dict[str, int]:
        """Return the bytes of an instance and the threads and open files of this process."""
        return {"bytes": held(*roots_of(instance)), "threads": threading.active_count(), "open files": files()}


def _grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return, as texts, which counts grow by more than the tolerance."""
    tolerance = {"bytes": SLACK * ROUNDS, "threads": ROUNDS // 2, "open files": ROUNDS // 2}
    added = {name: after[name] - before[name] for name in before}
    return [f"{n} {name}" for name, n in added.items() if n > tolerance[name]]
