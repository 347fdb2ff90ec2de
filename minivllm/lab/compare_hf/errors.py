"""Errors of the engine's values against transformers' values, and the first value of the model with too large an error.

A point is a named value that is compared, such as the output of a layer's attention.
"""

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
    DESCRIPTIONS,
    FUSED,
    INSIDE,
    K_ROPE,
    LOGITS,
    Q_ROPE,
    TOKEN,
    K,
    Q,
    V,
    layer_point,
    place,
    split,
)

# accepted relative error of a correct operation; the dtypes round to 2**-24, 2**-11 and 2**-8
BOUNDS = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


Values = Mapping[str, Tensor]  # by point


@dataclass(frozen=True)
class EngineRun:
    """The engine's tokens and values of one prompt.

    ``ids`` are the computed tokens: the prompt's, and the generated ones without the last.  ``values`` are float32
    [tokens, width] by point; the point ``logits`` has the last rows only.  ``fused`` holds the first logits of a run
    with fused kernels (taps of layers make the engine run their operations separately).
    """

    ids: list[int]
    generated: list[int]
    values: dict[str, Tensor]
    fused: Tensor | None = None

    @property
    def drawn(self) -> int:
        """Return the position of the token whose logits gave the first generated token."""
        return len(self.ids) - len(self.generated)


@dataclass(frozen=True)
class PointError:
    """The error of one point over all tokens of all prompts.

    ``largest`` is the largest absolute difference.  ``relative`` is the largest ratio of a token's difference to
    transformers' value (Euclidean norms).  ``prompt`` and ``position`` give the first token beyond the bound, or the
    token of the largest ratio if none is.  Both count from 0.
    """

    point: str
    largest: float
    relative: float
    prompt: int
    position: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, with None for an infinite number."""
        found = asdict(self)
        for name, value in found.items():
            if value == math.inf:
                found[name] = None
        return found


@dataclass
class TokenTally:
    """Counts of greedy tokens, compared with the best of transformers' logits after the same preceding tokens."""

    count: int = 0
    same: int = 0
    ties: int = 0  # number of other tokens whose logit is below the best one by less than the bound
    # the differing tokens: (index of the prompt, index of the token, engine's token id, transformers' token id,
    # difference of their logits)
    differing: list[tuple[int, int, int, int, float]] = field(default_factory=list)


