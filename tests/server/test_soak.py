"""The leaks that ``benchmarks/soak.py`` finds in made-up samples."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from soak import verdict

FLAT = {"http_mib": 80.0, "rest_mib": 500.0, "kv_in_use": 0.0, "wrong": 0, "http_fds": 11, "engine_fds": 5, "held": 0}


def samples(hours: float, **growth: float) -> list[dict[str, float]]:
    """Return one sample for each minute.  ``growth`` is added to the columns with these names each hour."""
    return [
        {**FLAT, "seconds": 60 * i, **{name: FLAT[name] + more * i / 60 for name, more in growth.items()}}
        for i in range(int(60 * hours) + 1)
    ]


@pytest.mark.parametrize("hours", [0.2, 2])
def test_what_stays_as_it_is_passes(hours):
    assert verdict(samples(hours)) == []


@pytest.mark.parametrize("name", ["http_mib", "rest_mib"])
def test_memory_that_grows_slowly_is_found_by_its_slope_and_fast_by_its_height(name):
    assert verdict(samples(2, **{name: 0.9})) == []
    assert "grows by 1.10 MiB an hour" in verdict(samples(2, **{name: 1.1}))[0]
    assert "grew from" in verdict(samples(0.5, **{name: 100.0}))[0]


@pytest.mark.parametrize("name", ["kv_in_use", "wrong", "http_fds", "engine_fds", "held"])
def test_what_is_left_at_the_end_is_found(name):
    rows = samples(0.2)
    rows[-1][name] += 3
    (found,) = verdict(rows)
    assert any(word in found for word in ("in use", "answers", name, "entries"))
