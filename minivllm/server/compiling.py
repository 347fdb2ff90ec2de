"""Grammars of requests that come to the engine's loop: compiled beside it, because that may take seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

THREADS = 2  # the grammars themselves are compiled one after another; what is kept is found at once
LOOK = 0.005  # seconds between looks while something is compiled and nothing else happens


class Compiling:
    """Requests by number whose grammars are being compiled.  One thread asks; ``cancel`` forgets one."""

    def __init__(self, compile: Callable[[Any], Any]) -> None:
        self._compile = compile
        self._pool = ThreadPoolExecutor(THREADS, "minivllm-compile")
        self._open: dict[int, Any] = {}
        self._done: deque[tuple[int, Any, BaseException | None]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, number: int, live: Any) -> None:
        """``live.request.grammar`` will be there when ``ready`` gives ``live`` back."""
        self._open[number] = live
        params = live.request.params

        def run() -> None:
            try:
                self._done.append((number, self._compile(params), None))
            except BaseException as error:  # what is not told here is told nowhere: its request would wait for ever
                self._done.append((number, None, error))

        self._pool.submit(run)

    def cancel(self, number: int) -> bool:
        """Whether it was being compiled; it will not come back."""
        return self._open.pop(number, None) is not None

    def ready(self) -> list[tuple[Any, BaseException | None]]:
        """What has been compiled, or why it could not be."""
        found = []
        while self._done:
            number, grammar, error = self._done.popleft()
            live = self._open.pop(number, None)
            if live is not None:
                live.request.grammar = grammar
                found.append((live, error))
        return found

    def close(self) -> None:
        self._open.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
