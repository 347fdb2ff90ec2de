"""Figures that plug-ins add to ``stats()``, and so to records, ``diff``, ``compare``, replays and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from minivllm.core import checks
from minivllm.core.external_calls import call_foreign
from minivllm.errors import describe_error

if TYPE_CHECKING:
    from minivllm.core.engine.engine import Engine
    from minivllm.runtime.hooks.manager import HookManager

log = logging.getLogger("minivllm")
Plugin = TypeVar("Plugin")


class PluginFigures:
    """Collector of the figures of all plug-ins of an engine, in this process and in the workers.

        stats["figures"]           {"scheduler": {"tenants": 3, ...}, "evictor": {...}, "evictor:1": {...}}
        stats["figure_failures"]   {"scheduler": "ValueError: ..."}, for plug-ins whose figures failed

    A name is a kind of plug-in, or ``processor:NAME`` or ``strategy:NAME`` for kinds with several plug-ins.  Further
    objects of a kind (an evictor for each KV group) have a number.  A processor and the sampler exist twice: the plain
    name means the object of the worker, and the name of the object that binds parameters on the host ends with " host".
    The names of ranks after the first end with " rank N".
    """

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], Any]] = {}
        self._made: dict[str, int] = {}
        self._failed: set[str] = set()
        self._worker: Callable[[str], Any] | None = None
        self._last: list[dict[str, Any]] = []  # the last figures of the worker, which ends before a record is written

    def of(self, seam: str, plugin: Plugin) -> Plugin:
        """Add a plug-in under its kind (``seam``) if it has a method ``figures``, and return the plug-in."""
        number = self._made[seam] = self._made.get(seam, -1) + 1
        ask = getattr(plugin, "figures", None)
        if callable(ask):
            self._sources[f"{seam}:{number}" if number else seam] = ask
        return plugin

    def each(self, seam: str, plugins: list[tuple[str, Plugin]]) -> list[tuple[str, Plugin]]:
        """Add several plug-ins of a kind, each under "KIND:NAME", and return them."""
        return [(name, self.of(f"{seam}:{name}", plugin)) for name, plugin in plugins]

    def of_host(self, processors: list[tuple[str, Plugin]]) -> list[tuple[str, Plugin]]:
        """Add the host's processors, the sampler last, and return them."""
        for i, (name, plugin) in enumerate(processors, 1):
            self.of("sampler host" if i == len(processors) else f"processor:{name} host", plugin)
        return processors

    def watch(self, engine: Engine, grammar: Callable[[], Any], hooks: HookManager | None) -> None:
        """Add the executor, the worker's plug-ins, the grammar and hooks of an engine, and listen to its statistics."""
        self.of("executor", engine.executor)
        self.later("grammar", grammar)
        self.worker(engine.executor.call)
        for member in hooks.members if hooks is not None else ():
            self.of(f"hooks:{member.name}", member.plugin)
        engine.events.stats_asked.subscribe(self.add_to)

    def later(self, seam: str, find: Callable[[], Any]) -> None:
        """Add a plug-in of the kind ``seam`` that is created at its first use.  ``find`` returns None until then."""

        def ask() -> Any:
            own = getattr(find(), "figures", None)
            return own() if callable(own) else {}

        self._sources[seam] = ask

    def worker(self, call: Callable[[str], Any]) -> None:
        """Add the plug-ins of the workers.  ``call("figures")`` returns the result of
        ``plugins.executor.part_figures``.

        If the executor does not support the call, or its plug-ins have no figures, it is not called again.
        """
        try:
            self._last = call("figures") or []
        except Exception:  # an executor of another package need not support the call
            self._last = []
        self._worker = call if self._last else None

    def add_to(self, stats: dict[str, Any]) -> None:
        """Add the figures to the statistics of an engine.  Figures that fail are omitted, and logged once."""
        figures: dict[str, Any] = {}
        failures: dict[str, str] = {}
        for name, ask in self._sources.items():
            try:
                figures[name] = checks.figures(call_foreign(ask))
            except Exception as e:
                failures[name] = describe_error(e)
        for name, entry in self._of_worker():
            if "failure" in entry:
                failures[name] = str(entry["failure"])
            else:
                figures[name] = entry["figures"]
        for name in failures.keys() - self._failed:
            self._failed.add(name)
            log.warning("%s failed in figures(), which are left out: %s", name, failures[name])
        stats["figures"] = {name: found for name, found in figures.items() if found}
        stats["figure_failures"] = failures

    def _of_worker(self) -> list[tuple[str, dict[str, Any]]]:
        """Return (name, figures or failure) of each plug-in of the workers, named "NAME rank N" beyond the first
        process.  If the workers cannot be read, their last figures are returned."""
        if self._worker is not None:
            try:
                self._last = self._worker("figures")
            except Exception as e:  # the engine has ended, so the last figures are used
                log.debug("the worker's figures cannot be read: %s", describe_error(e))
        named = []
        ranks: dict[str, int] = {}
        for entry in self._last:
            name = entry["name"]
            rank = ranks[name] = ranks.get(name, -1) + 1
            named.append((f"{name} rank {rank}" if rank else name, entry))
        return named


FIGURE = "figure "  # prefix of a plug-in's figure in results: "figure evictor.ghosts"


def flat(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of ``stats`` as ``{"evictor.ghosts": 3}``."""
    figures = {}
    for name, of_plugin in stats.get("figures", {}).items():
        figures.update({f"{name}.{key}": value for key, value in of_plugin.items()})
    return figures


def text(row: Mapping[str, Any]) -> str:
    """Return the plug-ins' figures of a row of a result in a line, with bands or intervals if it has them."""
    all_bounds = row.get("band") or row.get("intervals") or {}
    found = []
    for key, value in row.items():
        if not key.startswith(FIGURE) or value is None:
            continue
        line = f"{key.removeprefix(FIGURE)} {value:.6g}"
        bounds = all_bounds.get(key)
        if bounds and bounds[0] < bounds[1]:
            line += f" [{bounds[0]:.6g}, {bounds[1]:.6g}]"
        found.append(line)
    return ", ".join(found)
