"""What a configuration would choose, and why: the choices are made as the engine makes them, and nothing is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.config.explanation import Explanation
from minivllm.config.resolve import resolve
from minivllm.errors import PluginError
from minivllm.registry import Catalog

if TYPE_CHECKING:
    from minivllm.config import Loaded


def explain(model: Any = None, *, config: Any = None, **options: Any) -> Explanation:
    """What ``LLM`` with the same arguments would be made of, and why.  Loads no weights.

    A configuration that nothing suits gives an explanation with an ``error``; one that is wrong raises, as ``LLM`` does
    (ConfigError, ModelError, or PluginError for a name that is unknown or a plug-in whose spec is broken).
    """
    from minivllm.device.hardware import prepare_environment

    from .front_door import load

    prepare_environment()
    return explain_loaded(load(config, options if model is None else {**options, "model": model}))


def explain_loaded(loaded: Loaded, catalog: Catalog | None = None, weights: bool = False) -> Explanation:
    """``weights``: also what the weights would take, as notes of the quantizer; the model is built without memory."""
    catalog = (Catalog.discover() if catalog is None else catalog).allow(loaded.engine.allow_targets)
    try:
        resolved = resolve(loaded.engine, catalog, loaded.origins, weights=False)
    except PluginError as exc:
        if getattr(exc, "selection", None) is None:
            raise
        return Explanation(exc.selections, exc.notes, catalog, exc)  # type: ignore[attr-defined]
    found = imported(resolved.explanation)
    if weights and found.error is None:
        from minivllm.config.weights import weights_explained
        from minivllm.device.hardware import find_device

        told = weights_explained(resolved.wiring, find_device(loaded.engine.device).sm)
        found = replace(found, notes=(*found.notes, *((f"quantizer.{what}", sentence) for what, sentence in told)))
    return found


def imported(explanation: Explanation) -> Explanation:
    """Import each chosen implementation, as the engine would: a spec can promise a class that is not there."""
    found, error = [], explanation.error
    for selection in explanation.selections:
        try:
            if selection.chosen is not None:
                explanation.catalog[selection.kind].load(selection.chosen)
        except PluginError as exc:
            selection, error = selection.without(exc), error or exc
        found.append(selection)
    return Explanation(tuple(found), explanation.notes, explanation.catalog, error)
