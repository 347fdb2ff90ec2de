"""How far values are apart, point by point, and which point is the first beyond the bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .points import (
    ATTENTION,
    BEFORE_QKV,
    FUSED,
    INSIDE,
    K_ROPE,
    LOGITS,
    Q_ROPE,
    SAYS,
    TOKEN,
    K,
    Q,
    V,
    layer_point,
    place,
    split,
)

# relative error of one operation that is right; the numbers of each dtype are rounded to 2**-24, 2**-11 and 2**-8
BOUNDS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


@dataclass(frozen=True)
class EngineRun:
    """What the engine made of a prompt: ``ids`` are the tokens that were computed, the prompt's and all but the last of
    those generated; ``values`` are float32 [tokens, width] by point, of ``logits`` the last rows alone; ``fused`` are
    the first of these rows once more, of a run in which layers were not taken apart."""

    ids: list[int]
    generated: list[int]
    values: dict[str, Tensor]
    fused: Tensor | None = None

    @property
    def drawn(self) -> int:
        """The position of the token whose logits the first one was drawn from."""
        return len(self.ids) - len(self.generated)


@dataclass(frozen=True)
class PointError:
    """Of all tokens of all prompts: the largest difference, and the largest ratio of a token's difference to
    transformers' value (Euclidean norms).  ``prompt`` and ``position``: the first token beyond the bound, or else that
    of the largest ratio; counted from 0."""

    point: str
    largest: float
    relative: float
    prompt: int
    position: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON: None in place of a number that is not finite."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


@dataclass
class TokenTally:
    """Greedy tokens, each judged by transformers' logits behind the engine's tokens before it."""

    count: int = 0
    same: int = 0
    ties: int = 0  # that differ, by less than the bound
    # (prompt, number of the token, the engine's, transformers', how much higher its logit is)
    differing: list[tuple[int, int, int, int, float]] = field(default_factory=list)


@dataclass
class DtypeComparison:
    """``errors`` of operations that were given the engine's inputs, ``along`` of a pass without them; both by point.
    ``missing``: operation -> why no value of it is compared."""

    dtype: str
    bound: float
    errors: dict[str, PointError] = field(default_factory=dict)
    along: dict[str, PointError] = field(default_factory=dict)
    tokens: TokenTally = field(default_factory=TokenTally)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def beyond(self) -> list[PointError]:
        """Those beyond the bound, in the order of their computation."""
        found = [e for e in self.errors.values() if not e.relative <= self.bound_of(e.point)]
        return sorted(found, key=lambda e: place(e.point))

    def bound_of(self, point: str) -> float:
        """The logits of fused layers are those of a whole model: rounding counts as much as on the way through
        transformers'."""
        if point == FUSED and LOGITS in self.along and self.along[LOGITS].relative < math.inf:
            return max(self.bound, 2 * self.along[LOGITS].relative)
        return self.bound

    @property
    def within(self) -> bool:
        return not self.beyond and not self.tokens.differing

    def as_dict(self) -> dict[str, Any]:
        beyond, rows = self.beyond, sorted(self.errors.values(), key=lambda e: place(e.point))
        along = {point: error.as_dict()["relative"] for point, error in self.along.items()}
        return {
            "dtype": self.dtype,
            "bound": self.bound,
            "within": self.within,
            "first": None if not beyond else {**beyond[0].as_dict(), "where": explained(self)},
            "errors": [{**error.as_dict(), "along": along.get(error.point)} for error in rows],
            "tokens": asdict(self.tokens),
            "not_compared": self.missing,
        }

    def take(self, number: int, run: EngineRun, own: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
        """Add a prompt.  ``own`` are transformers' values given the engine's, ``plain`` those of the prompt alone."""
        for theirs, found in ((own, self.errors), (plain, self.along)):
            for point in run.values.keys() & theirs.keys():
                ours = run.values[point]
                new = measure(point, ours, theirs[point][-len(ours) :], self.bound, number, len(run.ids) - len(ours))
                found[point] = worse(found[point], new, self.bound) if point in found else new
        if LOGITS in run.values:
            self._check_draws(number, run, run.values[LOGITS])
            if run.fused is not None:
                self._add(
                    measure(FUSED, run.fused, run.values[LOGITS][: len(run.fused)], self.bound, number, run.drawn)
                )
        self._judge(number, run, plain[LOGITS])

    def _check_draws(self, number: int, run: EngineRun, logits: Tensor) -> None:
        """Greedy tokens are the best of the engine's own logits: the point ``token``."""
        drawn = logits[-len(run.generated) :].gather(1, torch.tensor(run.generated)[:, None])
        self._add(measure(TOKEN, drawn, logits.amax(-1, keepdim=True), self.bound, number, run.drawn))

    def _add(self, new: PointError) -> None:
        before = self.errors.get(new.point)
        self.errors[new.point] = new if before is None else worse(before, new, self.bound)

    def _judge(self, number: int, run: EngineRun, logits: Tensor) -> None:
        tally = self.tokens
        for at, (token, row) in enumerate(zip(run.generated, logits[-len(run.generated) :], strict=True)):
            best = int(row.argmax())
            tally.count += 1
            if token == best:
                tally.same += 1
            elif (more := float(row[best] - row[token])) <= self.bound * float(row.abs().max()):
                tally.ties += 1
            else:
                tally.differing.append((number, at, token, best, more))


def measure(point: str, ours: Tensor, theirs: Tensor, bound: float, prompt: int, first: int = 0) -> PointError:
    """Of [tokens, width] each, the first token at position ``first`` of its prompt; what is not finite, or not of one
    shape, is infinitely far apart."""
    if ours.shape != theirs.shape:
        return PointError(point, math.inf, math.inf, prompt, first)
    off = (ours - theirs).double()
    ratio = off.norm(dim=-1) / theirs.double().norm(dim=-1)
    ratio[off.abs().amax(-1) == 0] = 0.0  # zeros on both sides
    ratio.nan_to_num_(math.inf, math.inf)
    beyond = (ratio > bound).nonzero()
    at = int(beyond[0]) if len(beyond) else int(ratio.argmax())
    largest = float(off.abs().max().nan_to_num(math.inf, math.inf))
    return PointError(point, largest, float(ratio.max()), prompt, first + at)


def worse(a: PointError, b: PointError, bound: float) -> PointError:
    """Both in one: of where they part the first is told."""
    where = a if a.relative > bound or a.relative >= b.relative else b
    largest, relative = max(a.largest, b.largest), max(a.relative, b.relative)
    return PointError(a.point, largest, relative, where.prompt, where.position)


def explained(found: DtypeComparison) -> str:
    """What stands at the first place that parts."""
    first = found.beyond[0].point
    layer, operation = split(first)
    if layer is not None:
        parted = {e.point for e in found.beyond}
        if operation == Q and {layer_point(layer, one) for one in (K, V)} <= parted:
            return BEFORE_QKV
        if operation == ATTENTION and not {layer_point(layer, one) for one in (Q_ROPE, K_ROPE)} <= found.errors.keys():
            return INSIDE
    return SAYS.get(operation, operation)
