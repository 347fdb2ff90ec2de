"""The values that are compared: tap points of the engine, and what is worked out between projection and attention."""

from __future__ import annotations

import re
from collections.abc import Iterable

Q, K, V = "q", "k", "v"
Q_NORM, K_NORM, Q_ROPE, K_ROPE = "q_norm", "k_norm", "q_rope", "k_rope"
INPUT, ATTENTION, ROUTER, MLP, RESIDUAL = "input", "attention", "router", "mlp", "residual"
EMBEDDING, NORM, LOGITS, TOKEN, FUSED = "embedding", "norm", "logits", "token", "fused"
# of a layer, in the order of their computation
OPERATIONS = (INPUT, Q, K, V, Q_NORM, K_NORM, Q_ROPE, K_ROPE, ATTENTION, ROUTER, MLP, RESIDUAL)
DERIVED = (Q_NORM, K_NORM, Q_ROPE, K_ROPE)  # no tap points: computed of q and k with the weights of the engine's model
NORM_OF = {Q_NORM: Q, K_NORM: K}  # a model without such a norm has the same values at both
_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")

# what stands between a point and those before it, whose values both sides share
SAYS = {
    EMBEDDING: "the embedding: its table, scale or learned positions",
    INPUT: "what the layer is given",
    Q: "the projection of q",
    K: "the projection of k",
    V: "the projection of v",
    Q_NORM: "the norm of q: weight, eps, or what it goes over",
    K_NORM: "the norm of k: weight, eps, or what it goes over",
    Q_ROPE: "the rotary embedding of q",
    K_ROPE: "the rotary embedding of k",
    ATTENTION: "attention: back end, window, softmax scale, cap, output projection, norm or multiplier behind it",
    ROUTER: "the logits of the router: norm before it, weight or bias",
    MLP: "the MLP or the experts: norm before it, choice, gate, up, activation, down, norm or multiplier behind it",
    RESIDUAL: "the sum of the residual stream",
    NORM: "the final norm",
    LOGITS: "the head: weight, scale or cap",
    FUSED: "the fused kernels: layers that run as they do without taps give other logits than by their parts",
    TOKEN: "the choice of the token: it is not the best of the engine's own logits",
}
BEFORE_QKV = "the norm before attention, or its projections: q, k and v part together"
INSIDE = "attention from the projections on: norms of q and k, rotary embedding, back end, output projection"


def layer_point(layer: int, operation: str) -> str:
    return f"layers.{layer}.{operation}"


def split(point: str) -> tuple[int | None, str]:
    """(layer or None, operation)."""
    found = _LAYER.fullmatch(point)
    return (int(found[1]), found[2]) if found else (None, point)


def place(point: str) -> tuple[int, int]:
    """By which points are put in the order of their computation."""
    layer, operation = split(point)
    if layer is None:
        ends = (NORM, LOGITS, TOKEN, FUSED)
        return (1 << 30, ends.index(operation)) if operation in ends else (-1, 0)
    return layer, OPERATIONS.index(operation) if operation in OPERATIONS else len(OPERATIONS)


def layers_of(points: Iterable[str]) -> int:
    """How many layers the points are of."""
    return 1 + max((layer for layer, _ in map(split, points) if layer is not None), default=-1)
