"""Merge several runs of a measurement into one result: medians, 95 % intervals, the machine, the bill of materials."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.errors import ConfigError

from . import Result, Row, Rows
from .statistics import interval, percentile

FORMAT, FORMAT_VERSION = "minivllm-bench", 1
EXPECTED = "a file that bench, ablate, compare, replay or simulate wrote (--output-json FILE)"


def merged(runs: Rows) -> Result:
    """Return the median of each number over the runs, and the other fields of the first run.

    ``intervals`` holds the 95 % confidence interval of each mean (Student), for at least two values.  A run without the
    number, or with NaN (as the time per token of single tokens), does not count.  The median is NaN if none counts.
    """
    first = runs[0]
    values: dict[str, list[float]] = {}
    for key in first:
        if any(type(run.get(key)) in (int, float) for run in runs):
            known = [run[key] for run in runs if run.get(key) is not None]
            values[key] = [float(value) for value in known if math.isfinite(value)]
    found: Result = {key: value for key, value in first.items() if key not in values}
    intervals = {}
    for key, numbers in values.items():
        middle = percentile(numbers, 50)
        whole = type(first[key]) is int and numbers and middle == int(middle)
        found[key] = int(middle) if whole else middle
        bounds = interval(numbers)
        if bounds is not None:
            intervals[key] = list(bounds)
    found["intervals"] = intervals
    return found


def joules_a_token(runs: Rows, states: Rows) -> list[float | None]:
    """Return the joules per output token of each run, None without an energy counter."""
    found: list[float | None] = []
    for run, state in zip(runs, states, strict=True):
        joules = state.get("energy_joules")
        tokens = run.get("total_output_tokens")
        found.append(joules / tokens if joules is not None and tokens else None)
    return found


def head(kind: str) -> Result:
    """Return the first fields of a result: format, kind and date."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "kind": kind, "date": now}


def result(
    kind: str,
    runs: Rows,
    states: Rows,
    settings: Row,
    bill: Row | None,
    **more: Any,
) -> Result:
    """Return a result as a file holds it: merged values under vLLM's names, the runs, the machine and the settings."""
    energies = joules_a_token(runs, states)
    full = [{**run, "joules_per_output_token": joules} for run, joules in zip(runs, energies, strict=True)]
    found = head(kind) | merged(full) | more
    found["repeats"] = full
    found["machine_states"] = list(states)
    found["settings"] = dict(settings)
    found["bill_of_materials"] = bill
    return found


def plain(value: Any) -> Any:
    """Return a value for JSON, with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def dumps(found: Row, indent: int | None = 1) -> str:
    """Return a result as JSON text."""
    return json.dumps(plain(found), indent=indent, ensure_ascii=False, default=str)


def write(path: str, found: Row) -> None:
    """Write a result to a file.  Raise ConfigError if that fails."""
    try:
        Path(path).write_text(dumps(found) + "\n", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{path}: the result cannot be written: {exc.strerror}") from None


def read(path: str) -> Result:
    """Read a result from a file.  Raise ConfigError if it holds none, or one of another format version."""
    found = files.read_json(path, files.LARGE, expected=EXPECTED)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a result of a measurement; expected {EXPECTED}")
    if found.get("format_version") != FORMAT_VERSION:
        raise ConfigError(f"{path}: format {found.get('format_version')}; this minivllm reads {FORMAT_VERSION}")
    return found


def with_bounds(found: Row, key: str, digits: int = 1) -> str:
    """Return a value as text, followed by half the width of its interval if it has one."""
    value = found.get(key)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "unknown"
    bounds = found.get("intervals", {}).get(key)
    more = f" ± {(bounds[1] - bounds[0]) / 2:.{digits}f}" if bounds else ""
    return f"{value:.{digits}f}{more}"
