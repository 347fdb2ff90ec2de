"""Sums and moves between GPUs are those of a float64 reference; on a CPU, with a process for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
ROOT = Path(__file__).parents[3]
HERE = ROOT / "tests" / "helpers"


def regions(folder: Path, size: int) -> None:
    """Create a file of zeros for each rank."""
    from minivllm.device.layers.peer_memory import RegionLayout

    for rank in range(size):
        with open(folder / str(rank), "wb") as file:
            file.truncate(RegionLayout(size).bytes)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_get_the_sums_norms_logits_and_tokens_of_all(size, tmp_path):
    regions(tmp_path, size)
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
    command = [sys.executable, str(HERE / "interpreted_peers.py"), str(tmp_path)]
    running = [
        subprocess.Popen([*command, str(rank), str(size)], env=environ, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    try:
        errors = [one.communicate(timeout=1200)[1] for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [0] * size, "\n".join(errors)[-4000:]


def test_parts_of_a_region_lie_apart_and_begin_where_vectors_can_be_read():
    from minivllm.device.layers.peer_memory import RegionLayout

    for size in range(2, 9):
        layout = RegionLayout(size)
        parts = [value for name, value in vars(layout).items() if name not in ("size", "bytes")]
        assert parts == sorted(set(parts)) and parts[0] == 0 and layout.bytes > parts[-1]
        assert all(at % 4096 == 0 for at in parts)


def test_the_tile_of_a_gather_goes_by_rows_alone_and_fits_its_place(monkeypatch):
    from minivllm.device.layers import peer_memory

    assert len(peer_memory.TILES) <= 2, "a tile between is compiled nowhere before a draw is captured"
    assert all(peer_memory.PLACE % 16 == 0 and tile & (tile - 1) == 0 for _, tile in peer_memory.TILES)
    monkeypatch.setattr(peer_memory, "TILES", ((1, 64), (32, 256), (64, 512)))
    assert [peer_memory.tile_of(rows) for rows in (0, 1, 31, 32, 63, 64, 9999)] == [64, 64, 64, 256, 256, 512, 512]


def test_the_way_of_a_sum_goes_by_rows_and_bytes_alone_and_few_rows_go_by_words():
    from minivllm.device.layers.peer_memory import PeerMemory

    for size in (2, 4, 8):
        memory = PeerMemory(0, torch.zeros(size, dtype=torch.int64))
        other = PeerMemory(size - 1, torch.zeros(size, dtype=torch.int64))
        assert memory.way(1, 8192) == "words" and memory.way(4096, 8192) != "words"
        assert all(memory.way(t, b) == other.way(t, b) for t in (1, 8, 33, 256, 16384) for b in (64, 8192, 32768))
    assert not memory.takes(torch.zeros(2, 3, dtype=torch.float16)), "a word has two numbers"
    assert not memory.takes(torch.zeros(2, 64, dtype=torch.float64))
    assert not memory.takes(torch.zeros(2, 1 << 20))
