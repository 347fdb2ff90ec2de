"""Compiles what clients ask for: tried out in a helper process first, kept under a byte limit.

    any thread ──compile──► kept? ──no──► a helper process: time, memory ──passed──► the plug-in, in this one ──► kept
                              └──yes────────────────────────────────────────────────────────────────────────────►

A grammar that is too much for the limits harms the helper or its child only, which is killed and replaced.  What was
refused is refused again at once.  What one tenant has asked is neither kept nor refused at once for another.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from minivllm.core.interfaces.grammar import Compiled, GrammarContext, GrammarSource
from minivllm.core.interfaces.structured import NAME
from minivllm.errors import MinivllmError, RequestError, describe_error, shown
from minivllm.registry import build_part
from minivllm.runtime.tenant_cache import Salt, TenantCache

from .helper import Helper, Stopped
from .helpers import Helpers

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part
    from minivllm.core.interfaces.grammar import Grammar
    from minivllm.core.interfaces.structured import StructuredOutputsParams

REFUSED = 1 << 20  # bytes of refusals that are remembered, with what was refused
ENTRY = 512  # bytes of one beside its texts


def default_threads() -> int:
    """Threads for a plug-in: the processor's cores but for two, that the loop and the client have too, at most 16."""
    return max(1, min(16, len(os.sched_getaffinity(0)) - 2))


class Grammars:
    """One plug-in and what it has compiled.  Thread-safe; at most ``workers`` compilations run at once, each with a
    helper process, and never two of the same source.

    ``context`` is asked for when the first grammar is compiled: a vocabulary takes a while to spell out.
    """

    def __init__(
        self,
        part: Part,
        context: Callable[[], GrammarContext],
        seconds: float,
        megabytes: int,
        cache_bytes: int,
        workers: int = 1,
    ) -> None:
        self.part = part
        self._context = context
        self._kept: TenantCache[Compiled] = TenantCache(cache_bytes)
        self._refused: TenantCache[str] = TenantCache(REFUSED)
        self._lock, self._building = threading.Lock(), threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._making: set[tuple[Salt, GrammarSource]] = set()
        self._stopped: set[tuple[Salt, GrammarSource]] = set()  # of those, what nobody wants any more
        self._trying: dict[tuple[Salt, GrammarSource], Helper] = {}  # and which helper looks at it
        self.workers, self._closed = workers, False
        self.helpers = Helpers(lambda: Helper(part, self.context, seconds, megabytes), workers)

    @property
    def bytes(self) -> int:
        """Of what is kept."""
        return self._kept.bytes

    @cached_property
    def context(self) -> GrammarContext:
        with self._building:
            return self._context()

    @cached_property
    def plugin(self) -> Grammar:
        return build_part("grammar", self.part, self.context)

    def _build(self) -> Grammar:
        with self._building:  # one plug-in, however many threads ask for it first
            return self.plugin

    def warm(self) -> None:
        """Start a helper and make the plug-in, on a thread of its own: the first request need not wait for it."""

        def run() -> None:
            with self.helpers.one() as helper:
                if not self._closed:
                    helper.start()
                    self._build()

        threading.Thread(target=run, name="minivllm-grammars", daemon=True).start()

    def compile(self, params: StructuredOutputsParams, salt: Salt) -> Compiled:
        """RequestError, which names the field, if it is refused.  ``salt``: whose it is; others do not share it."""
        source = params.source
        with self._changed:
            while True:
                if (found := self._find(source, salt)) is not None:
                    return found
                if (salt, source) not in self._making:
                    break
                self._changed.wait()  # for another with the same source
            self._making.add((salt, source))
        try:
            return self._make(source, salt)
        finally:
            with self._changed:
                self._making.discard((salt, source))
                self._stopped.discard((salt, source))
                self._changed.notify_all()

    def find(self, params: StructuredOutputsParams, salt: Salt) -> Compiled | None:
        """What is there already.  RequestError if it has been refused."""
        with self._lock:
            return self._find(params.source, salt)

    def _find(self, source: GrammarSource, salt: Salt) -> Compiled | None:
        """The lock is held."""
        if (why := self._refused.get(salt, source)) is not None:
            raise RequestError(why, NAME)
        return self._kept.get(salt, source)

    def _make(self, source: GrammarSource, salt: Salt) -> Compiled:
        features = self.part.features
        if features and source.kind not in features:
            takes = ", ".join(features)
            raise RequestError(f"{NAME}.{source.kind}: {self.part.name} takes only {takes}; choose another", NAME)
        try:
            with self.helpers.one() as helper:
                helper.start()  # while it starts, the plug-in is made here
                plugin = self._build()
                self._try(helper, source, salt)
                made = plugin.compile(source)
            if not isinstance(made, Compiled) or not isinstance(made.nbytes, int):
                raise TypeError(f"compile() gave {shown(made)}; want a Compiled")
        except ValueError as e:
            why = f"{NAME}.{source.kind}: {e}"
            with self._lock:
                self._refused.put(salt, source, why, 4 * (len(source.text) + len(why)) + ENTRY)
            raise RequestError(why, NAME) from None
        except MinivllmError as e:
            raise RequestError(f"{NAME}: {e}", NAME) from e
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # SystemExit too: it must not end the thread that compiles
            raise RequestError(f"{NAME}: {self.part.name} failed: {describe_error(e)}", NAME) from e
        with self._lock:  # sequences that run keep theirs, whoever has to make room
            self._kept.put(salt, source, made, max(made.nbytes, len(source.text)))
        return made

    def _try(self, helper: Helper, source: GrammarSource, salt: Salt) -> None:
        """``helper.check``, which ``stop`` can end."""
        with self._lock:
            if (salt, source) in self._stopped:
                raise Stopped
            self._trying[salt, source] = helper
        try:
            helper.check(source)
        finally:
            with self._lock:
                del self._trying[salt, source]

    def stop(self, params: StructuredOutputsParams, salt: Salt) -> None:
        """Nobody wants what is being compiled: ``compile`` raises RequestError soon, and nothing is kept of it."""
        key = salt, params.source
        with self._lock:
            if key in self._making:
                self._stopped.add(key)
                if (helper := self._trying.get(key)) is not None:
                    helper.stop()

    def close(self) -> None:
        """End the helpers; idempotent."""
        self._closed = True
        self.helpers.close()


class NoGrammars:
    """There is no plug-in, or no vocabulary: each request is refused with the reason."""

    workers = 1

    def __init__(self, why: str) -> None:
        self.why = why

    def compile(self, params: StructuredOutputsParams, salt: Salt) -> Compiled:
        raise RequestError(f"{NAME}: {self.why}", NAME)

    def find(self, params: StructuredOutputsParams, salt: Salt) -> Compiled | None:
        return self.compile(params, salt)

    def stop(self, params: StructuredOutputsParams, salt: Salt) -> None:
        """Nothing to do."""

    def warm(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
