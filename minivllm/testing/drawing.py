"""Draws of single values within a property test."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def whole(data: Any, least: int, most: int) -> int:
    """Draw a whole number from ``least`` to ``most``."""
    return data.draw(st.integers(least, most))


def one_of(data: Any, *values: Any) -> Any:
    """Draw one of some values."""
    return data.draw(st.sampled_from(values))
