"""Choose and use the router of a server, and replace its answer where that is not valid."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.engine.blocks import chain_key
from minivllm.core.interfaces.router import (
    ReplicaLoad,
    ReplicaRouter,
    RoutedRequest,
    RouterContext,
    least_loaded,
)
from minivllm.errors import ConfigError, PluginError, describe_error, shown, suggest
from minivllm.registration.discovery import LOCAL
from minivllm.registration.spec import PluginQuery
from minivllm.registry import Catalog
from minivllm.server import logs

if TYPE_CHECKING:
    from minivllm.config import Loaded

QUIET = 10.0  # seconds between two log lines about faults


class Routing:
    """The router of a server, and the count of its faults."""

    def __init__(self, loaded: Loaded) -> None:
        """Find the router.  ConfigError names a router or an option that does not exist."""
        server = loaded.server
        self.name = server.router
        registry = Catalog.discover().allow(loaded.engine.allow_targets)["router"]
        if ":" not in self.name and not registry.installed(self.name):
            names = [entry.name for entry in registry.entries]
            text = f"server.router={shown(self.name)}: there are {', '.join(names)}"
            raise ConfigError(f"{text}.{suggest(self.name, names)}")
        try:
            entry = registry.find(self.name)
            label = entry.name if entry.builtin or entry.dist == LOCAL else entry.label
            candidate = registry.select(PluginQuery(), label).require()
            self._options = registry.options(candidate, server.router_options, "server.router_options")
            self._class: Any = registry.load(candidate)
        except PluginError as exc:
            raise ConfigError(f"server.router={shown(self.name)}: {exc}") from exc
        self.faults = 0
        self._logged = -QUIET
        self._router: ReplicaRouter

    def start(self, ctx: RouterContext) -> None:
        """Construct the router, once the replicas have started."""
        self._router = self._class(self._options, ctx)

    def choose(self, request: RoutedRequest, loads: Sequence[ReplicaLoad]) -> int:
        """Return the number of a replica in ``loads``.  If the router fails or returns a wrong number, note that and
        return the least loaded replica."""
        try:
            number = self._router.choose(request, list(loads))
        except Exception as exc:
            self._fault(f"choose raised {describe_error(exc)}")
            return least_loaded(loads)
        numbers = [load.number for load in loads]
        if type(number) is int and number in numbers:
            return number
        self._fault(f"choose returned {shown(number)}; expected one of {numbers}")
        return least_loaded(loads)

    def sent(self, request: RoutedRequest, number: int) -> None:
        """Tell the router to which replica a request was sent.  A fault of the router is only counted."""
        try:
            self._router.sent(request, number)
        except Exception as exc:
            self._fault(f"sent raised {describe_error(exc)}")

    def emptied(self, number: int) -> None:
        """Tell the router that the prefix cache of the replica ``number`` is empty.  A fault of the router is only
        counted."""
        try:
            self._router.emptied(number)
        except Exception as exc:
            self._fault(f"emptied raised {describe_error(exc)}")

    def _fault(self, problem: str) -> None:
        """Count a fault of the router, and log it unless one was logged just now."""
        self.faults += 1
        now = time.monotonic()
        if now - self._logged >= QUIET:
            self._logged = now
            text = "the router failed; the request goes to the replica with the fewest tokens"
            logs.event(text, logging.ERROR, router=self.name, reason=problem, faults=self.faults)


def block_keys(tokens: np.ndarray, salt: Sequence[str], block: int) -> list[int]:
    """Return the keys of the whole blocks of a prompt i32 [n].

    Prompts with different salts share no key, because they share no cached block."""
    ids = np.ascontiguousarray(tokens, np.int32)
    data = memoryview(ids.tobytes())
    size = 4 * block
    key = chain_key(0, repr(tuple(salt)).encode())
    keys = []
    for at in range(0, len(data) - size + 1, size):
        key = chain_key(key, bytes(data[at : at + size]))
        keys.append(key)
    return keys
