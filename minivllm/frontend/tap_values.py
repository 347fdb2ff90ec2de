"""The values that a request has read at tap points (named tensors) of the model, as arrays, for results and for the
server's frames."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minivllm.core.interfaces.routes import RouteParams, count_routes, smallest
from minivllm.core.interfaces.taps import LOGITS
from minivllm.runtime.text.outputs import KeptTokens

if TYPE_CHECKING:
    from minivllm.core.engine.request import Request, Seq


def values_of(seq: Seq, tokens: int | None = None) -> dict[str, np.ndarray] | None:
    """Return the values that a sequence has read, f32 [positions, width] by point, or None if its request has no
    reading taps.

    ``tokens`` limits the result to the values of this number of generated tokens.
    """
    taps = seq.request.tapped
    points = {tap.point for tap in seq.request.taps if tap.read}
    parts = parts_of(seq, tokens)
    if taps is None or parts is None or not points:
        return None
    return {name: _joined(parts[name], width) for name, width in taps.read.values() if name in points}


def routes_of(seq: Seq, tokens: int | None = None) -> np.ndarray | None:
    """Return the expert routes of a sequence, uint8 or int16 [positions, layers, k], None if its request reads none.

    ``tokens`` is the number of generated tokens whose routes are returned.
    """
    routes = seq.request.tapped and seq.request.tapped.routes
    parts = parts_of(seq, tokens)
    if not routes or not routes.reads or parts is None:
        return None
    names = [seq.request.tapped.read[layer.ids][0] for layer in routes.layers]  # type: ignore[union-attr]
    by_layer = [_joined(parts[name], routes.layers[0].chosen) for name in names]
    return smallest(np.stack(by_layer, axis=1), routes.layers[0].experts)


def route_outputs(seq: Seq, tokens: int | None = None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return (routes, counts) of a sequence.  Each is None if its request does not request it (see ``RouteParams``)."""
    params, found = seq.request.params.routes, routes_of(seq, tokens)
    if found is None or not isinstance(params, RouteParams):
        return None, None
    experts = seq.request.tapped.routes.layers[0].experts  # type: ignore[union-attr]
    return found if params.read else None, count_routes(found, experts) if params.counts else None


def kept_of(seq: Seq) -> list[KeptTokens]:
    """Return the tokens that stayed at each compression of a sequence, the first compression first."""
    before: dict[int, tuple[np.ndarray, int]] = {}  # layer -> positions [kv_heads, k], computed tokens
    found = []
    for computed, of_layers in sorted(seq.kept.items()):
        positions = {}
        for layer, chosen in of_layers.items():
            heads = len(chosen)
            stay, upto = before.get(layer, (np.empty((heads, 0), np.int32), 0))
            new = np.broadcast_to(np.arange(upto, computed, dtype=np.int32), (heads, computed - upto))
            stored = np.concatenate([stay, new], axis=1)
            positions[layer] = np.take_along_axis(stored, chosen, axis=1)
            before[layer] = positions[layer], computed
        found.append(KeptTokens(computed, positions))
    return found


def _joined(parts: TapParts, width: int) -> np.ndarray:
    """Return the parts as one array.  It is a copy if there are several parts, or if a branch shares one."""
    if not parts.shared and len(parts.own) == 1:
        return parts.own[0]
    return np.concatenate([np.empty((0, width), np.float32), *parts.shared, *parts.own])


class TapParts(NamedTuple):
    """Array views f32 [n, width], in order: the parts that a branch shares with the first sequence, then its
    own parts.
    """

    shared: list[np.ndarray]
    own: list[np.ndarray]


def parts_of(seq: Seq, tokens: int | None = None) -> dict[str, TapParts] | None:
    """Return for the name of each tap the values of ``values_of`` as views, None if the request reads none.

    They are not copied, because the values of a long prompt are large and all branches share them."""
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
    """Return the logits at the tokens of a scored prompt, except the last token.

    They are taken from the branch with the most of them.
    """
    parts = [seq.tap_values.scored for seq in request.sequences if seq.tap_values is not None]
    return max(parts, key=lambda rows: sum(map(len, rows)), default=[])
