"""Convert a wiring (the resolved configuration of an engine) to JSON text and back, for worker processes.

    parent  wiring_to_json(resolved.wiring) ──► argv, a pipe, a socket ──► worker  wiring_from_json(text)

A wiring is the result of ``config.resolve``.  Targets and options are data, so nothing is pickled; see
``core.interfaces.executor.Wiring``."""

from __future__ import annotations

import dataclasses
import json

from minivllm import __version__
from minivllm.core.interfaces.executor import (
    AdapterWiring,
    CacheWiring,
    DraftWiring,
    ImageWiring,
    ParallelWiring,
    Part,
    SpeculationWiring,
    StepWiring,
    Wiring,
)
from minivllm.errors import ResourceError


def wiring_to_json(wiring: Wiring) -> str:
    """Return a wiring as JSON, with the version of minivllm that created it."""
    return json.dumps({**dataclasses.asdict(wiring), "minivllm": __version__})


def wiring_from_json(text: str) -> Wiring:
    """Return the wiring in a JSON text.  ResourceError if another version of minivllm created it."""
    values = json.loads(text)
    version = values.pop("minivllm", None)
    if version != __version__:
        raise ResourceError(
            f"the wiring was made by minivllm {version}, and this process has {__version__}: install the same version"
        )
    values["parts"] = _parts(values["parts"])
    values["processors"] = tuple(Part(**part) for part in values["processors"])
    values["eos_ids"] = tuple(values["eos_ids"])
    cache, speculation = values["cache"], values["speculation"]
    if speculation["draft_model"] is not None:
        speculation["draft_model"] = _second_model(speculation["draft_model"])
    values["own_models"] = {k: _second_model(model) for k, model in values["own_models"].items()}
    cache["groups"] = tuple(map(tuple, cache["groups"]))
    cache["stores"] = tuple(Part(**part) for part in cache["stores"])
    values["cache"] = CacheWiring(**cache)
    steps = values["steps"]
    steps["unfused"] = tuple(steps["unfused"])
    values["steps"] = StepWiring(**steps)
    values["speculation"] = SpeculationWiring(**speculation)
    values["parallel"] = ParallelWiring(**values["parallel"])
    adapters = values["adapters"]
    adapters["methods"] = tuple(Part(**part) for part in adapters["methods"])
    values["adapters"] = AdapterWiring(**adapters)
    values["images"] = ImageWiring.from_json(values["images"])
    return Wiring(**values)


def _second_model(values: dict) -> DraftWiring:
    """Return the configuration of a second model from its JSON values."""
    return DraftWiring(values["model_dir"], _parts(values["parts"]))


def _parts(values: dict[str, dict]) -> dict[str, Part]:
    """Return the plug-in of each seam (kind of plug-in) from JSON values."""
    return {seam: Part(**part) for seam, part in values.items()}
