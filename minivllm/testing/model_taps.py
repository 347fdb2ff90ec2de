"""Models: the points that requests may tap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.core.interfaces.model import tap_points
from minivllm.core.interfaces.taps import read_only

from .base import since
from .harness import Harness
from .spec import SpecConformance


class Passed:
    """``model.StepTaps`` that keeps what passes through each point, and adds up to ``add`` to that of ``point``: a
    vector for each token, as one that all keys have in common changes nothing without a rotary embedding."""

    def __init__(self, points: Mapping[str, int], point: str = "", add: float = 0.0) -> None:
        self.points, self.point, self.add = frozenset(points), point, add
        self.found: list[tuple[str, Tensor]] = []

    def __call__(self, point: str, x: Tensor) -> Tensor:
        self.found.append((point, x.clone()))
        if point != self.point:
            return x
        token, place = torch.linspace(0, 1, len(x)), torch.linspace(-1, 1, x.shape[1])
        return x + self.add * (token[:, None] * place).to(x)


class ModelTaps(SpecConformance):
    families: Callable[..., Mapping[str, Any]]
    case: Callable[..., Any]
    harness: Callable[..., Harness]
    difference: Callable[..., str]

    @since(2, 1)
    def test_each_point_passes_once_and_what_comes_back_goes_on(self, tmp_path: Path) -> None:
        """``tap_points``: of each name one tensor [tokens, width] in a step, ``step.taps`` being there; the logits are
        the same, and others if something is added, also where only one of the points is asked for."""
        some = False
        for name, cls in self.families().items():
            case = self.case(cls, tmp_path / name)
            harness = self.harness(case.path)
            points, feed = tap_points(harness.model), [[5, 9, 3, 17, 11, 2, 8], [4]]
            if not points:
                continue
            some, rows = True, dict(enumerate(feed))
            plain, _ = harness.logits(rows)
            harness.known = [0] * len(harness.known)
            harness.taps = whole = Passed(points)
            got, _ = harness.logits(rows)
            shapes = sorted((point, list(x.shape)) for point, x in whole.found)
            want = sorted((point, [8, width]) for point, width in points.items())
            assert shapes == want, f"{name}: these passed through a step of 8 tokens: {shapes}; want {want}"
            off = float((got - plain).abs().max())
            assert off <= case.room, f"{name}: with taps logits are off by {off:.1e} (allowed {case.room:.1e})"
            for point, width in points.items():
                harness.known = [0] * len(harness.known)
                harness.taps = one = Passed({point: width}, point, 5.0)
                off = float((harness.logits(rows)[0] - plain).abs().max())
                passed = [x for found, x in one.found if found == point]
                assert len(passed) == 1, f"{name}: {point} passed {len(passed)} times, asked for alone: want once"
                assert off > case.room or read_only(point), f"{name}: what is added at {point} changes no logit"
                before = next(x for found, x in whole.found if found == point)
                far = float((passed[0] - before).abs().max())
                assert far <= case.room, f"{name}: {point} is off by {far:.1e} where it is asked for alone"
        if not some:
            pytest.skip("names no points: requests with taps are refused")