@dataclass
class DtypeComparison:
    """The comparison in one dtype.

    Both kinds of errors are stored by point (a named tensor of the model).  For ``errors`` transformers computes each
    operation from the engine's values.  For ``along`` it computes the whole model from the prompt.  ``missing`` maps an
    operation without compared values to the reason.
    """

    dtype: str
    bound: float
    errors: dict[str, PointError] = field(default_factory=dict)
    along: dict[str, PointError] = field(default_factory=dict)
    tokens: TokenTally = field(default_factory=TokenTally)
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def beyond(self) -> list[PointError]:
        """Return the errors beyond their bounds, in the order of computation."""
        return [e for e in self._sorted_errors() if not e.relative <= self.bound_of(e.point)]

    def _sorted_errors(self) -> list[PointError]:
        return sorted(self.errors.values(), key=lambda e: place(e.point))

    def bound_of(self, point: str) -> float:
        """Return the bound of a point's relative error.

        The logits of fused layers contain the rounding of the whole model.  Their bound is therefore at least twice
        the logits' error in transformers' own pass from the prompt, which contains it too.
        """
        logits = self.along.get(LOGITS)
        if point == FUSED and logits is not None and logits.relative < math.inf:
            return max(self.bound, 2 * logits.relative)
        return self.bound

    @property
    def within(self) -> bool:
        """Return whether every error is within its bound and every token is transformers' best, or nearly so."""
        return not self.beyond and not self.tokens.differing

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        beyond = self.beyond
        first = None
        if beyond:
            first = beyond[0].as_dict() | {"where": explain(self)}
        errors = []
        for error in self._sorted_errors():
            fields = error.as_dict()
            along = self.along.get(error.point)
            fields["along"] = None if along is None else along.as_dict()["relative"]
            errors.append(fields)
        found: dict[str, Any] = {"dtype": self.dtype, "bound": self.bound, "within": self.within}
        found["first"] = first
        found["errors"] = errors
        found["tokens"] = asdict(self.tokens)
        found["not_compared"] = self.missing
        return found

    def take(self, number: int, run: EngineRun, own: Values, plain: Values) -> None:
        """Add the values of prompt ``number``.

        ``own`` are transformers' values with the engine's values as inputs.  ``plain`` are the values of transformers'
        own pass from the prompt.
        """
        for theirs, errors in ((own, self.errors), (plain, self.along)):
            for point in run.values.keys() & theirs.keys():
                ours = run.values[point]
                n = len(ours)
                error = measure(point, ours, theirs[point][-n:], self.bound, number, len(run.ids) - n)
                self._add(errors, error)
        if LOGITS in run.values:
            logits = run.values[LOGITS]
            generated = torch.tensor(run.generated)[:, None]
            chosen = logits[-len(generated) :].gather(1, generated)
            best = logits.amax(-1, keepdim=True)
            error = measure(TOKEN, chosen, best, self.bound, number, run.drawn)
            self._add(self.errors, error)
            if run.fused is not None:
                separate = logits[: len(run.fused)]
                error = measure(FUSED, run.fused, separate, self.bound, number, run.drawn)
                self._add(self.errors, error)
        self._judge_tokens(number, run, plain[LOGITS])

    def _add(self, errors: dict[str, PointError], new: PointError) -> None:
        """Merge a prompt's error with the error of earlier prompts at the same point."""
        before = errors.get(new.point)
        if before is not None:
            new = worse(before, new, self.bound)
        errors[new.point] = new

    def _judge_tokens(self, number: int, run: EngineRun, logits: Tensor) -> None:
        """Count the greedy tokens of prompt ``number`` that are the best of transformers' logits."""
        tally = self.tokens
        rows = logits[-len(run.generated) :]
        for i, (token, row) in enumerate(zip(run.generated, rows, strict=True)):
            tally.count += 1
            best = int(row.argmax())
            margin = float(row[best] - row[token])
            if token == best:
                tally.same += 1
            elif margin <= self.bound * float(row.abs().max()):
                tally.ties += 1
            else:
                tally.differing.append((number, i, token, best, margin))


def measure(point: str, ours: Tensor, theirs: Tensor, bound: float, prompt: int, first: int = 0) -> PointError:
    """Return the error of ``ours`` against ``theirs``, both [tokens, width].

    ``first`` is the position of their first row in the prompt.  The error is infinite for tensors of different shapes
    and for values that are not finite.
    """
    if ours.shape != theirs.shape:
        return PointError(point, math.inf, math.inf, prompt, first)
    off = (ours - theirs).double()
    size = off.abs()
    ratio = off.norm(dim=-1) / theirs.double().norm(dim=-1)
    ratio[size.amax(-1) == 0] = 0.0  # both values are 0, so their error is 0
    ratio.nan_to_num_(math.inf, math.inf)
    beyond = (ratio > bound).nonzero()
    row = int(beyond[0] if len(beyond) else ratio.argmax())
    largest = size.max().nan_to_num(math.inf, math.inf)
    return PointError(point, float(largest), float(ratio.max()), prompt, first + row)


def worse(a: PointError, b: PointError, bound: float) -> PointError:
    """Merge the errors of an earlier prompt ``a`` and a later prompt ``b``.

    The position is that of the first error beyond the bound, else that of the larger one.
    """
    where = b
    if a.relative > bound or a.relative >= b.relative:
        where = a
    largest = max(a.largest, b.largest)
    relative = max(a.relative, b.relative)
    return PointError(a.point, largest, relative, where.prompt, where.position)


def explain(found: DtypeComparison) -> str:
    """Return a description of the operations that may be wrong at the first point beyond its bound."""
    first = found.beyond[0].point
    layer, operation = split(first)
    if layer is not None:
        differing = {e.point for e in found.beyond}
        others = {layer_point(layer, K), layer_point(layer, V)}
        if operation == Q and others <= differing:
            return BEFORE_QKV
        rotated = {layer_point(layer, Q_ROPE), layer_point(layer, K_ROPE)}
        if operation == ATTENTION and not rotated <= found.errors.keys():
            return INSIDE
    return DESCRIPTIONS.get(operation, operation)
