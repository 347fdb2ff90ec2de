"""Sampling on the host for a row whose request has its own Python functions on logits.

The device sends the row's logits after its own processors (``plan.StepPlan.host``).  The request's functions run in
order, and then the sampler of the config draws a token on the CPU.  It uses the noise of this position, so that
functions without effect leave the tokens unchanged.  The sampler's state of the row is kept here with the sequence, so
that preemption and forks do not change it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.core import checks
from minivllm.core.external_calls import call_foreign
from minivllm.core.interfaces.sampling import Draw, Row, Rows, Sampler
from minivllm.device.worker.state import ProcessorState
from minivllm.errors import RequestError, describe_error, shown

if TYPE_CHECKING:
    from minivllm.core.engine.request import Seq

FIELD = "logits_processors"


class HostDraw:
    """Callable ``draw(logits f32 [V], ids so far) -> token`` for one sequence.

    Functions take (output ids, logits) or (prompt ids, output ids, logits), and return the logits as a tensor or an
    array.  The logits are a float32 tensor [V], which a function may change.  The errors of functions are raised to the
    caller, as is ValueError for logits without a token to draw.
    """

    def __init__(self, seq: Seq, functions: Sequence[Callable[..., Any]], sampler: Sampler, row: Row | None) -> None:
        self.functions = [(f, _takes_prompt(f)) for f in functions]
        self.seq, self.sampler = seq, sampler
        self.prompt = len(seq.request.prompt)
        self.state = ProcessorState(sampler, 1, torch.device("cpu"))
        slot = np.zeros(1, np.int64)
        joined = {} if row is None else {0: row}
        self.state.join(slot, torch.from_numpy(slot), joined)

    def __call__(self, logits: np.ndarray, ids: Sequence[int]) -> int:
        x = torch.from_numpy(logits.astype(np.float32))  # a copy of the logits, because the functions may change it
        for function, takes_prompt in self.functions:
            arguments = [list(ids[self.prompt :]), x]
            if takes_prompt:
                arguments.insert(0, list(ids[: self.prompt]))
            x = _logits(function(*arguments), function, len(logits))
        if not x.amax().isfinite():
            raise ValueError("the functions left no token to draw: all logits are -inf, or one is NaN or +inf")
        try:
            return call_foreign(self._draw, x, ids)
        except Exception as e:
            name = type(self.sampler).__name__
            problem = describe_error(e, self.sampler)
            raise RuntimeError(f"sampler {name} failed on the host: {problem}") from e

    def _draw(self, x: torch.Tensor, ids: Sequence[int]) -> int:
        """Draw a token with the sampler from logits f32 [V], and return it."""
        one = lambda value: torch.tensor([value], dtype=torch.int64)  # noqa: E731
        tokens = torch.tensor([[*ids, 0]], dtype=torch.int32)
        seq = self.seq
        length = len(ids)
        slot, position, prompt = one(0), one(length), one(self.prompt)
        variant = int(self.state.variant[0])
        rows = Rows(slot, position, prompt, one(seq.seed), one(seq.sample), variant, tokens, length)
        out = Draw(torch.zeros(1, dtype=torch.int64))
        accepted = torch.ones(1, dtype=torch.int32)
        columns = self.state.columns
        with torch.inference_mode():
            self.sampler.draw(x[None], rows, columns, out)
            token = checks.whole(out.tokens[0], 0, len(x) - 1, "it drew token")
            self.sampler.commit(out.tokens[:, None], accepted, rows, columns)
        return token


def _takes_prompt(function: Callable[..., Any]) -> bool:
    """Return True if a function takes three arguments (with the prompt), False if it takes two.  RequestError for any
    other number."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Python has no signature for some builtin functions
        return False
    for count in (3, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    expected = "f(output ids, logits) or f(prompt ids, output ids, logits)"
    raise RequestError(f"{FIELD}: {shown(function)} takes {signature}: expected {expected}", FIELD)


def _logits(value: Any, function: Callable[..., Any], vocab: int) -> torch.Tensor:
    """Check the result ``value`` of a function, and return it as float32 [V].  TypeError or ValueError if it is not the
    logits of V tokens."""
    if not isinstance(value, (torch.Tensor, np.ndarray, list)):
        raise TypeError(f"{shown(function)} returned {type(value).__name__}; expected the logits")
    x = torch.as_tensor(value).detach()
    if x.dtype == torch.bool or x.is_complex():
        raise TypeError(f"{shown(function)} returned logits of {x.dtype}; expected numbers")
    x = x.to("cpu", torch.float32)
    if x.shape != (vocab,):
        shape = tuple(x.shape)
        raise ValueError(f"{shown(function)} returned logits of shape {shape}; expected ({vocab},)")
    return x
