"""Check a client's token ids against the model's vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise RequestError(f"{field}: token id {wrong} is not in the vocabulary: expected 0 to {vocab - 1}", field)
    return ids.astype(np.int64)
