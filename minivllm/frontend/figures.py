"""Figures that plug-ins add to ``stats()``, and so to records, ``diff`` and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from minivllm.core import checks
from minivllm.core.foreign import call_foreign
from minivllm.core.interfaces.evictor import Evictor
from minivllm.core.interfaces.scheduler import SchedulerPolicy
from minivllm.errors import told

log = logging.getLogger("minivllm")
Plugin = TypeVar("Plugin", SchedulerPolicy, Evictor)


class PluginFigures:
    """Asks the plug-ins of one engine.

        stats["figures"]           {"scheduler": {"tenants": 3, ...}, "evictor": {...}, "evictor:1": {...}}
        stats["figure_failures"]   {"scheduler": "ValueError: ..."}, of those whose figures could not be had

    A plug-in of which there are several, as an evictor for each KV group, has the number of the later ones in its name.
    """

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], Any]] = {}
        self._made: dict[str, int] = {}
        self._failed: set[str] = set()

    def of(self, seam: str, plugin: Plugin) -> Plugin:
        """The plug-in, whose figures are asked for from now on."""
        number = self._made[seam] = self._made.get(seam, -1) + 1
        self._sources[f"{seam}:{number}" if number else seam] = plugin.figures
        return plugin

    def add_to(self, stats: dict[str, Any]) -> None:
        """A listener of ``EngineEvents.stats_asked``.  Figures that cannot be had are left out, and it is logged."""
        figures, failures = {}, {}
        for name, ask in self._sources.items():
            try:
                figures[name] = checks.figures(call_foreign(ask))
            except Exception as e:
                failures[name] = told(e)
                if name not in self._failed:
                    self._failed.add(name)
                    log.warning("%s failed in figures(), which are left out: %s", name, failures[name])
        stats["figures"], stats["figure_failures"] = {n: found for n, found in figures.items() if found}, failures
