"""Estimated times of mixed steps, from which ``graphs`` chooses between a capture and separate launches.

    separate launches    the longer of launch_ms and the step's own time
    a capture            the step's own time + padding * token_ms

A step's own time is tokens * token_ms + pairs * pair_ms.  A pair is a query token and a key that it attends to.  The
time of the products is measured on the device when the engine starts, and the host's time of the launches too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from minivllm.core.interfaces.attention import AttnLayer
    from minivllm.core.interfaces.plan import StepPlan

# Separate launches cost no time if the device computes a step this many times as long as the host launches it.  In this
# time the host also plans the next step and publishes the last one.
HIDDEN = 1.25
# Keys and values of one byte are copied as numbers of 16 bits in separate launches of long rows, but not in captures.
# Attention then takes this many times as long (``plugins/attention/triton_widen.py``).
NARROW = 2.2
GUESSED_LAUNCH_MS = 30.0  # ``launch_ms`` before any measurement, as of a model of 28 layers on the host of an H200
GUESSED_FLOPS_MS = 375e9  # operations that a device computes in a millisecond: half of the bfloat16 peak of an H100


@dataclass(frozen=True)
class StepCosts:
    """Times from which the duration of a mixed step (rows of several tokens) is estimated, in milliseconds."""

    launch_ms: float  # milliseconds in which the host launches the kernels of a step separately
    token_ms: float  # milliseconds that the matrix products of all layers take for each token
    pair_ms: float = 0.0  # milliseconds that attention of all layers takes for each (query, key) pair
    narrow: float = 1.0  # attention in a capture takes this many times as long as in separate launches

    @classmethod
    def guessed(cls, token_flops: float) -> StepCosts:
        """Return estimated costs, before any measurement, for a model with ``token_flops`` operations for each
        token."""
        return cls(GUESSED_LAUNCH_MS, token_flops / GUESSED_FLOPS_MS)

    def saved_ms(self, tokens: int, pairs: float) -> float:
        """Return the milliseconds by which a step runs faster in a capture without padding than as separate launches.

        The result is negative if the slower attention of captures costs more than the launches.
        """
        attention = pairs * self.pair_ms
        own = tokens * self.token_ms + attention
        return max(HIDDEN * self.launch_ms - own, 0.0) - attention * (self.narrow - 1.0)

    def padding_ms(self, tokens: int, size: int) -> float:
        """Return the milliseconds that padding costs when a step of ``tokens`` tokens runs in a capture of ``size``
        tokens."""
        return (size - tokens) * self.token_ms

    def most_tokens(self) -> int:
        """Return the number of tokens from which on the device computes a step longer than the host launches it."""
        return int(HIDDEN * self.launch_ms / max(self.token_ms, 1e-9))


def pairs_of(plan: StepPlan) -> float:
    """Return the number of pairs of a query token and a key that it attends to, in all rows of a step."""
    q_len = plan.q_len.astype(np.float64)
    return float(q_len @ (plan.computed + (q_len + 1.0) / 2.0))


def pair_flops(layers: Iterable[AttnLayer]) -> float:
    """Return the operations of attention for a (query, key) pair, summed over layers.

    Layers with a window are left out, because they read few keys.
    """
    specs = (layer.spec for layer in layers if layer.spec.window is None)
    return float(sum(2 * (spec.dim_qk + spec.dim_v) * spec.heads for spec in specs))
