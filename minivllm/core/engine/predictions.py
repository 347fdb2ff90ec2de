"""The calls of a predictor plug-in, which predicts the lengths of answers and the times of steps, and the errors of its
predictions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.predictor import (
    Predictor,
    PredictorContext,
    RequestFacts,
    StepWork,
)
from minivllm.core.interfaces.scheduler import SchedulerContext
from minivllm.errors import describe_error, shown

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.plan import StepPlan

    from .parts import EngineParts
    from .request import Request


class Predictions:
    """Calls the predictor plug-in of an engine.  ``run(seam, method, *args)`` calls a method of it and measures the
    time."""

    def __init__(self, predictor: Predictor, run: Callable[..., Any]) -> None:
        self.predictor = predictor
        self._run = run
        self.made = self.failed = self.number = 0
        self.error: str | None = None  # the last failure
        self.ended_requests = 0  # count of ended requests whose length was predicted
        # sum of |ln(predicted / true length)| over the ended requests with a prediction
        self.log_errors = 0.0
        own = type(predictor)
        self.learns_steps = own.stepped is not Predictor.stepped
        self.learns_lengths = own.ended is not Predictor.ended

    @classmethod
    def of(
        cls,
        parts: EngineParts,
        wiring: Wiring,
        run: Callable[..., Any],
    ) -> Predictions | None:
        """Return an object that calls the predictor plug-in of an engine, None if the engine has none."""
        if parts.predictor is None:
            return None
        sizes = wiring.max_model_len, wiring.max_num_seqs, wiring.max_num_batched_tokens
        made = cls(parts.predictor(PredictorContext(*sizes, wiring.seed)), run)
        parts.events.request_finished.subscribe(made.ended)
        return made

    def begin(self, request: Request) -> None:
        """Set the predicted number of output tokens of a new request (``predicted``), and the facts given to the
        predictor (``facts``)."""
        turn = request.turn
        request.facts = RequestFacts(
            request.prompt,
            request.most_out,
            request.tenant,
            self.number,
            request.arrival,
            request.params.expected_tokens,
            0 if turn is None else turn.session,
            request.truth,
        )
        self.number += 1
        found = self._predict("output_tokens", request.facts)
        if found is not None:
            request.predicted = int(min(max(round(found), 1), request.most_out))
            self.made += 1

    def ended(self, request: Request) -> None:
        """Report the true length of an ended request to the predictor plug-in, and count the error of its prediction.
        Requests that were aborted or failed are left out."""
        if request.facts is None or any(
            s.finish_reason not in ("stop", "length") for s in request.sequences
        ):
            return
        tokens = max(seq.known for seq in request.sequences) - len(request.prompt)
        if tokens < 1:
            return
        cut = request.truth is None and all(
            seq.finish_reason == "length" for seq in request.sequences
        )
        if request.predicted is not None and not cut:
            self.ended_requests += 1
            self.log_errors += abs(math.log(request.predicted / tokens))
        if self.learns_lengths:
            self._guarded(self.predictor.ended, request.facts, tokens, cut)

    def stepped(self, plan: StepPlan, ms: float) -> None:
        """Report the time of a finished step to the predictor; 0, NaN and infinity are no measured times."""
        if not self.learns_steps or not 0 < ms < math.inf or not len(plan.q_len):
            return
        decode = plan.q_len == 1
        rows = int(decode.sum())
        context = int((plan.computed + plan.q_len).sum())
        self._guarded(
            self.predictor.stepped, StepWork(rows, int(plan.q_len.sum()) - rows, context), ms
        )

    def step_ms(self, work: StepWork) -> float | None:
        """Return the expected milliseconds of a step, None if they are unknown."""
        return self._predict("step_ms", work)

    def _predict(self, method: str, argument: Any) -> float | None:
        """Return a positive finite number of the predictor, None if it has none or fails."""
        found = self._guarded(getattr(self.predictor, method), argument)
        if found is None:
            return None
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(found, (str, bytes)) or not 0 < number < math.inf:
            self._note(f"{method} returned {shown(found)}; expected a positive number, or None")
            return None
        return number

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a call of the predictor, or None if it raises."""
        try:
            return self._run("predictor", call, *args)
        except Exception as e:
            self._note(describe_error(e, self.predictor))
            return None

    def _note(self, error: str) -> None:
        self.failed += 1
        self.error = error

    def stats(self) -> dict[str, Any]:
        """Return counts of predictions and failures, and the mean of |ln(predicted / true length)|."""
        mean = self.log_errors / self.ended_requests if self.ended_requests else None
        return {
            "made": self.made,
            "failed": self.failed,
            "error": self.error,
            "mean_log_error": mean,
        }


def begin_prediction(predictions: Predictions | None, request: Request) -> None:
    """Predict the output tokens of a new request if there is a predictor."""
    if predictions is not None:
        predictions.begin(request)


def note_step(predictions: Predictions | None, plan: StepPlan, ms: float) -> None:
    """Report the time ``ms`` of a finished step to the predictor plug-in, if there is one."""
    if predictions is not None:
        predictions.stepped(plan, ms)


def scheduler_context(wiring: Wiring, predictions: Predictions | None) -> SchedulerContext:
    """Return the context of an engine's scheduling policy, with the times of steps if there are predictions."""
    sizes = wiring.max_num_seqs, wiring.max_num_batched_tokens, wiring.block
    if predictions is None:
        return SchedulerContext(*sizes)
    return SchedulerContext(*sizes, step_ms=predictions.step_ms)
