"""The wiring as text: what ``config.resolve`` chose, for a worker process of another executor.

    parent  wiring_to_json(resolved.wiring) ──► argv, a pipe, a socket ──► worker  wiring_from_json(text)

Targets and options are data, so nothing of the parent is pickled; see ``core.interfaces.executor.Wiring``.
"""

from __future__ import annotations

import dataclasses
import json

from minivllm import __version__
from minivllm.core.interfaces.executor import (
    CacheWiring,
    DraftWiring,
    ParallelWiring,
    Part,
    SpeculationWiring,
    StepWiring,
    Wiring,
)
from minivllm.errors import ResourceError


def wiring_to_json(wiring: Wiring) -> str:
    """Targets and options, and the version of minivllm that chose them."""
    return json.dumps({**dataclasses.asdict(wiring), "minivllm": __version__})


def wiring_from_json(text: str) -> Wiring:
    """ResourceError if another version of minivllm made it."""
    values = json.loads(text)
    if (theirs := values.pop("minivllm", None)) != __version__:
        raise ResourceError(
            f"the wiring was made by minivllm {theirs}, and this process has {__version__}: install one version for all"
        )
    values["parts"] = _parts(values["parts"])
    values["processors"] = tuple(Part(**part) for part in values["processors"])
    values["eos_ids"] = tuple(values["eos_ids"])
    cache, speculation = values["cache"], values["speculation"]
    if (draft := speculation["draft_model"]) is not None:
        speculation["draft_model"] = _own_model(draft)
    values["own_models"] = {name: _own_model(found) for name, found in values["own_models"].items()}
    nested = {
        "cache": CacheWiring(**{**cache, "groups": tuple(map(tuple, cache["groups"]))}),
        "steps": StepWiring(**{**values["steps"], "unfused": tuple(values["steps"]["unfused"])}),
        "speculation": SpeculationWiring(**speculation),
        "parallel": ParallelWiring(**values["parallel"]),
    }
    return Wiring(**{**values, **nested})


def _own_model(found: dict) -> DraftWiring:
    return DraftWiring(found["model_dir"], _parts(found["parts"]))


def _parts(found: dict[str, dict]) -> dict[str, Part]:
    return {seam: Part(**part) for seam, part in found.items()}
