"""Several runs of the same measurement as one result: medians, 95 % intervals, the machine, the bill of materials."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError

from .statistics import interval, percentile

FORMAT, FORMAT_VERSION = "minivllm-bench", 1
WANTED = "a file that bench, ablate, compare, replay or simulate wrote (--output-json FILE)"


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of each figure the median over runs, and under ``intervals`` where its mean lies with 95 % confidence (Student;
    there is none of a single run).  A run in which it was not measured, or is NaN (time per token of single tokens),
    does not count; NaN if it is that in all."""
    first = runs[0]
    names = [key for key in first if any(type(run.get(key)) in (int, float) for run in runs)]
    known = {key: [run[key] for run in runs if run.get(key) is not None] for key in names}
    values = {key: [float(one) for one in own if math.isfinite(one)] for key, own in known.items()}
    found: dict[str, Any] = {key: value for key, value in first.items() if key not in values}
    for key, own in values.items():
        middle = percentile(own, 50)
        found[key] = int(middle) if own and type(first[key]) is int and middle == int(middle) else middle
    bounds = {key: interval(own) for key, own in values.items()}
    found["intervals"] = {key: list(one) for key, one in bounds.items() if one is not None}
    return found


def joules_a_token(runs: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Of each run, over its output tokens; None where no counter exists."""
    return [
        state["energy_joules"] / run["total_output_tokens"]
        if state.get("energy_joules") is not None and run.get("total_output_tokens")
        else None
        for run, state in zip(runs, states, strict=True)
    ]


def head(kind: str) -> dict[str, Any]:
    """What a result begins with."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "kind": kind, "date": now}


def result(
    kind: str,
    runs: Sequence[Mapping[str, Any]],
    states: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    bill: Mapping[str, Any] | None,
    **more: Any,
) -> dict[str, Any]:
    """A result as it is written: figures by vLLM's names on top, what they were made of below."""
    energies = joules_a_token(runs, states)
    full = [{**run, "joules_per_output_token": joules} for run, joules in zip(runs, energies, strict=True)]
    return {
        **head(kind),
        **merged(full),
        **more,
        "repeats": full,
        "machine_states": list(states),
        "settings": dict(settings),
        "bill_of_materials": bill,
    }


def plain(value: Any) -> Any:
    """JSON has no NaN: None stands for what was not measured."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def dumps(found: Mapping[str, Any], indent: int | None = 1) -> str:
    return json.dumps(plain(found), indent=indent, ensure_ascii=False, default=str)


def write(path: str, found: Mapping[str, Any]) -> None:
    """ConfigError if it cannot be written."""
    try:
        Path(path).write_text(dumps(found) + "\n", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: the result cannot be written: {exc.strerror}") from None


def read(path: str) -> dict[str, Any]:
    """A result from a file.  ConfigError if it is none."""
    found = files.read_json(path, files.LARGE, want=WANTED)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path}: no result of a measurement; want {WANTED}")
    if found.get("format_version") != FORMAT_VERSION:
        raise ConfigError(f"{path}: format {found.get('format_version')}; this minivllm reads {FORMAT_VERSION}")
    return found


def with_bounds(found: Mapping[str, Any], key: str, digits: int = 1) -> str:
    """A figure as text, with half the width of its interval where there is one."""
    value = found.get(key)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "unknown"
    bounds = found.get("intervals", {}).get(key)
    more = f" ± {(bounds[1] - bounds[0]) / 2:.{digits}f}" if bounds else ""
    return f"{value:.{digits}f}{more}"
