"""Compilation of grammars: first in a helper process, then in this one, with a cache of limited size.

    any thread ──compile──► cached? ──no──► helper process: limits ──passed──► the plug-in in this process ──► cached
                              └──yes────────────────────────────────────────────────────────────────────────►

A grammar that exceeds the limits ends only the helper or its child, which is replaced.  Refusals are cached as well.
Tenants share neither compiled grammars nor refusals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from minivllm.core.interfaces.grammar import Compiled, GrammarContext, GrammarSource
from minivllm.core.interfaces.structured import NAME
from minivllm.errors import MinivllmError, RequestError, describe_error, from_signal, shown
from minivllm.limits import usable_cores
from minivllm.registry import build_part
from minivllm.runtime.tenant_cache import Salt, TenantCache

from .gates import Gates
from .helper import Helper, Stopped
from .helpers import Helpers

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Part
    from minivllm.core.interfaces.grammar import Grammar
    from minivllm.core.interfaces.structured import StructuredOutputsParams

REFUSED = 1 << 20  # largest number of bytes of cached refusals, with the refused grammars
TOOLS = "tools"  # the field of a request with the schemas of functions
ENTRY = 512  # size in bytes of a cached refusal without its texts


def default_threads() -> int:
    """Return the number of threads for a plug-in: at most 16, and two cores less than there are.

    The two cores are for the engine's loop and the client."""
    return max(1, min(16, usable_cores() - 2))


class Grammars:
    """One grammar plug-in and its compiled grammars.  Thread-safe.

    At most ``workers`` compilations run at once, each with a helper process, and never two of the same source.
    ``context`` is called when the first grammar is compiled, because it takes time to spell out a vocabulary.
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
        self._lock = threading.Lock()
        self._building = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._making: set[tuple[Salt, GrammarSource]] = set()
        self._stopped: set[tuple[Salt, GrammarSource]] = set()  # sources being compiled that no request needs
        self._trying: dict[tuple[Salt, GrammarSource], Helper] = {}  # the helper that checks each source
        self.workers = workers
        self.gates = Gates()
        self._closed = False
        self.helpers = Helpers(lambda: Helper(part, self.context, seconds, megabytes), workers)

    @property
    def kinds(self) -> Sequence[str]:
        """Return the kinds of grammars that the plug-in lists."""
        return list(self.part.features)

    @property
    def bytes(self) -> int:
        """Return the size of the cached grammars in bytes."""
        return self._kept.bytes

    @cached_property
    def context(self) -> GrammarContext:
        """Return the vocabulary for the plug-in."""
        with self._building:
            return self._context()

    @cached_property
    def plugin(self) -> Grammar:
        """Return the plug-in.  Use ``_build`` from several threads."""
        return build_part("grammar", self.part, self.context)

    def _build(self) -> Grammar:
        """Return the plug-in.  It is created only once, even if several threads need it first."""
        with self._building:
            return self.plugin

    def warm(self) -> None:
        """Start a helper and make the plug-in in a new thread, so that the first request does not wait for them."""

        def run() -> None:
            with self.helpers.one() as helper:
                if not self._closed:
                    helper.start()
                    self._build()

        threading.Thread(target=run, name="minivllm-grammars", daemon=True).start()

    def compile(self, params: StructuredOutputsParams, salt: Salt) -> Compiled:
        """Return a compiled grammar.  RequestError with the field if it is refused.

        Only requests with the same ``salt`` share it."""
        source = params.source
        with self._changed:
            while True:
                found = self._find(source, salt)
                if found is not None:
                    return found
                if (salt, source) not in self._making:
                    break
                self._changed.wait()  # another thread compiles the same source
            self._making.add((salt, source))
        try:
            return self._make(source, salt)
        finally:
            with self._changed:
                self._making.discard((salt, source))
                self._stopped.discard((salt, source))
                self._changed.notify_all()

    def find(self, params: StructuredOutputsParams, salt: Salt) -> Compiled | None:
        """Return a cached grammar or None.  RequestError if the cache has a refusal."""
        with self._lock:
            return self._find(params.source, salt)

    def _find(self, source: GrammarSource, salt: Salt) -> Compiled | None:
        """Return a cached grammar or None.  RequestError if the grammar was refused before.  The caller holds the
        lock."""
        refusal = self._refused.get(salt, source)
        if refusal is not None:
            raise RequestError(refusal, _field(source))
        return self._kept.get(salt, source)

    def _make(self, source: GrammarSource, salt: Salt) -> Compiled:
        """Return a grammar after checking and compiling it, and cache the result or the refusal.  RequestError if it is
        refused."""
        features = self.part.features
        if features and source.kind not in features:
            takes = ", ".join(features)
            raise RequestError(
                f"{NAME}.{source.kind}: {self.part.name} compiles only {takes}; use one of these, or choose "
                "another grammar plug-in",
                NAME,
            )
        try:
            with self.helpers.one() as helper:
                helper.start()  # the plug-in is created here while the helper process starts
                plugin = self._build()
                self._try(helper, source, salt)
                made = plugin.compile(source)
            if not isinstance(made, Compiled) or not isinstance(made.nbytes, int):
                raise TypeError(f"compile() returned {shown(made)}; expected a Compiled")
        except ValueError as e:
            field = _field(source)
            refusal = f"{field}: {e}" if field == TOOLS else f"{field}.{source.kind}: {e}"
            with self._lock:
                self._refused.put(salt, source, refusal, 4 * (len(source.text) + len(refusal)) + ENTRY)
            raise RequestError(refusal, field) from None
        except MinivllmError as e:
            raise RequestError(f"{NAME}: {e}", NAME) from e
        except BaseException as e:  # BaseException, because SystemExit must not end the thread that compiles
            if from_signal(e):
                raise
            raise RequestError(f"{NAME}: {self.part.name} failed: {describe_error(e)}", NAME) from e
        with self._lock:  # running sequences keep their grammars even if the cache drops them
            self._kept.put(salt, source, made, max(made.nbytes, len(source.text)))
        return made

    def _try(self, helper: Helper, source: GrammarSource, salt: Salt) -> None:
        """Check a grammar with a helper, in a way that ``stop`` can end.  Raise Stopped if ``stop`` was called for
        it."""
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
        """End the compilation of a grammar that no request needs.

        ``compile`` then raises RequestError and caches nothing."""
        key = salt, params.source
        with self._lock:
            if key in self._making:
                self._stopped.add(key)
                helper = self._trying.get(key)
                if helper is not None:
                    helper.stop()

    def close(self) -> None:
        """End the helpers.  Further calls do nothing."""
        self._closed = True
        self.helpers.close()


def _field(source: GrammarSource) -> str:
    """Return the field of a request that a grammar belongs to."""
    return TOOLS if source.kind == "reply" else NAME


class NoGrammars:
    """Replacement of ``Grammars`` without a plug-in or a vocabulary: it refuses each request with the reason."""

    workers = 1
    kinds: Sequence[str] = ()

    def __init__(self, why: str) -> None:
        self.why = why
        self.gates = Gates()

    def compile(self, params: StructuredOutputsParams, salt: Salt) -> Compiled:
        """Raise RequestError."""
        raise RequestError(f"{NAME}: {self.why}", NAME)

    def find(self, params: StructuredOutputsParams, salt: Salt) -> Compiled | None:
        """Raise RequestError."""
        return self.compile(params, salt)

    def stop(self, params: StructuredOutputsParams, salt: Salt) -> None:
        """Do nothing."""

    def warm(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
