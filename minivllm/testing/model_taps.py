"""Tests of tap points: named activations of a model that requests may record or change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.core.interfaces.model import given_points, tap_points
from minivllm.core.interfaces.taps import read_only

from .base import since
from .harness import Harness
from .model_config import largest
from .spec import SpecConformance

FEED = {0: [5, 9, 3, 17, 11, 2, 8], 1: [4]}  # slot -> tokens of a step


class Passed:
    """Taps of a step (``model.StepTaps``) that store the tensor of each tap point, and add a vector at one point.

    The vector differs between tokens, because a model without rotary embedding may ignore a vector that all keys have
    in common.  Its largest element is ``add``.
    """

    def __init__(self, points: Mapping[str, int], changed_point: str = "", add: float = 0.0) -> None:
        self.points = frozenset(points)
        self.changed_point = changed_point
        self.add = add
        self.found: list[tuple[str, Tensor]] = []

    def __call__(self, point: str, x: Tensor) -> Tensor:
        self.found.append((point, x.clone()))
        if point != self.changed_point:
            return x
        token = torch.linspace(0, 1, len(x))[:, None]
        channel = torch.linspace(-1, 1, x.shape[1])
        added = token * channel
        return x + self.add * added.to(x)

    def at(self, point: str) -> list[Tensor]:
        """Return the tensors that passed a point."""
        return [x for found, x in self.found if found == point]

    def given(self, point: str) -> Tensor | None:
        """Return None, so that the router chooses the experts at a tap point."""
        return None


class Gives(Passed):
    """Taps that replace the experts that a router chose; ``routes`` has tap point -> expert ids, int32 [T, k]."""

    def __init__(self, points: Mapping[str, int], routes: Mapping[str, Tensor]) -> None:
        super().__init__(points)
        self.routes = routes

    def given(self, point: str) -> Tensor | None:
        """Return the expert ids to use at a tap point, or None to keep the router's choice."""
        return self.routes.get(point)


class ModelTaps(SpecConformance):
    """The tests of tap points, a base class of ``ModelConformance``."""

    cases: Callable[..., Iterator[tuple[str, Any]]]
    harness: Callable[..., Harness]

    @since(2, 1)
    def test_each_point_passes_once_and_what_comes_back_goes_on(self, tmp_path: Path) -> None:
        """Check that a step calls its taps once for each of ``tap_points``, and uses the returned tensor.

        Taps receive a tensor [tokens, width].  Taps that change nothing leave the logits as they are.  A vector added
        at a point changes them, also if only that point is tapped.
        """
        tapped = False
        for name, case in self.cases(tmp_path):
            harness = self.harness(case.path)
            points = tap_points(harness.model)
            if points:
                tapped = True
                self._check_points(harness, points, case.tolerance, name)
        if not tapped:
            pytest.skip("names no points: requests with taps are refused")

    def _check_points(self, harness: Harness, points: Mapping[str, int], tolerance: float, name: str) -> None:
        """Compare steps without taps, with taps at all points, and with a vector added at each point alone."""
        plain, _ = harness.logits(FEED)
        every = Passed(points)
        got = self._tapped_logits(harness, every)
        shapes = sorted((point, list(x.shape)) for point, x in every.found)
        want = sorted((point, [8, width]) for point, width in points.items())
        assert shapes == want, f"{name}: in a step of 8 tokens the taps received {shapes}; expected {want}"
        off = largest(got - plain)
        assert off <= tolerance, f"{name}: with taps logits are off by {off:.1e} (tolerance {tolerance:.1e})"
        for point, width in points.items():
            alone = Passed({point: width}, point, 5.0)
            changed = self._tapped_logits(harness, alone)
            off = largest(changed - plain)
            passed = alone.at(point)
            assert len(passed) == 1, f"{name}: {point} passed {len(passed)} times when tapped alone: expected once"
            assert off > tolerance or read_only(point), f"{name}: a vector added at {point} changes no logit"
            far = largest(passed[0] - every.at(point)[0])
            assert far <= tolerance, f"{name}: {point} is off by {far:.1e} when tapped alone"

    @since(2, 7)
    def test_given_experts_are_used_in_place_of_the_chosen_ones(self, tmp_path: Path) -> None:
        """Check that a model uses the expert ids that taps give at each of ``given_points``.

        The router's own choice, given again, changes no bit of the logits.  Other experts change the logits, except at
        tokens with -1, where the router chooses.
        """
        tried = False
        for name, case in self.cases(tmp_path):
            harness = self.harness(case.path)
            points = tap_points(harness.model)
            for point in given_points(harness.model):
                tried = True
                self._check_given(harness, point, points[point], name)
        if not tried:
            pytest.skip("accepts no given experts: requests with given routes are refused")

    def _check_given(self, harness: Harness, point: str, width: int, name: str) -> None:
        """Give the router's own experts at a tap point, and then other ones, and check the logits."""
        plain = Passed({point: width})
        logits = self._tapped_logits(harness, plain)
        own = plain.at(point)[0].int()
        taps = Gives({point: width}, {point: own})
        same = self._tapped_logits(harness, taps)
        assert torch.equal(same, logits), f"{name}: the router's own experts, given at {point}, change the logits"
        other = own.flip(0).contiguous()
        other[1] = -1
        changed = Gives({point: width}, {point: other})
        given = self._tapped_logits(harness, changed)
        off = largest(given - logits)
        want = torch.where(other >= 0, other, own)
        found = [x.int() for x in changed.at(point)]
        passed = len(found) == 1 and torch.equal(found[0], want)
        assert passed, f"{name}: given experts do not pass through {point}"
        assert off > 0 or torch.equal(want, own), f"{name}: other experts given at {point} change no logit"

    def _tapped_logits(self, harness: Harness, taps: Passed) -> Tensor:
        """Return the logits of a step with taps, whose sequences start anew."""
        harness.known = [0] * len(harness.known)
        harness.taps = taps
        return harness.logits(FEED)[0]
