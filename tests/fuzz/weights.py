"""Changes of the weights of a case's engines.

Each model has two sets of weights, 0 and 1.  Before a wave an engine gets the set that the case names.  While requests
run, weights are replaced by equal ones, engines pause, or they sleep, which changes no answer.  In ``mixed`` waves an
engine changes to the other set while requests run; no reference has their answers, but those of later waves.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from .models import weights_of

# a change of an engine without a change of answers -> how often it is drawn
CALM = {
    "pause": 3, "update": 3, "keep": 2, "tensors": 2, "partial": 2, "refused": 2, "paused update": 2, "sleep": 2,
    "drop": 1, "renewed": 2,
}  # fmt: skip
# reasons for which a drawn change of an engine is refused
UNCHANGEABLE = (
    "comes quantized", "cannot change on a GPU", "image encoder", "does not change weights", "quantized as a whole",
)  # fmt: skip
NOT_FINITE = "infinite numbers or NaN"
FIRST_TURNS = 30  # turns of the driver within which changes begin
Call = tuple[str, dict[str, Any]]  # a method of an engine, and its arguments


def changeable(options: dict[str, Any], device: str) -> bool:
    """Return whether the weights of an engine can change."""
    executor = options.get("executor") or ""
    name = executor if isinstance(executor, str) else executor["name"]
    quantized = device == "cuda" and options["quantizer"] != "none"
    return "encoder" not in options and name not in ("ray", "sim") and not quantized


class EngineWeights:
    """The weights of an engine: the set that it has, and the calls that change it."""

    def __init__(self, folder: Path, options: dict[str, Any], device: str, rng: random.Random) -> None:
        """Begin with set 0.  ``folder`` has the models."""
        self.folder, self.model, self.rng = folder, options["model"], rng
        self.able, self.set = changeable(options, device), 0

    def to(self, chosen: int) -> list[Call]:
        """Return the calls that change to a set."""
        if not self.able or chosen == self.set:
            return []
        self.set = chosen
        return [self._update(kv=self.rng.choice(["recompute", "recompute", "keep"]))]

    def calm(self) -> tuple[str, list[Call]]:
        """Draw a change that leaves all answers as they are, and return its name and calls."""
        kind = self.rng.choices(list(CALM), list(CALM.values()))[0]
        if kind == "drop" and self.set:
            kind = "renewed"  # ``wake`` alone would read set 0
        elif kind == "renewed" and not self.able:
            kind = "drop"
        calls: dict[str, list[Call]] = {
            "pause": [("pause", {}), ("resume", {})],
            "update": [self._update()],
            "keep": [self._update(kv="keep")],
            "paused update": [("pause", {}), self._update(kv=self.rng.choice(["recompute", "keep"])), ("resume", {})],
            "sleep": [("sleep", {"level": 1}), ("wake", {})],
            "drop": [("sleep", {"level": 2}), ("wake", {})],
            "renewed": [("sleep", {"level": 2}), self._update(), ("wake", {})],
        }
        return kind, calls[kind] if kind in calls else [self._by_tensors(kind)]

    def _update(self, **more: Any) -> Call:
        return "update_weights", {"weights": str(weights_of(self.folder, self.model, self.set)), **more}

    def _by_tensors(self, kind: str) -> Call:
        """Return the update by all tensors, by some of them, or by some with a number that is not finite."""
        from safetensors.torch import load_file

        tensors = load_file(weights_of(self.folder, self.model, self.set) / "model.safetensors")
        if kind == "tensors":
            return "update_weights", {"weights": tensors}
        chosen = {name: tensors[name] for name in self.rng.sample(sorted(tensors), self.rng.randint(1, len(tensors)))}
        if kind == "refused":
            # an engine without the head of a checkpoint does not read the tensors of the head
            name = self.rng.choice([name for name in sorted(tensors) if not name.startswith("mtp.")])
            chosen.setdefault(name, tensors[name])
            chosen[name] = chosen[name].clone()
            chosen[name].view(-1)[self.rng.randrange(chosen[name].numel())] = float(self.rng.choice(["nan", "-inf"]))
        return "update_weights", {"weights": chosen, "partial": True}


def refusal_of(kind: str, error: str) -> str | None:
    """Return the reason for which a change may be refused; None for another error."""
    reasons = (*UNCHANGEABLE, NOT_FINITE) if kind == "refused" else UNCHANGEABLE
    return next((reason for reason in reasons if reason in error), None)
