"""The predictor seam (plug-in interface): the expected length of an answer, and the expected time of a step.

    new request ──► output_tokens ──► ``QueueView.predicted_out`` of scheduling policies
    ended request ─► ended             (the true length, to learn from)
    finished step ─► stepped           (its work and time, to learn from)
    policy ────────► SchedulerContext.step_ms ──► step_ms

A prediction changes the order of requests, and never a token.  The engine, replays and simulations call the same class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

API = (1, 0)


@dataclass(frozen=True)
class PredictorContext:
    """The arguments with which the engine constructs a predictor."""

    max_model_len: int  # largest number of tokens of a sequence
    max_num_seqs: int
    max_num_batched_tokens: int
    seed: int = 0  # the engine's seed


@dataclass(frozen=True)
class RequestFacts:
    """Facts about a request whose answer length a predictor predicts."""

    prompt: np.ndarray  # i32 [n] token ids; it must not be changed
    max_out: int  # largest possible number of tokens of the answer
    # number that stands for the client: the owner of an API key on a server, else the tenant
    client: int
    number: int  # index of the request since the start of the engine
    arrival: float  # time of arrival, in seconds on the engine's clock
    expected: int | None = None  # the client's ``expected_tokens``
    session: int = 0  # number that stands for the session (``session.SessionTurn``), 0 for none
    # True number of tokens of the answer, in simulations of a trace; None otherwise.
    truth: int | None = None


@dataclass(frozen=True)
class StepWork:
    """The work of a step: rows that decode, tokens of prompts, and tokens in the KV cache that its rows read."""

    decode_rows: int
    prompt_tokens: int
    context: int = 0


class Predictor(ABC):
    """Predicts the output tokens of requests and the time of steps.

    The engine makes all calls on its own thread, so each should take less than 100 microseconds.  If a call raises or
    returns no positive finite number, the request is planned as without a predictor, and ``stats()["predictor"]`` has
    the error."""

    def __init__(self, options: Any, ctx: PredictorContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def output_tokens(self, request: RequestFacts) -> float | None:
        """Return the expected number of output tokens of one sequence of a new request, None if it is unknown.

        The engine limits it to 1 .. ``max_out``."""

    def ended(self, request: RequestFacts, tokens: int, cut: bool) -> None:  # noqa: B027  (optional)
        """Receive a request that ended, with the number of tokens of its longest sequence.

        ``cut`` means that the answer would have been longer, because its limit ended it.  Requests that failed or were
        aborted are not passed."""

    def step_ms(self, work: StepWork) -> float | None:
        """Return the expected milliseconds of a step, None if they are unknown."""
        return None

    def stepped(self, work: StepWork, ms: float) -> None:  # noqa: B027  (optional)
        """Receive the rows and tokens of a finished step, and its milliseconds.

        Steps without a measured time are not passed."""

    def figures(self) -> Mapping[str, float]:
        """Return the predictor's own counters, with the same rules as ``SchedulerPolicy.figures``."""
        return {}
