"""Beam search on plain lists by transformers' rules, token by token, without a cache or a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np


def beam_search(
    logprobs: Callable[[list[int]], np.ndarray],
    prompt: Sequence[int],
    width: int,
    most: int,
    *,
    n: int = 1,
    penalty: float = 1.0,
    early: bool | str = False,
    eos: Collection[int] = (),
    min_tokens: int = 0,
) -> list[tuple[float, list[int]]]:
    """Return (score, tokens) of the ``n`` best outputs.

    ``logprobs(ids)`` are the log-probabilities of the token after ``ids``.
    """
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    outputs: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        grown = [
            (total + float(value), [*tokens, token])
            for total, tokens in beams
            for token, value in enumerate(logprobs([*prompt, *tokens]).astype(np.float64))
            if not (token in eos and length <= min_tokens)
        ]
        grown.sort(key=lambda one: -one[0])
        beams = []
        for rank, (total, tokens) in enumerate(grown):
            if tokens[-1] in eos or length == most:
                if rank < width:
                    outputs.append((total / length**penalty, tokens))
            elif len(beams) < width:
                beams.append((total, tokens))
        outputs = sorted(outputs, key=lambda one: -one[0])[:width]
        if not beams or (early is True and len(outputs) == width):
            break
        reach = most if early == "never" and penalty > 0 else length
        if len(outputs) == width and beams[0][0] / reach**penalty <= outputs[-1][0]:
            break
    return outputs[:n]
