"""Check a client's token ids against the model's vocabulary, and ban tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.errors import RequestError, shown


def token_ids(value: Any, vocab: int, field: str, most: int) -> np.ndarray:
    """Return 1 to ``most`` token ids as i64 [n].

    Raise RequestError, which names ``field``, unless all ids are whole numbers below ``vocab``, the width of the
    logits.
    """
    if not isinstance(value, (list, tuple, range, np.ndarray)):
        raise RequestError(f"{field}={shown(value)}: expected a list of token ids", field)
    if not 1 <= len(value) <= most:
        raise RequestError(f"{field}: {len(value)} token ids: expected 1 to {most}", field)
    try:
        ids = np.asarray(value)
    except ValueError:  # lists of unequal length
        ids = np.empty(0, object)
    whole = ids.ndim == 1 and ids.dtype.kind in "iu"
    if not isinstance(value, (range, np.ndarray)):
        whole = whole and not any(isinstance(i, (bool, np.bool_)) for i in value)  # numpy converts True to 1
    if not whole:
        raise RequestError(f"{field}={shown(value)}: expected whole numbers", field)
    low = int(ids.min())
    high = int(ids.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise RequestError(f"{field}: token id {wrong} is not in the vocabulary: expected 0 to {vocab - 1}", field)
    return ids.astype(np.int64)


def ban(logits: Tensor, tokens: Tensor, banned: Tensor) -> None:
    """Set the ``tokens`` [N, L] that are ``banned`` bool [N, L] to -inf in ``logits`` [N, V], in place.

    Bans are added rather than stored, so that other entries, which may be any number, add 0 to token 0.
    """
    push = torch.where(banned, float("-inf"), 0.0).to(logits.dtype)
    at = torch.where(banned, tokens, 0).long()
    logits.scatter_add_(1, at, push)
