"""Predict the length of an answer by the mean length of the tenant's earlier answers to prompts of similar length."""

from __future__ import annotations

import numpy as np

MEMORY = 64  # number of answers of a kind that count; older ones lose their weight


class Lengths:
    """The mean output length of each *kind* of request: (tenant, number of bits of the prompt's length).

    The engine tells a policy when requests arrive, but not when they end.  Each call of ``order`` has the running
    sequences, so a sequence that ran at one call and is missing at the next has ended, unless it was preempted.  Its
    length is the one that was seen last.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self.mean: dict[tuple[int, int], tuple[float, int]] = {}  # kind -> (tokens, answers seen)
        # id of a running sequence -> (kind, number of tokens that it has generated)
        self.running: dict[int, tuple[tuple[int, int], int]] = {}

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
        """Forget all running sequences, because their lengths are unknown after a step without a call of ``order``."""
        self.running.clear()

    def predict(self, tenant: np.ndarray, prompt: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
        """Return the expected output tokens of requests, float64 [n], at most ``otherwise``.

        ``otherwise`` is also the value for kinds with too few answers.
        """
        out = otherwise.astype(np.float64)
        for j, (t, p) in enumerate(zip(tenant.tolist(), prompt.tolist(), strict=True)):
            mean, n = self.mean.get((t, p.bit_length()), (0.0, 0))
            if n >= self.least:
                out[j] = min(out[j], mean)
        return out
