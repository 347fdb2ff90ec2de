"""The values that a request has read at points of the model, as arrays, for results and for the server's frames."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minivllm.core.interfaces.taps import LOGITS

if TYPE_CHECKING:
    from minivllm.core.engine.request import Request, Seq


def values_of(seq: Seq, tokens: int | None = None) -> dict[str, np.ndarray] | None:
    """Return the values that a sequence has read, f32 [positions, width] by point.  None if its request reads nothing.

    ``tokens`` limits the result to the values of so many generated tokens.
    """
    taps = seq.request.tapped
    parts = parts_of(seq, tokens)
    if taps is None or parts is None:
        return None
    return {name: _joined(parts[name], width) for name, width in taps.read.values()}


def _joined(parts: TapParts, width: int) -> np.ndarray:
    """Return the parts as one array.  It is a copy if there are several parts, or if a branch shares one."""
    if not parts.shared and len(parts.own) == 1:
        return parts.own[0]
    return np.concatenate([np.empty((0, width), np.float32), *parts.shared, *parts.own])


class TapParts(NamedTuple):
    """Array views f32 [n, width], in order: first those that a branch shares with the first sequence, then its own."""

    shared: list[np.ndarray]
    own: list[np.ndarray]


def parts_of(seq: Seq, tokens: int | None = None) -> dict[str, TapParts] | None:
    """Return the same as ``values_of`` without copies, because the values of a long prompt are large and all branches
    share them."""
    request = seq.request
    own = seq.tap_values
    head = request.sequences[0].tap_values
    taps = request.tapped
    if taps is None or not taps.read:
        return None
    found = {}
    for number, (name, _) in taps.read.items():
        shared: list[np.ndarray] = []
        most = sys.maxsize
        if name == LOGITS:
            shared = _first(_scored(request), sys.maxsize)
            if tokens is not None:
                most = sum(map(len, shared)) + tokens
        else:
            if tokens is not None:
                most = len(request.prompt) + tokens - 1
            if own is not None and own.first and head is not None:  # a branch
                shared = _first([head.parts[number].rows], min(own.first, most))
        rest = [] if own is None or number not in own.parts else [own.parts[number].rows]
        found[name] = TapParts(shared, _first(rest, most - sum(map(len, shared))))
    return found


def _first(parts: Iterable[np.ndarray], most: int) -> list[np.ndarray]:
    """Return the first ``most`` rows of the parts, without empty parts."""
    found = []
    for part in parts:
        if most <= 0:
            break
        if len(part):
            found.append(part[:most])
            most -= len(part)
    return found


def _scored(request: Request) -> list[np.ndarray]:
    """Return the logits at the tokens of a scored prompt, except the last token.  They are those of the branch that has
    the most."""
    parts = [seq.tap_values.scored for seq in request.sequences if seq.tap_values is not None]
    return max(parts, key=lambda rows: sum(map(len, rows)), default=[])
