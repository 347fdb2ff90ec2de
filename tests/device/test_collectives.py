"""The collective operations of ranks on their own: gloo on a CPU, NCCL where there are three GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from collective_ranks import DTYPES, SECONDS, SHAPES, bits, input_of

SIZE = 3
SCRIPT = Path(__file__).resolve().parents[1] / "helpers" / "collective_ranks.py"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def ranks(request, tmp_path_factory):
    """The results of each rank.  On a CPU, the last rank ends at last without a word to the others."""
    device = request.param
    if device == "cuda" and (not torch.cuda.is_available() or torch.cuda.device_count() < SIZE):
        pytest.skip(f"needs {SIZE} GPUs")
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ends = "1" if device == "cpu" else "0"
    started = []
    try:
        for rank in range(SIZE):
            argv = [sys.executable, str(SCRIPT), str(rank), str(SIZE), device, store, ends]
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env=environ))
        ended = [one.communicate(timeout=180) for one in started]
    finally:
        for one in started:
            one.kill()
    for (out, err), one in zip(ended, started, strict=True):
        assert one.returncode == 0, err[-2000:]
        assert out, err[-2000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_all_reduce_is_the_sum_with_the_same_bits_on_each_rank(ranks, name, dtype):
    expected = sum(input_of(rank, SHAPES[name], dtype).double() for rank in range(SIZE))
    found = [torch.tensor(rank["sums"][f"{name} {dtype}"]) for rank in ranks]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    near = {"float32": 1e-6, "bfloat16": 2e-2}[dtype]
    torch.testing.assert_close(found[0].double(), expected, atol=near, rtol=near)


@pytest.mark.slow
def test_the_sum_of_a_row_does_not_depend_on_the_other_rows(ranks):
    assert all(rank["row"][0] == rank["sums"]["odd float32"][0] for rank in ranks)


@pytest.mark.slow
def test_gather_puts_the_columns_side_by_side_on_rank_0_and_cuts_them(ranks):
    whole = torch.cat([input_of(rank, SHAPES["odd"], "float32") for rank in range(SIZE)], dim=1)
    assert ranks[0]["gathered"] == bits(whole[:, :70])
    assert ranks[1]["gathered"] is None and ranks[2]["gathered"] is None


@pytest.mark.slow
def test_broadcast_and_all_gather_reach_every_rank_in_the_order_of_the_ranks(ranks):
    for rank in ranks:
        assert rank["broadcast"] == [1, 1, 1, 1]
        assert rank["all"] == [[0, 0, -1], [1, 10, -1], [2, 20, -1]]
        assert rank["least"] == [True, False]
        assert rank["calls"] == ranks[0]["calls"] > 10


@pytest.mark.slow
def test_a_call_without_all_ranks_fails_by_the_timeout_and_is_named(ranks):
    if "seconds" not in ranks[0]:
        pytest.skip("the ranks have left together")
    for rank in ranks[:2]:
        assert "all_reduce number" in rank["lost"] and rank["seconds"] < 2 * SECONDS
