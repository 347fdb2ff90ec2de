"""Start a run again from its record: the configuration, the requests, and a check that it would be the same run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from minivllm.errors import ConfigError

from .diff import Comparison, Difference, compare


def as_config(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration file with the record's values would hold: what was asked for, not what came of it, so that
    another choice can still bring its consequences with it."""
    config = record["config"]
    run = {key: value for key, value in config["run"].items() if value not in (None, [])}
    tables = {"sampling": dict(config["sampling"]), "run": run, "requires": {"plugins": list(config["requires"])}}
    return {**config["values"], **tables}


def batches(record: Mapping[str, Any], path: str) -> list[tuple[list[Any], list[dict[str, Any]], list[list[str]]]]:
    """The recorded requests, (prompts, sampling parameters, points that each reads) for each call that brought some.
    ConfigError if there are none, or if a Python function or vectors belonged to one."""
    kept = record.get("requests")
    if not kept:
        raise ConfigError(
            f"{path}: holds no requests to run again: they are kept by `run --record`, `generate --record` and "
            "LLM(record=...), not by LLM.record(), up to 10,000 of them"
        )
    for number, request in enumerate(kept, 1):
        if steered := [tap["point"] for tap in request.get("taps", ()) if "add_sha256" in tap]:
            raise ConfigError(
                f"{path}: request {number} added a vector at {steered[0]}, which a record does not hold: it cannot be "
                "started from a file; run it from Python"
            )
        for name, value in request["params"].items():
            if isinstance(value, Mapping) and "function" in value:
                raise ConfigError(
                    f"{path}: request {number} had {name}={value['function']}, a Python function: it cannot be "
                    "started from a file; run it from Python"
                )
    found = []
    for _, group in groupby(kept, key=lambda request: request["batch"]):
        members = list(group)
        prompts = [{k: r[k] for k in ("prompt", "prompt_token_ids") if k in r} for r in members]
        points = [[tap["point"] for tap in r.get("taps", ())] for r in members]  # without a vector it can only read
        found.append((prompts, [_params(r["params"]) for r in members], points))
    return found


def _params(values: Mapping[str, Any]) -> dict[str, Any]:
    bias = values.get("logit_bias")
    return {**values, "logit_bias": {int(k): v for k, v in bias.items()}} if bias else dict(values)


def check(record: Mapping[str, Any], now: Mapping[str, Any], path: str, force: bool = False) -> list[str]:
    """Notes about what is not as it was recorded.  ConfigError if a source, a version, a model file or an automatic
    choice is another one than recorded, though nobody asked for that; with ``force`` that is a note as well."""
    found: Comparison = compare(record, now, results=False)
    own = [d for d in found.differences if d.counts and not d.follows]
    wanted = list(dict.fromkeys(d.subject for d in own if d.asked))
    moved = [d for d in own if not d.asked and d.group != "machine"]
    notes = [f"changed from {path}: {', '.join(wanted)}"] if wanted else []
    if machine := [d for d in own if d.group == "machine"]:
        notes.append(f"not the machine of {path}: {'; '.join(map(_told, machine))}")
    if moved and not force:
        raise ConfigError(
            f"{path}: this would not be the recorded run: {'; '.join(map(_told, moved))}. "
            "Go back to what was recorded, or add --force to run what there is now"
        )
    return [*notes, *(f"not as recorded: {_told(d)}" for d in moved)]


def _told(difference: Difference) -> str:
    return f"{difference.subject} was {difference.a} and is {difference.b}"
