"""One comparison: the engine runs, ends, and transformers computes the same of what it left."""

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
SEAMS = ("model", "attention", "quantizer")  # whose plug-ins compute what is compared
IDS = 24  # tokens of the prompt that is made up where there is no tokenizer


@dataclass(frozen=True)
class ComparedModel:
    """What was compared, and how it came out.  ``parts`` are the names of the plug-ins that computed."""

    model: str
    reference: str
    device: str
    parts: dict[str, str]
    runs: list[EngineRun]
    found: DtypeComparison

    def text(self) -> str:
        parts = ", ".join(f"{seam} {name}" for seam, name in self.parts.items())
        return "\n".join(
            [f"{self.model} on {self.device} ({parts}) and {self.reference}", *lines(self.found, self.runs)]
        )

    def as_dict(self) -> dict[str, Any]:
        found = self.found
        about = {"model": self.model, "reference": self.reference, "device": self.device, "parts": self.parts}
        return {
            **about,
            "prompts": [{"tokens": run.drawn + 1, "token_ids": run.generated} for run in self.runs],
            **found.as_dict(),
        }


def compare(llm: Any, prompts: Sequence[Any], max_tokens: int, bound: float | None = None) -> ComparedModel:
    """Compare what ``llm`` computes of the prompts (texts or token ids; none: two short texts) with transformers.  The
    engine is closed, so that there is room for two models of which one at a time is held."""
    from minivllm.frontend.prompts import read_prompt

    if llm.config.load_format == "dummy":
        raise ConfigError("load_format=dummy: its weights are random, want the ones in the files")
    wiring, resolved = llm.engine.wiring, llm.resolved
    if not prompts:
        vocab = llm.engine.capacity.vocab_size
        prompts = PROMPTS if llm.tokenizer is not None else [[(7 * i * i + 3 * i + 5) % vocab for i in range(IDS)]]
    ids = [read_prompt(prompt, llm.tokenizer).ids.tolist() for prompt in prompts]
    runs, missing = engine.run(llm, ids, max_tokens)
    llm.close()
    found = DtypeComparison(wiring.dtype, bound or BOUNDS[wiring.dtype])
    from .reference import Reference

    layers = layers_of(runs[0].values)
    reference = Reference(wiring.model_dir, wiring.dtype, wiring.device, layers, wiring.hf_overrides)
    _leave_out_idle_norms(runs, reference.norms)
    known: set[str] = set()
    for number, run in enumerate(runs):
        own, plain = reference.run(run.ids, run.values), reference.run(run.ids)
        known |= own.keys()
        found.take(number, run, own, plain)
    why = f"{reference.name} has no value that is known as it"
    alone = dict.fromkeys((split(point)[1] for point in runs[0].values if point not in known), why)
    found.missing = {**missing, **alone, **reference.missing}
    parts = {seam: resolved.parts[seam].name for seam in SEAMS if seam in resolved.parts}
    return ComparedModel(llm.config.model, reference.name, wiring.device, parts, runs, found)


def _leave_out_idle_norms(runs: Sequence[EngineRun], norms: set[str]) -> None:
    """Where neither model has a norm of q and k there is nothing to compare."""
    for operation, of in NORM_OF.items():
        pairs = [
            (run.values, point, layer_point(layer, of))
            for run in runs
            for point in run.values
            for layer, name in (split(point),)
            if layer is not None and name == operation
        ]
        there = any(split(point)[1] == operation for point in norms)
        if not there and all(torch.equal(values[point], values[before]) for values, point, before in pairs):
            for values, point, _ in pairs:
                del values[point]
