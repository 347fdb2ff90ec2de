"""The delta rule in C++ against the functions in torch, over steps that draft, fold and copy rows."""

from __future__ import annotations

import delta_rule_cases as checks
import pytest
import torch
from native_runs import each_isa, needs_library

from minivllm.device.native import recurrent

pytestmark = needs_library
__all__ = ["each_isa"]
torch.set_num_threads(1)
SHAPES = (*checks.SHAPES, (2, 4, 128, 128, 4), (1, 2, 48, 144, 4), (1, 1, 20, 7, 1))
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}


def native(x, ab, weight, rates, dt_bias, memory, sizes, step):
    layer = recurrent.delta_layer(recurrent.newest_first(weight), rates, dt_bias, memory, sizes)
    return recurrent.scan(layer, x, ab, step)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_states_rings_and_copies_are_those_of_torch(shape, dtype, each_isa):
    for seed in range(6):
        checks.check_scan("cpu", dtype, shape, seed, BOUNDS[dtype], native)


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_depend_on_neither_chunks_nor_neighbours_nor_threads(threads, each_isa):
    sizes, places = (2, 4, 24, 40), 6
    channels, heads = 2 * 2 * 24 + 4 * 40, 4
    torch.manual_seed(1)
    x, ab = torch.randn(30, channels), torch.randn(30, 2 * heads)
    weights = torch.randn(channels, 4), torch.rand(heads), torch.randn(heads)

    def outputs(cuts, neighbours):
        memory = {
            "state": torch.zeros(8, heads, 24, 40),
            "ring": torch.zeros(8, places, channels),
            "gates": torch.zeros(8, places, 2 * heads),
        }
        found, start = [], 0
        for n in cuts:
            counts = [n, *[2] * neighbours]
            rows = len(counts)
            step = checks.StepStates(
                torch.arange(rows),
                torch.tensor([start, *[0] * neighbours]).int(),
                torch.zeros(rows).int(),
                torch.tensor([0, *counts]).cumsum(0).int(),
                torch.zeros(rows, dtype=torch.bool),
                torch.full((rows, 2), -1).int(),
                torch.zeros(rows, 2, dtype=torch.int64),
                lambda: None,
            )
            more = torch.randn(2 * neighbours, channels), torch.randn(2 * neighbours, 2 * heads)
            inputs = torch.cat([x[start : start + n], more[0]]), torch.cat([ab[start : start + n], more[1]])
            found.append(native(*inputs, *weights, memory, sizes, step)[:n])
            start += n
        return torch.cat(found)

    before = torch.get_num_threads()
    whole = outputs([30], 0)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(outputs([1] * 30, 0), whole)
        assert torch.equal(outputs([7, 1, 15, 7], 3), whole)
    finally:
        torch.set_num_threads(before)
