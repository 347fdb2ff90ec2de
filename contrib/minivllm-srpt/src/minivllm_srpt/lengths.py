"""How long answers will be: what a tenant's earlier answers to prompts of about that length were."""

from __future__ import annotations

import numpy as np

MEMORY = 64  # answers of a kind that count: an older one fades


class Lengths:
    """Mean output length of each *kind* of request: (tenant, bits of the prompt's length).

    The engine tells a policy when requests come, not when they end.  But each ``order`` shows what runs, so a sequence
    that ran in one and is not there in the next has ended, unless it was preempted, with the length last seen.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.mean: dict[tuple[int, int], tuple[float, int]] = {}  # kind -> (tokens, answers seen)
        self.running: dict[int, tuple[tuple[int, int], int]] = {}  # id -> (kind, tokens it has generated)

    def watch(self, ids: np.ndarray, tenant: np.ndarray, prompt: np.ndarray, known: np.ndarray) -> None:
        """Record the running sequences; a sequence that ran at the last call and is missing has ended."""
        now = {
            i: ((t, p.bit_length()), k - p)
            for i, t, p, k in zip(ids.tolist(), tenant.tolist(), prompt.tolist(), known.tolist(), strict=True)
        }
        for i, (kind, length) in self.running.items():
            if i not in now and length > 0:
                mean, n = self.mean.get(kind, (0.0, 0))
                n = min(n + 1, MEMORY)
                self.mean[kind] = (mean + (length - mean) / n, n)
        self.running = now

    def forget(self, seq: int) -> None:
        """Forget a sequence that leaves without having ended."""
        self.running.pop(seq, None)

    def lose_sight(self) -> None:
        """Forget all running sequences, because their lengths at unseen steps are unknown."""
        self.running.clear()

    def predict(self, tenant: np.ndarray, prompt: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """Return expected output tokens f64 [n], at most ``otherwise``, which is also the value without enough data."""
        out = otherwise.astype(np.float64)
        for j, (t, p) in enumerate(zip(tenant.tolist(), prompt.tolist(), strict=True)):
            mean, n = self.mean.get((t, p.bit_length()), (0.0, 0))
            if n >= self.least:
                out[j] = min(out[j], mean)
        return out
