"""Compare a model: run the engine, close it, then let transformers compute the same values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minivllm.errors import ConfigError

from . import engine
from .errors import BOUNDS, DtypeComparison, EngineRun
from .points import NORM_OF, layer_point, layers_of, split
from .report import lines

PROMPTS = ("Once upon a time, in a village by the sea, there lived", "The answer to 12 + 30 is")
SEAMS = ("model", "attention", "quantizer")  # seams (kinds of plug-ins) that affect the compared values
IDS = 24  # number of tokens of a default prompt for a model without a tokenizer


@dataclass(frozen=True)
class ComparedModel:
    """A model and its comparison.

    ``parts`` maps each seam (kind of plug-in) to the name of the plug-in that computed the values.
    """

    model: str
    reference: str
    device: str
    parts: dict[str, str]
    runs: list[EngineRun]
    found: DtypeComparison

    def text(self) -> str:
        """Return the comparison as text."""
        parts = ", ".join(f"{seam} {name}" for seam, name in self.parts.items())
        title = f"{self.model} on {self.device} ({parts}) and {self.reference}"
        return "\n".join([title, *lines(self.found, self.runs)])

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        found: dict[str, Any] = {"model": self.model, "reference": self.reference}
        found["device"] = self.device
        found["parts"] = self.parts
        found["prompts"] = [{"tokens": run.drawn + 1, "token_ids": run.generated} for run in self.runs]
        return found | self.found.as_dict()


def compare(llm: Any, prompts: Sequence[Any], max_tokens: int, bound: float | None = None) -> ComparedModel:
    """Compare the operations of ``llm`` with those of transformers on some prompts (texts or token ids).

    Without prompts two short texts are used.  ``bound`` limits an operation's relative error; None means the bound of
    the dtype.  The engine is closed before transformers loads the model, so that memory holds one model at a time.
    Raise ConfigError for random weights, which transformers cannot load.
    """
    from minivllm.frontend.prompts import read_prompt

    if llm.config.load_format == "dummy":
        raise ConfigError("load_format=dummy: its weights are random; expected the weights of the model's files")
    wiring = llm.engine.wiring
    resolved = llm.resolved
    prompts = prompts or _default_prompts(llm)
    ids = [read_prompt(prompt, llm.tokenizer).ids.tolist() for prompt in prompts]
    runs, missing = engine.run(llm, ids, max_tokens)
    llm.close()
    found = DtypeComparison(wiring.dtype, bound or BOUNDS[wiring.dtype])
    from .reference import Reference

    layers = layers_of(runs[0].values)
    reference = Reference(wiring.model_dir, wiring.dtype, wiring.device, layers, wiring.hf_overrides)
    _drop_absent_norms(runs, reference.norms)
    known: set[str] = set()
    for number, run in enumerate(runs):
        own = reference.run(run.ids, run.values)
        found.take(number, run, own, reference.run(run.ids))
        known |= own.keys()
    reason = f"{reference.name} has no module that is known to compute it"
    only_ours = {}
    for point in runs[0].values:
        if point not in known:
            _, operation = split(point)
            only_ours[operation] = reason
    found.missing = {**missing, **only_ours, **reference.missing}
    parts = {seam: resolved.parts[seam].name for seam in SEAMS if seam in resolved.parts}
    return ComparedModel(llm.config.model, reference.name, wiring.device, parts, runs, found)


def _default_prompts(llm: Any) -> Sequence[Any]:
    """Return two texts, or token ids for a model without a tokenizer."""
    if llm.tokenizer is not None:
        return PROMPTS
    vocab = llm.engine.capacity.vocab_size
    return [[(7 * i * i + 3 * i + 5) % vocab for i in range(IDS)]]


def _drop_absent_norms(runs: Sequence[EngineRun], reference_norms: set[str]) -> None:
    """Delete the values after a norm of q or k that neither model has.

    The engine has no such norm if the values before and after it are equal in all layers.
    """
    in_reference = {split(point)[1] for point in reference_norms}
    for operation, source in NORM_OF.items():
        if operation in in_reference:
            continue
        pairs = []
        for run in runs:
            for point in run.values:
                layer, name = split(point)
                if layer is not None and name == operation:
                    pairs.append((run.values, point, layer_point(layer, source)))
        if all(torch.equal(values[point], values[before]) for values, point, before in pairs):
            for values, point, _ in pairs:
                del values[point]
