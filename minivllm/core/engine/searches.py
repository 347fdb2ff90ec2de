"""The beam search of a request after a step: call its strategy, and end the request with its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from minivllm.core.external_calls import call_foreign
from minivllm.core.interfaces.finish import Finish
from minivllm.errors import EngineDeadError, describe_error

from .beams import Kept, unwind

if TYPE_CHECKING:
    from minivllm.core.interfaces.finish import FinishReason

    from .beams import Beams
    from .planner import Planner
    from .publisher import Publisher
    from .request import Request, Seq


class SearchEngine(Protocol):
    """The attributes of an engine that a beam search uses after a step, and at its end."""

    planner: Planner
    publisher: Publisher
    dead: str | None

    def fail_all(self, message: str) -> None: ...
    def close(
        self, seq: Seq, reason: FinishReason, stop_reason: int | str | None, error: str | None
    ) -> None: ...


def advance(engine: SearchEngine, beams: Beams) -> None:
    """Call the strategy of a beam search after a step, when all live beams have their candidates, and store or apply
    its decisions."""
    s = engine.planner.slots
    request = beams.request

    def generated(beam: int) -> list[int]:
        slot = beams.seqs[beam].slot
        return s.tokens[slot, len(request.prompt) : s.known[slot]].tolist()

    try:
        step = engine.planner.seams.run("strategy", beams.advance, generated)
    except Exception as e:
        # If the strategy, or the client's stop strings, raise, only this request ends.
        finish_beams(
            engine,
            request,
            Finish("error"),
            f"strategy {type(request.strategy).__name__}: {describe_error(e, request.strategy)}",
        )
        return
    engine.publisher.tokens += len(step.append) + step.outputs
    if step.done:
        finish_beams(engine, request, None, None)
    else:
        engine.planner.searches.append(beams)


def finish_beams(
    engine: SearchEngine, request: Request, cut: Finish | None, error: str | None
) -> None:
    """End a request that has beams.  All beams leave their slots, and the outputs of the search are stored in the first
    sequences of the request.

    ``cut`` is the reason if the request ends before its strategy is done, else None; ``error`` is the message of a
    failure or None."""
    beams = request.beams
    if request.done:
        return
    try:
        outputs = call_foreign(beams.outputs, cut)
    except Exception as e:
        cut = Finish("error")
        outputs = [Kept(None, None, cut)]
        error = (
            error
            or f"strategy {type(request.strategy).__name__}: {describe_error(e, request.strategy)}"
        )
    if beams in engine.planner.searches:
        engine.planner.searches.remove(beams)
    try:
        for seq in beams.seqs if not engine.dead else ():
            engine.planner.end(seq)
    # the evictor plug-in failed, so the state of the blocks is uncertain
    except EngineDeadError as e:
        engine.fail_all(str(e))
        return
    beams.given = len(outputs)
    if cut is not None:
        outputs = [out._replace(finish=cut) for out in outputs]
    for seq, out in zip(beams.seqs, outputs, strict=False):
        error = _hand_over(request, seq, out) or error
    for seq, out in zip(
        beams.seqs, outputs + outputs[-1:] * (beams.width - len(outputs)), strict=True
    ):
        finish = out.finish if error is None else Finish("error")
        engine.close(seq, finish.reason, finish.stop, error)


def _hand_over(request: Request, seq: Seq, out: Kept) -> str | None:
    """Store an output of a beam search in a sequence of the answer, and send it to the client's callback ``sink``.

    Return the error message if the sink raises, else None."""
    ids, seq.logprobs = unwind(out.last)
    seq.tokens = np.append(request.prompt, np.array(ids, np.int32))
    seq.known = len(seq.tokens)
    seq.emitted = len(ids)
    seq.score = out.score
    seq.cumulative_logprob = sum(lp.chosen for lp in seq.logprobs)
    try:
        if request.sink is not None:
            call_foreign(request.sink, seq, ids, out.finish)
    except Exception as e:
        request.sink = None
        return f"what receives its tokens failed: {describe_error(e)}"
    return None
