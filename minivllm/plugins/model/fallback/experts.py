"""The products of a layer's experts where no kernel of the engine takes them: transformers' own functions.

torch's grouped product reads rows of 16 bytes.  Experts of another width are multiplied token by token, in pieces of a
bounded size: a slower path, which neither asks the host for values nor depends on them.
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

ALIGNED = 16  # bytes that each row of a grouped product's matrices is a multiple of
MOST_BYTES = 64 << 20  # of the weights that are copied for the tokens of one piece
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def register() -> None:
    """Make ``multiply`` an implementation of experts that transformers' models can name."""
    if NAME not in ALL_EXPERTS_FUNCTIONS.valid_keys():
        ALL_EXPERTS_FUNCTIONS.register(NAME, multiply)


def weights_of(module: Any) -> list[Tensor]:
    """Return the weights of all experts of a layer, each [experts, rows, columns]."""
    return [w for name in WEIGHTS if (w := getattr(module, name, None)) is not None]


def is_aligned(module: Any) -> bool:
    """Return whether torch's grouped product takes the weights of a layer's experts, by their widths in bytes."""
    widths = (size * w.element_size() for w in weights_of(module) for size in w.shape[1:])
    return all(width % ALIGNED == 0 for width in widths)


def multiply(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs [T, H], of x [T, H] and ids and weights [T, k]."""
    if is_aligned(module):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    of_one = max(w[0].numel() * w.element_size() for w in weights_of(module))
    rows = max(1, MOST_BYTES // (of_one * top_k_index.shape[-1]))
    pieces = zip(*(x.split(rows) for x in (hidden_states, top_k_index, top_k_weights)), strict=True)
    return torch.cat([batched_mm_experts_forward(module, *piece) for piece in pieces])
