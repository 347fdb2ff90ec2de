"""The gated delta rule in torch against its definition in float64, over steps that cut, draft, fold and copy rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minivllm.core.interfaces.decoder import GatedDelta
from minivllm.core.interfaces.states import COPIES, UNUSABLE, StepStates
from minivllm.device.layers import delta_net

SPEC = GatedDelta(2, 4, 8, 6, 4, 1e-6)
SIZES = (SPEC.key_heads, SPEC.value_heads, SPEC.key_dim, SPEC.value_dim)
TAPS, PLACES = SPEC.width - 1, 8  # so up to 4 drafts


def by_definition(x, ab, weight, rates, dt_bias):
    """Return (outputs, states behind each token) of one sequence, a token at a time in float64."""
    x, ab, weight, rates, dt_bias = (t.double() for t in (x, ab, weight, rates, dt_bias))
    keys, heads = SPEC.key_heads * SPEC.key_dim, SPEC.value_heads
    state = torch.zeros(heads, SPEC.key_dim, SPEC.value_dim, dtype=torch.float64)
    outputs, states = [], []
    for t in range(len(x)):
        mixed = F.silu(sum(x[t - lag] * weight[:, TAPS - lag] for lag in range(SPEC.width) if t >= lag))
        q, k, v = mixed.split([keys, keys, heads * SPEC.value_dim])
        q, k = (part.view(-1, SPEC.key_dim).repeat_interleave(2, 0) for part in (q, k))
        q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        b, a = ab[t].split(heads)
        for h in range(heads):
            state[h] = state[h] * torch.exp(-rates[h] * F.softplus(a[h] + dt_bias[h]))
            error = v.view(heads, -1)[h] - state[h].T @ k[h]
            state[h] = state[h] + torch.outer(k[h], error * torch.sigmoid(b[h]))
        outputs.append(torch.stack([state[h].T @ q[h] for h in range(heads)]) / SPEC.key_dim**0.5)
        states.append(state.clone())
    return torch.stack(outputs), torch.stack(states)


class Memory:
    """States of some rows, and the tokens that each covers."""

    def __init__(self, rows: int) -> None:
        recurrent, self.valid = SPEC.state(), [0] * rows
        self.tensors = {}
        for tensor in recurrent.tensors:
            shape = (PLACES, *tensor.shape) if tensor.ring else tensor.shape
            self.tensors[tensor.name] = torch.full((rows, *shape), torch.nan)


def run(memory, weights, rows, saves=()):
    """Compute ``rows``: (state, inputs, first position, tokens, whether all but the first are drafts); the outputs."""
    counts = torch.tensor([0, *(n for _, _, _, n, _ in rows)]).cumsum(0).int()
    behind = [start - memory.valid[at] for at, _, start, _, _ in rows]
    save_at, save_to = torch.full((len(rows), COPIES), -1), torch.zeros(len(rows), COPIES, dtype=torch.int64)
    for row, which, position, to in saves:
        save_at[row, which], save_to[row, which] = position, to
        memory.valid[to] = position
    step = StepStates(
        torch.tensor([at for at, *_ in rows]),
        torch.tensor([start for _, _, start, _, _ in rows]).int(),
        torch.tensor(behind).int(),
        counts,
        torch.tensor([drafts for *_, drafts in rows]),
        save_at.int(),
        save_to,
        lambda: None,
    )
    x, ab = (torch.cat([inputs[i][start : start + n] for _, inputs, start, n, _ in rows]) for i in (0, 1))
    out = delta_net.scan(x, ab, *weights, memory.tensors, SIZES, step)
    for at, _, start, n, drafts in rows:
        memory.valid[at] = start if drafts else start + n
    return out.split([n for _, _, _, n, _ in rows])


def weights_and_inputs(sequences, length):
    torch.manual_seed(sequences + length)
    weights = (torch.randn(SPEC.channels, SPEC.width), torch.rand(SPEC.value_heads), torch.randn(SPEC.value_heads))
    inputs = [(torch.randn(length, SPEC.channels), torch.randn(length, 2 * SPEC.value_heads)) for _ in range(sequences)]
    return weights, inputs, [by_definition(*given, *weights) for given in inputs]


def near(got, want):
    torch.testing.assert_close(got, want.float(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cuts", [(30,), (1,) * 30, (7, 1, 2, 1, 19), (3, 3, 24)])
def test_outputs_are_those_of_the_definition_in_whatever_chunks_a_sequence_comes(cuts):
    weights, inputs, wants = weights_and_inputs(2, 30)
    memory, start = Memory(2), 0
    for n in cuts:
        got = run(memory, weights, [(i, inputs[i], start, n, False) for i in (0, 1)])
        for i in (0, 1):
            near(got[i], wants[i][0][start : start + n])
            near(memory.tensors["state"][i], wants[i][1][start + n - 1])
        start += n


@pytest.mark.parametrize("accepted", [1, 2, 3, 5])
def test_rejected_drafts_leave_no_trace_in_a_state(accepted):
    weights, inputs, wants = weights_and_inputs(1, 20)
    wrong = tuple(part.clone() for part in inputs[0])
    for part in wrong:
        part[6 + accepted :] = torch.randn_like(part[6 + accepted :])
    memory = Memory(1)
    run(memory, weights, [(0, inputs[0], 0, 6, False)])
    got = run(memory, weights, [(0, wrong, 6, 5, True)])[0]
    near(got[:accepted], wants[0][0][6 : 6 + accepted])
    start = 6 + accepted
    got = run(memory, weights, [(0, inputs[0], start, 3, True)])[0]  # folds the accepted ones
    near(got, wants[0][0][start : start + 3])
    got = run(memory, weights, [(0, inputs[0], start + 2, 4, False)])[0]
    near(got, wants[0][0][start + 2 : start + 6])
    near(memory.tensors["state"][0], wants[0][1][start + 5])


@pytest.mark.parametrize("position", [4, 5, 9, 10])
def test_a_copy_goes_on_as_the_row_that_it_was_made_of(position):
    weights, inputs, wants = weights_and_inputs(1, 20)
    memory = Memory(2)
    run(memory, weights, [(0, inputs[0], 0, 3, False)])
    run(memory, weights, [(0, inputs[0], 3, 7, False)], saves=[(0, 1, position, 1)])
    run(memory, weights, [(0, inputs[0], 10, 6, False)])
    got = run(memory, weights, [(1, inputs[0], position, 8, False)])[0]
    near(got, wants[0][0][position : position + 8])


def test_a_state_that_is_not_the_rows_gives_nan_and_no_tokens():
    weights, inputs, _ = weights_and_inputs(2, 8)
    memory = Memory(2)
    run(memory, weights, [(0, inputs[0], 0, 4, False), (1, inputs[1], 0, 4, False)])
    memory.valid[0] = 4 - UNUSABLE  # the row begins before the state
    got = run(memory, weights, [(0, inputs[0], 4, 4, False), (1, inputs[1], 4, 4, False)])
    assert got[0].isnan().all() and not got[1].isnan().any()


def test_tokens_of_no_row_get_zeros():
    weights, inputs, _ = weights_and_inputs(1, 4)
    memory = Memory(1)
    step = StepStates(
        torch.tensor([0]),
        torch.tensor([0]).int(),
        torch.tensor([0]).int(),
        torch.tensor([0, 2]).int(),
        torch.tensor([False]),
        torch.full((1, COPIES), -1).int(),
        torch.zeros(1, COPIES, dtype=torch.int64),
        lambda: None,
    )
    out = delta_net.scan(*inputs[0], *weights, memory.tensors, SIZES, step)
    assert not out[2:].any() and out[:2].any()
