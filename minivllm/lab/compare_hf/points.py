"""The points whose values are compared: the engine's tap points (named values of a model that users can read), and q
and k behind their norms and rotary embedding.

The ``token`` and ``fused`` points compare the engine with itself (see ``DESCRIPTIONS``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

Q, K, V = "q", "k", "v"
Q_NORM, K_NORM, Q_ROPE, K_ROPE = "q_norm", "k_norm", "q_rope", "k_rope"
INPUT, ATTENTION, ROUTER, MLP, RESIDUAL = "input", "attention", "router", "mlp", "residual"
EMBEDDING, NORM, LOGITS, TOKEN, FUSED = "embedding", "norm", "logits", "token", "fused"
# points of a layer in the order of their computation
OPERATIONS = (INPUT, Q, K, V, Q_NORM, K_NORM, Q_ROPE, K_ROPE, ATTENTION, ROUTER, MLP, RESIDUAL)
# These points cannot be tapped: q and k are computed again with the weights of the engine's model.
DERIVED = (
    Q_NORM,
    K_NORM,
    Q_ROPE,
    K_ROPE,
)
# point after a norm -> point before it; a model without the norm has equal values at both
NORM_OF = {Q_NORM: Q, K_NORM: K}
_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")

# first differing point -> description of the operations since the preceding points, one of which is wrong
DESCRIPTIONS = {
    EMBEDDING: "the embedding: its table, scale or learned positions",
    INPUT: "the input of the layer",
    Q: "the projection of q",
    K: "the projection of k",
    V: "the projection of v",
    Q_NORM: "the norm of q: weight, eps, or the dimensions that it normalizes",
    K_NORM: "the norm of k: weight, eps, or the dimensions that it normalizes",
    Q_ROPE: "the rotary embedding of q",
    K_ROPE: "the rotary embedding of k",
    ATTENTION: "attention: back end, window, softmax scale, cap, output projection, norm or multiplier behind it",
    ROUTER: "the logits of the router: norm before it, weight or bias",
    MLP: "the MLP or the experts: norm before it, choice, gate, up, activation, down, norm or multiplier behind it",
    RESIDUAL: "the sum of the residual stream",
    NORM: "the final norm",
    LOGITS: "the head: weight, scale or cap",
    FUSED: "the fused kernels: without taps, layers run fused and give other logits than their separate operations",
    TOKEN: "the choice of the token: it is not the best of the engine's own logits",
}
BEFORE_QKV = "the norm before attention, or its projections: q, k and v differ together"
INSIDE = (
    "attention from the projections on: norms of q and k, rotary embedding, back end, output projection; or the layer "
    "with a state in its place"
)


def layer_point(layer: int, operation: str) -> str:
    """Return the name of the compared tensor of an operation in a layer, such as "layers.3.mlp"."""
    return f"layers.{layer}.{operation}"


def split(point: str) -> tuple[int | None, str]:
    """Return the layer and the operation in the name of a compared tensor; the layer is None for a tensor outside the
    layers.
    """
    match = _LAYER.fullmatch(point)
    if match is None:
        return None, point
    return int(match[1]), match[2]


def place(point: str) -> tuple[int, int]:
    """Return a sort key that puts the names of compared tensors in the order of their computation."""
    layer, operation = split(point)
    if layer is not None:
        return layer, OPERATIONS.index(operation) if operation in OPERATIONS else len(OPERATIONS)
    behind_layers = (NORM, LOGITS, TOKEN, FUSED)
    return (1 << 30, behind_layers.index(operation)) if operation in behind_layers else (-1, 0)


def layers_of(points: Iterable[str]) -> int:
    """Return the number of layers to which the compared tensors with these names belong."""
    layers = [layer for layer, _ in map(split, points) if layer is not None]
    return 1 + max(layers, default=-1)
