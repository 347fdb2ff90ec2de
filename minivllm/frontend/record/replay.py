"""Repeat a recorded run: read its configuration and requests, and check that it would be the same run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from minivllm.errors import ConfigError

from . import Entries, JsonObject
from .diff import Comparison, Difference, compare


def as_config(record: JsonObject) -> Entries:
    """Return the configuration of a record, with the keys of a configuration file.

    It has the values that the user set.  Values that minivllm chose are left out, so that they can change when the user
    changes another option.
    """
    config = record["config"]
    run = {key: value for key, value in config["run"].items() if value not in (None, [])}
    return {
        **config["values"],
        "sampling": dict(config["sampling"]),
        "run": run,
        "requires": {"plugins": list(config["requires"])},
    }


def batches(record: JsonObject, path: str) -> list[tuple[list[Any], list[Entries], list[list[str]]]]:
    """Return (prompts, sampling parameters, points of reading taps) of each recorded call with requests.

    ConfigError if there are no requests, or if one had a Python function or added a vector.
    """
    requests = record.get("requests")
    if not requests:
        raise ConfigError(
            f"{path}: has no requests to repeat: `run --record`, `generate --record` and LLM(record=...) keep up to "
            "10,000 of them, LLM.record() keeps none"
        )
    for number, request in enumerate(requests, 1):
        _check_repeatable(request, f"{path}: request {number}")
    calls = []
    for _, group in groupby(requests, key=lambda request: request["batch"]):
        members = list(group)
        prompts = [{key: r[key] for key in ("prompt", "prompt_token_ids") if key in r} for r in members]
        # recorded taps only read values, so no vectors are needed
        points = [[tap["point"] for tap in r.get("taps", ())] for r in members]
        calls.append((prompts, [_params(r["params"]) for r in members], points))
    return calls


def _check_repeatable(request: JsonObject, name: str) -> None:
    """Raise ConfigError if a request had a vector, given routes or a function, which a record does not contain."""
    advice = "it cannot be started from a file; run it from Python"
    for tap in request.get("taps", ()):
        if "add_sha256" in tap:
            raise ConfigError(f"{name} added a vector at {tap['point']}, which a record does not contain: {advice}")
    if "given_sha256" in (request["params"].get("routes") or {}):
        raise ConfigError(f"{name} had given routes, which a record does not contain: {advice}")
    for param, value in request["params"].items():
        if isinstance(value, Mapping) and "function" in value:
            raise ConfigError(f"{name} had {param}={value['function']}, a Python function: {advice}")


def _params(values: JsonObject) -> Entries:
    """Return recorded sampling parameters with the token ids of ``logit_bias`` as numbers, which JSON keys are not."""
    params = dict(values)
    if bias := values.get("logit_bias"):
        params["logit_bias"] = {int(token): value for token, value in bias.items()}
    return params


def check(record: JsonObject, now: JsonObject, path: str, force: bool = False) -> list[str]:
    """Compare a record with the bill of materials of the run that would start now, and return notes about differences.

    ConfigError if a source, a version, a model file or an automatic choice differs that the user did not choose, or if
    the weights of the recorded engine were updated.  With ``force`` such a difference is a note as well.
    """
    found: Comparison = compare(record, now, results=False)
    own = [d for d in found.differences if d.counts and not d.follows]
    chosen = list(dict.fromkeys(d.subject for d in own if d.requested))
    machine = [d for d in own if d.group == "machine"]
    moved = [d for d in own if not d.requested and d.group != "machine"]
    if moved and not force:
        raise ConfigError(
            f"{path}: this would not be the recorded run: {'; '.join(map(_describe, moved))}. "
            "Restore the recorded state, or add --force to run the present one"
        )
    notes = []
    results = record.get("results") or {}
    version = results.get("stats", {}).get("weights", {}).get("version", 0)
    if version:
        changed = f"{path}: the run reached version {version} of its weights, which the record does not contain"
        if not force:
            raise ConfigError(f"{changed}: add --force to run with the weights of the model's files")
        notes.append(f"{changed}; this run has the weights of the model's files")
    if chosen:
        notes.append(f"changed from {path}: {', '.join(chosen)}")
    if machine:
        notes.append(f"not the machine of {path}: {'; '.join(map(_describe, machine))}")
    return notes + [f"not as recorded: {_describe(difference)}" for difference in moved]


def _describe(difference: Difference) -> str:
    """Return the subject of a difference with its recorded and its present value."""
    return f"{difference.subject} was {difference.a} and is {difference.b}"
