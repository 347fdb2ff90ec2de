"""Explain the plug-ins that a configuration would choose.  They are chosen as for the engine, but nothing is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.config.explanation import Explanation
from minivllm.config.resolve import resolve
from minivllm.errors import ModelError, PluginError
from minivllm.registry import Catalog

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.runtime.text.tokenizer import Tokenizer


def explain(model: Any = None, *, config: Any = None, **options: Any) -> Explanation:
    """Return the plug-ins of an ``LLM`` with the same arguments, and the reasons.  No weights are loaded.

    If no plug-in is suitable, the explanation has an ``error``.  A wrong configuration raises, as in ``LLM``:
    ConfigError, ModelError, or PluginError for an unknown name or a broken spec.
    """
    from minivllm.device.hardware import prepare_environment

    from .front_door import load

    prepare_environment()
    return explain_loaded(load(config, options if model is None else {**options, "model": model}))


def explain_loaded(
    loaded: Loaded,
    catalog: Catalog | None = None,
    weights: bool = False,
    parser: Callable[[Tokenizer], str] | None = None,
) -> Explanation:
    """Return the explanation of a loaded configuration.

    ``weights`` adds notes about the size of the weights; the model is built without memory.  ``parser`` returns the
    sentence about the server's parser of replies for the tokenizer of the model, for a further note.
    """
    catalog = (Catalog.discover() if catalog is None else catalog).allow(loaded.engine.allow_targets)
    try:
        resolved = resolve(loaded.engine, catalog, loaded.origins, weights=False)
    except PluginError as exc:
        if getattr(exc, "selection", None) is None:
            raise
        return Explanation(exc.selections, exc.notes, catalog, exc)  # type: ignore[attr-defined]
    found = imported(resolved.explanation)
    if parser is not None and resolved.tokenizer_dir is not None:
        sentence = _parser_sentence(resolved.tokenizer_dir, resolved.config.chat_template, parser)
        found = replace(found, notes=(*found.notes, ("parser.format", sentence)))
    if weights and found.error is None:
        from minivllm.config.weights import weights_explained
        from minivllm.device.hardware import find_device

        lines = weights_explained(resolved.wiring, find_device(loaded.engine.device).sm)
        notes = [(f"quantizer.{name}", sentence) for name, sentence in lines]
        found = replace(found, notes=(*found.notes, *notes))
    return found


def _parser_sentence(folder: str, chat_template: str | None, parser: Callable[[Tokenizer], str]) -> str:
    """Return the sentence about the parser of replies, or why the tokenizer cannot be read."""
    from minivllm.runtime.text.tokenizer import load_tokenizer

    try:
        return parser(load_tokenizer(folder, chat_template))
    except ModelError as e:
        return f"unknown, because the tokenizer cannot be read: {e}"


def imported(explanation: Explanation) -> Explanation:
    """Import each chosen implementation, as the engine would, because a spec may name a class that does not exist.
    Return the explanation with the errors of failed imports."""
    selections = []
    error = explanation.error
    for selection in explanation.selections:
        try:
            if selection.chosen is not None:
                explanation.catalog[selection.kind].load(selection.chosen)
        except PluginError as exc:
            selection = selection.without(exc)
            error = error or exc
        selections.append(selection)
    return replace(explanation, selections=tuple(selections), error=error)
