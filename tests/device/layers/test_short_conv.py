"""The gated short convolution in torch against its definition in float64, over steps that cut, draft and copy rows."""

from __future__ import annotations

import pytest
import torch

from minivllm.core.interfaces.states import COPIES, UNUSABLE, StepStates
from minivllm.device.layers.short_conv import convolve

CHANNELS, WIDTH, PLACES = 6, 4, 8  # so up to 4 drafts


def by_definition(mixed, weight, bias):
    """Return the outputs [T, channels] of one sequence."""
    b, c, x = mixed.double().chunk(3, dim=-1)
    u = b * x
    rows = []
    for t in range(len(u)):
        terms = [u[t - lag] * weight[:, WIDTH - 1 - lag].double() for lag in range(WIDTH) if t >= lag]
        rows.append(c[t] * (sum(terms) + bias.double()))
    return torch.stack(rows).float()


class Sequences:
    """Sequences with their inputs and outputs, and the states of their rows."""

    def __init__(self, count, length, states):
        torch.manual_seed(count + length)
        self.weight, self.bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
        self.inputs = [torch.randn(length, 3 * CHANNELS) for _ in range(count)]
        self.outputs = [by_definition(mixed, self.weight, self.bias) for mixed in self.inputs]
        self.ring = torch.full((states, PLACES, CHANNELS), torch.nan)
        self.valid = [0] * states

    def run(self, rows, saves=(), behind=()):
        """Compute ``rows``: (state, inputs, first position, tokens, whether all but the first are drafts)."""
        counts = torch.tensor([0, *(n for *_, n, _ in rows)]).cumsum(0).int()
        save_at, save_to = torch.full((len(rows), COPIES), -1), torch.zeros(len(rows), COPIES, dtype=torch.int64)
        for row, which, position, to in saves:
            save_at[row, which], save_to[row, which] = position, to
        gaps = [start - self.valid[at] for at, _, start, _, _ in rows]
        for row, gap in behind:
            gaps[row] = gap
        step = StepStates(
            torch.tensor([at for at, *_ in rows]),
            torch.tensor([start for _, _, start, _, _ in rows]).int(),
            torch.tensor(gaps).int(),
            counts,
            torch.tensor([drafts for *_, drafts in rows]),
            save_at.int(),
            save_to,
            lambda: None,
        )
        mixed = torch.cat([inputs[start : start + n] for _, inputs, start, n, _ in rows])
        out = convolve(mixed, self.weight, self.bias, self.ring, step)
        for at, _, start, n, drafts in rows:
            self.valid[at] = start if drafts else start + n
        return out.split([n for *_, n, _ in rows])


def near(got, want):
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cuts", [(30,), (1,) * 30, (7, 1, 2, 1, 19), (3, 3, 24)])
def test_outputs_are_those_of_the_definition_in_whatever_chunks_a_sequence_comes(cuts):
    case, start = Sequences(2, 30, 2), 0
    for n in cuts:
        got = case.run([(i, case.inputs[i], start, n, False) for i in (0, 1)])
        for i in (0, 1):
            near(got[i], case.outputs[i][start : start + n])
        start += n


def test_the_bits_of_a_row_do_not_depend_on_the_other_rows():
    alone, beside = Sequences(3, 30, 3), Sequences(3, 30, 3)
    for start, n in ((0, 11), (11, 1), (12, 9)):
        (want,) = alone.run([(1, alone.inputs[1], start, n, False)])
        _, got, _ = beside.run([(i, beside.inputs[i], start, n if i == 1 else 2 * i + 1, False) for i in (0, 1, 2)])
        assert torch.equal(got, want)


@pytest.mark.parametrize("accepted", [1, 2, 3, 5])
def test_rejected_drafts_leave_no_trace_in_a_state(accepted):
    case = Sequences(1, 20, 1)
    right, want = case.inputs[0], case.outputs[0]
    wrong = right.clone()
    wrong[6 + accepted :] = torch.randn_like(wrong[6 + accepted :])
    case.run([(0, right, 0, 6, False)])
    (got,) = case.run([(0, wrong, 6, 5, True)])
    near(got[:accepted], want[6 : 6 + accepted])
    start = 6 + accepted
    (got,) = case.run([(0, right, start, 3, True)])
    near(got, want[start : start + 3])
    (got,) = case.run([(0, right, start + 2, 4, False)])
    near(got, want[start + 2 : start + 6])


@pytest.mark.parametrize("position", [4, 5, 9, 10])
def test_a_copy_goes_on_as_the_row_that_it_was_made_of(position):
    case = Sequences(2, 20, 4)
    case.run([(0, case.inputs[0], 0, 3, False), (2, case.inputs[1], 0, 9, False)])
    case.run([(0, case.inputs[0], 3, 7, False), (2, case.inputs[1], 9, 1, False)], saves=[(0, 1, position, 1)])
    case.run([(0, case.inputs[0], 10, 6, False)])
    case.valid[1] = position
    (got,) = case.run([(1, case.inputs[0], position, 8, False)])
    near(got, case.outputs[0][position : position + 8])
    (got,) = case.run([(2, case.inputs[1], 10, 5, False)])
    near(got, case.outputs[1][10:15])
    assert case.ring[3].isnan().all(), "a state of no row was written"


def test_a_copy_of_the_tokens_that_drafts_became_is_made_a_step_later():
    case = Sequences(1, 20, 2)
    case.run([(0, case.inputs[0], 0, 6, False)])
    case.run([(0, case.inputs[0], 6, 4, True)], saves=[(0, 0, 8, 1)])
    assert case.ring[1].isnan().all(), "the copy was made of drafts"
    case.run([(0, case.inputs[0], 9, 1, False)], saves=[(0, 0, 8, 1)])
    case.valid[1] = 8
    (got,) = case.run([(1, case.inputs[0], 8, 6, False)])
    near(got, case.outputs[0][8:14])


def test_a_state_that_is_not_the_rows_gives_nan_and_no_tokens():
    case = Sequences(2, 8, 2)
    case.run([(i, case.inputs[i], 0, 4, False) for i in (0, 1)])
    got = case.run([(i, case.inputs[i], 4, 4, False) for i in (0, 1)], behind=[(0, UNUSABLE)])
    assert got[0].isnan().all() and not got[1].isnan().any()
