"""Steps of separate launches before the first request, which compile and load their kernels.

Their rows are in the spare slot, which counts as ended.  So no token is accepted, and keys and values are written to
the null block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.interfaces.plan import StepPlan
from minivllm.core.interfaces.sampling import Draw
from minivllm.errors import describe_error

from . import step
from .calls import SeparateCalls
from .running import Running

if TYPE_CHECKING:
    from .runner import Runner


def launch_once(runner: Runner, tokens: int, draws: bool) -> list[str]:
    """Run a step of one prompt of ``tokens`` tokens as separate launches, and with ``draws`` draw a token.

    Return a sentence for each exception of a plug-in; requests that use the plug-in will report it as their error."""
    if runner.state.recurrent is not None:
        return []  # the trial step would change recurrent states
    try:
        plan, hidden = separate_step(runner, np.array([tokens], np.int32))
        return _draw(runner, plan, hidden) if draws else []
    except BaseException as e:
        return [f"a long step was not tried before the first request: {describe_error(as_exception(e))}"]


def separate_step(runner: Runner, q_len: np.ndarray) -> tuple[StepPlan, Tensor]:
    """Run the layers of a step as separate launches; return its plan and the hidden states [R, H] of its rows.

    ``q_len`` i32 [R] are the tokens of its rows, which all begin in the spare slot at position 0."""
    rows = len(q_len)
    slots = np.full(rows, runner.wiring.max_num_seqs, np.int32)
    before = np.zeros(rows, np.int32)
    plan = StepPlan(0, slots, q_len, computed=before, samples=np.arange(rows, dtype=np.int32))
    read = runner.read(plan)
    ends = np.cumsum(q_len)
    last = runner.state.to(ends - 1).long()
    selects = runner.selects_tokens(read)
    return plan, step.forward(runner.model, runner.backend, read, GraphKey(), last, selects)


def _draw(runner: Runner, plan: StepPlan, hidden: Tensor) -> list[str]:
    """Draw the token of a step of the spare slot from ``hidden`` [1, H]; return a sentence for each exception."""
    running = Running(plan)
    calls = SeparateCalls(runner.chain, runner.wiring, runner.own_models, running, None, {})
    step.sample(calls, runner.state, runner.model, hidden)
    runner.seams.take()  # discard the measured times of this step, which include the compilation of kernels
    return [f"{error.plugin} failed in a step before the first request: {error.message}" for error in running.errors]


def draw_once(runner: Runner, variant: int) -> list[str]:
    """Draw once from float32 logits, so that the kernels of the sampler are compiled for the bits ``variant``.

    Steps of separate launches always use float32 logits.  Return a sentence if the sampler raises; requests that use it
    will report the error."""
    state = runner.state
    slots = torch.full((1,), runner.wiring.max_num_seqs, dtype=torch.int64, device=runner.device)
    first = torch.zeros_like(slots)
    rows = step.rows_of(state, slots, first, 1)
    rows.variant = variant
    logits = torch.zeros(1, runner.worker.vocab_size, device=runner.device)
    out = Draw(torch.zeros_like(slots))
    columns = state.processors[-1].columns
    try:
        runner.sampler.draw(logits, rows, columns, out)
    except BaseException as e:
        return [f"the sampler was not tried before the first request: {describe_error(as_exception(e))}"]
    return []
