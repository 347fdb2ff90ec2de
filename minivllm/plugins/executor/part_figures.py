"""Counters (figures) of the plug-ins in a worker process for attention, model, quantizer, KV format, sampler,
processors and drafter.

The verb "figures" of an executor returns a list with an entry for each plug-in that has a method ``figures()``.  An
entry is ``{"name": "attention", "figures": {...}}``, or ``{"name": ..., "failure": text}`` if the method failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minivllm.core import checks
from minivllm.core.external_calls import call_foreign
from minivllm.errors import describe_error


def of_runner(runner: Any) -> list[dict[str, Any]]:
    """Return the counters (figures) of each plug-in of a runner.  If one plug-in fails, its entry has the error."""
    return [read_figures(name, plugin) for name, plugin in plugins(runner) if has_figures(plugin)]


def plugins(runner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the plug-ins of a runner with their names in ``stats()["figures"]``."""
    worker = runner.worker
    parts = worker.parts
    yield "attention", worker.backend
    for name, own in worker.own_models.items():
        yield f"attention:{name}", own.backend
    yield "kvformat", getattr(getattr(worker.backend, "ctx", None), "kv_format", None)
    if parts is not None:
        yield "quantizer", parts.quantizer
        yield "model", parts.arch if has_figures(parts.arch) else worker.model
    for i, (name, plugin) in enumerate(worker.processors):  # the sampler is the last
        yield "sampler" if i == len(worker.processors) - 1 else f"processor:{name}", plugin
    if runner.drafting is not None:
        yield "drafter", runner.drafting.drafter


def has_figures(plugin: Any) -> bool:
    """Return whether a plug-in has a method ``figures``."""
    return callable(getattr(plugin, "figures", None))


def read_figures(name: str, plugin: Any) -> dict[str, Any]:
    """Return an entry with the counters (figures) of a plug-in after a check: at most 64 names with finite numbers."""
    try:
        return {"name": name, "figures": checks.figures(call_foreign(plugin.figures))}
    except Exception as e:
        return {"name": name, "failure": describe_error(e)}
