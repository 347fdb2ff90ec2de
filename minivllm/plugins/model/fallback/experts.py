"""Products of a layer's experts by transformers' own functions, for experts that no kernel of the engine supports.

torch's grouped product needs rows that are multiples of 16 bytes.  Experts of another width are multiplied token by
token, in pieces of bounded size.  This path is slower.  It never waits for values on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    batched_mm_experts_forward,
    grouped_mm_experts_forward,
)

from .attend import NAME

ALIGNED = 16  # each row of a matrix of a grouped product must be a multiple of this number of bytes
MOST_BYTES = 64 << 20  # largest size in bytes of weights that are copied for the tokens of one piece
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def register() -> None:
    """Register ``multiply`` as an implementation of experts, so that transformers' models can select it."""
    if NAME not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(NAME, multiply)


def weights_of(module: Any) -> list[Tensor]:
    """Return the weights of all experts of a layer, each [experts, rows, columns]."""
    return [w for name in WEIGHTS if (w := getattr(module, name, None)) is not None]


def is_aligned(module: Any) -> bool:
    """Return whether torch's grouped product supports the widths of a layer's experts."""
    for weight in weights_of(module):
        for size in weight.shape[1:]:
            if size * weight.element_size() % ALIGNED:
                return False
    return True


def multiply(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum [T, H] of the outputs of the experts that were chosen for each token.

    ``hidden_states`` is [T, H]; ``top_k_index`` and ``top_k_weights`` [T, k] are the ids and weights of the chosen
    experts.
    """
    if is_aligned(module):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    expert_bytes = max(weight[0].numel() * weight.element_size() for weight in weights_of(module))
    token_bytes = expert_bytes * top_k_index.shape[-1]
    rows = max(1, MOST_BYTES // token_bytes)
    inputs = (hidden_states, top_k_index, top_k_weights)
    pieces = zip(*(x.split(rows) for x in inputs), strict=True)
    outputs = [batched_mm_experts_forward(module, *piece) for piece in pieces]
    return torch.cat(outputs)
