"""What a plug-in that served for long still holds: memory that hangs on an instance, threads and open files."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from .base import since

FIRST, ROUNDS = 6, 24  # rounds before the first count, and between two counts
WINDOWS = 3  # counts, in each of which what leaks has grown
FILLING, SECONDS = 1000, 8.0  # rounds, or seconds, in which what has a bound is full
SLACK = 16  # bytes of a round: less than one number in a list
APART = (type, ModuleType, FrameType, BuiltinFunctionType)  # nobody's own
CONTAINERS = (dict, list, set, bytearray)


def held(*roots: Any) -> int:
    """Bytes of all that can be reached from some objects: containers, arrays and tensors, but no modules and types."""
    seen, todo, total = set(), list(roots), 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, APART):
            continue
        seen.add(id(one))
        total += size(one)
        todo += parts(one)
    return total


def size(one: Any) -> int:
    if hasattr(one, "untyped_storage"):
        return one.untyped_storage().nbytes() if one.device.type != "meta" else 0
    return sys.getsizeof(one, 0)


def parts(one: Any) -> Iterable[Any]:
    if isinstance(one, FunctionType):  # not its module
        return [*(one.__closure__ or ()), *(one.__defaults__ or ())]
    if isinstance(one, dict):  # get_referents leaves out the keys of a dict whose keys are all text
        return [*one.keys(), *one.values()]
    if isinstance(one, MethodType):
        return [one.__self__, one.__func__]
    return gc.get_referents(one)


OURS = ("minivllm.core.", "minivllm.device.worker.", "builtins", "abc")  # modules of classes that are not looked into


def roots_of(instance: Any) -> list[Any]:
    """An instance, and the containers of its classes and their modules, if they are no part of minivllm's contract."""
    own = [c for c in type(instance).__mro__ if not c.__module__.startswith(OURS)]
    places = [vars(c) for c in own] + [vars(sys.modules[c.__module__]) for c in own if c.__module__ in sys.modules]
    return [instance, *(v for place in places for k, v in place.items() if isinstance(v, CONTAINERS) and k[:2] != "__")]


def files() -> int:
    """Open files, where the system tells."""
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


class Lasting:
    """The test of what is left behind.

    A suite gives ``lasting``, an instance, and ``once_more``, one use of it, after which everything that took part in
    it has ended.  Each use has names, tenants, tokens, seeds and lengths of its own, so that books by any of them grow.
    """

    if TYPE_CHECKING:
        build: Callable[..., Any]
        context: Callable[[], tuple[Any, ...]]
        exercise: Callable[[Any], Any]

    def lasting(self) -> Any:
        return self.build(*self.context())

    def once_more(self, instance: Any, number: int) -> None:
        self.exercise(instance)

    def let_go(self, instance: Any) -> None:
        """End what ``lasting`` has started."""

    @since(1, 0)
    def test_what_has_ended_leaves_nothing_behind(self) -> None:
        """A server runs for weeks: used again and again, an instance holds no more memory, threads and open files than
        after a few times.  A cache or a ring of a bounded size may fill; what is kept of each call, sequence, tenant or
        key for good may not."""
        instance = self.lasting()
        try:
            self._lasts(instance)
        finally:
            self.let_go(instance)

    def _lasts(self, instance: Any) -> None:
        done = 0

        def use(n: int, seconds: float = 1e9) -> None:
            nonlocal done
            until = time.monotonic() + seconds
            for _ in range(n):
                if time.monotonic() < until:
                    self.once_more(instance, done)
                    done += 1

        use(FIRST)
        grown = self._grown(instance, lambda: use(ROUNDS))
        if grown:
            use(FILLING, SECONDS)
            gc.collect()  # of threads and files
            every = [self._grown(instance, lambda: use(ROUNDS)) for _ in range(WINDOWS)]
            grown = min(every, key=len)  # a table of hashes is made anew now and then, and no smaller
        assert not grown, f"used {ROUNDS} times more, after {done - ROUNDS} times, it holds {' and '.join(grown)} more"

    def _grown(self, instance: Any, use: Callable[[], None]) -> list[str]:
        before = self._counts(instance)
        use()
        after = self._counts(instance)
        least = {"bytes": SLACK * ROUNDS, "threads": ROUNDS // 2, "open files": ROUNDS // 2}
        return [f"{after[k] - before[k]} {k}" for k in before if after[k] - before[k] > least[k]]

    def _counts(self, instance: Any) -> dict[str, int]:
        return {"bytes": held(*roots_of(instance)), "threads": threading.active_count(), "open files": files()}
