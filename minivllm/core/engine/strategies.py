"""The engine's calls of a decoding strategy: the branches of a new request, and the answer of a finished one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.core import checks
from minivllm.core.external_calls import call_foreign
from minivllm.core.interfaces.params import NAMES
from minivllm.core.interfaces.strategy import Branch, BranchEnd
from minivllm.errors import RequestError, describe_error

from .beams import Beams

if TYPE_CHECKING:
    from minivllm.core.interfaces.strategy import DecodingStrategy

    from .request import Request, Seq


def own_names(strategies: Sequence[tuple[str, DecodingStrategy]]) -> set[str]:
    """Return the names of request parameters (``SamplingParams.extra``) that at least one of the decoding strategies
    reads."""
    return set().union(*(made.reads for _, made in strategies)) - NAMES


def branches(strategies: Sequence[tuple[str, DecodingStrategy]], request: Request) -> list[Branch]:
    """Start the first strategy that accepts the request, and return the request's branches.  A request for an
    embedding has one branch and no strategy.  RequestError if no strategy accepts it, or if the strategy fails."""
    if request.pooling is not None:
        return [Branch(0)]
    made = None
    p = request.params
    requested = p.branching() | (set(p.extra) & own_names(strategies) if p.extra else set())
    try:
        able = [made for _, made in strategies if requested <= made.reads]
        made = next((made for made in able if call_foreign(made.takes, p)), None)
        for _, one in strategies if made is None else ():
            if one.reads & set(p.extra):
                # raises the error that explains why the strategy refuses the request
                call_foreign(one.start, p)
        if made is not None:
            request.strategy = made
            if made.mode == "stepwise":
                request.beams = Beams(
                    request, call_foreign(made.search, p, request.end - len(request.prompt))
                )
            request.topk = checks.whole(call_foreign(made.topk, p), -1, 2**31 - 1, "topk() gave")
            return call_foreign(
                lambda: checks.branches(made.start(p), p.width, made.mode == "stepwise")
            )
    except RequestError:
        raise
    except Exception as e:
        what = "a strategy" if made is None else type(made).__name__
        raise RequestError(f"{what} failed on this request: {describe_error(e, made)}") from e
    there = ", ".join(name for name, _ in strategies)
    field = min(requested, default="n")
    value = p.extra[field] if field in p.extra else getattr(p, field)
    raise RequestError(
        f"{field}={value}: none of the strategies in the config ({there}) takes it", field
    )


def answer(request: Request) -> list[Seq]:
    """Return the sequences of the answer, best first.

    If the strategy fails, all sequences receive its error and keep their order.
    """
    if request.strategy is None:
        return request.sequences
    if request.beams is not None:
        return request.sequences[: request.beams.given]
    ends = [
        BranchEnd(
            s.sample, s.known - len(request.prompt), s.cumulative_logprob, s.finish_reason or ""
        )
        for s in request.sequences
    ]
    by_sample = {s.sample: s for s in request.sequences}
    try:
        result = request.strategy.result
        p = request.params
        order = call_foreign(lambda: checks.answer(result(p, ends), by_sample, p.n))
        return [by_sample[i] for i in order]
    except Exception as e:
        for seq in request.sequences:
            error = (
                f"strategy {type(request.strategy).__name__}: {describe_error(e, request.strategy)}"
            )
            seq.finish_reason = "error"
            seq.stop_reason = None
            seq.error = seq.error or error
        return request.sequences[: request.params.n]
