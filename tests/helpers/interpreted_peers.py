"""Checks of the kernels between GPUs on a CPU, where ranks are processes, regions are mapped files, and Triton
interprets.

    python interpreted_peers.py FOLDER RANK SIZE       one rank, which compares its results with float64 sums

``tests/device/kernels/test_peer_kernels.py`` starts the ranks.  On GPUs ``benchmarks/peer_sums.py`` makes the same
checks and measures times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from minivllm.device.layers import peer_memory
from minivllm.device.layers.peer_memory import PeerMemory, RegionLayout

# Programs that wait for each other take turns on few cores, so there are only as many as the checks need.
peer_memory.BLOCKS, peer_memory.MOVERS, peer_memory.PLACE, peer_memory.TILES, peer_memory.DRAWN = (
    2,
    3,
    512,
    ((1, 64), (3, 128)),
    4,
)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-2}


def drawn_for(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ways(size: int) -> Iterator[str]:
    yield from ("words", "flags")
    if size in (2, 4):
        yield "split"


def near(got: Tensor, want: Tensor) -> bool:
    tolerance = TOLERANCE[got.dtype]
    return torch.allclose(got.double(), want, atol=tolerance, rtol=tolerance)


def check_sums(rank: int, memory: PeerMemory, dtype: torch.dtype, way: str, tokens: int, dim: int) -> None:
    parts = [drawn_for(r + 7 * tokens, tokens, dim).to(dtype) for r in range(memory.size)]
    total, mine = sum(part.double() for part in parts), parts[rank].clone()
    memory._sum(mine, mine, way=way)
    met, left = memory.reached()
    assert met == left > 0, (way, tokens, dim)
    assert near(mine, total), ("sum", way, tokens, dim, dtype)
    before, weight, bias = (
        drawn_for(9 + i, *shape).to(dtype) for i, shape in enumerate(((tokens, dim), (dim,), (dim,)))
    )
    for added, scale in ((None, weight), (bias, weight.float())):
        stream, normed = before.clone(), torch.full_like(before, torch.nan)
        memory._sum(parts[rank], normed, added, stream, SimpleNamespace(weight=scale, eps=1e-5), way=way)
        want = total + before.double() + (0 if added is None else bias.double())
        norm = want * torch.rsqrt(want.square().mean(1, keepdim=True) + 1e-5) * weight.double()
        assert near(stream, want) and near(normed, norm), ("norm", way, tokens, dim, dtype)


def check_gather(
    rank: int, memory: PeerMemory, dtype: torch.dtype, rows: int, columns: int, vocab: int, tile: int
) -> None:
    parts = [drawn_for(r + tile, rows, columns).to(dtype) for r in range(memory.size)]
    found = memory.gather(parts[rank], vocab, tile)
    met, left = memory.reached()
    assert met == left
    if rank:
        assert found is None
    else:
        assert torch.equal(found, torch.cat(parts, 1)[:, :vocab]), (rows, columns, vocab, dtype)


def check_drawn(rank: int, memory: PeerMemory, seed: int, rows: int = 9, slots: int = 12, length: int = 5) -> None:
    rng = torch.Generator().manual_seed(seed)
    state = SimpleNamespace(
        tokens=torch.zeros(slots, length, dtype=torch.int32),
        known=torch.zeros(slots, dtype=torch.int64),
        stopped=torch.zeros(slots, dtype=torch.bool),
    )
    at, position = torch.randperm(slots, generator=rng)[:rows], torch.randint(0, length, (rows,), generator=rng)
    token = torch.randint(-5, 2**31 - 1, (rows,), generator=rng).int()
    known, stopped = torch.randint(0, 2**31 - 1, (rows,), generator=rng), torch.rand(rows, generator=rng) < 0.5
    if rank == 0:
        state.tokens[at, position], state.known[at], state.stopped[at] = token, known, stopped
    memory.share_drawn(at, position, state)
    assert torch.equal(state.tokens[at, position], token)
    assert torch.equal(state.known[at], known) and torch.equal(state.stopped[at], stopped)


def main(folder: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    regions = [
        torch.from_file(f"{folder}/{r}", shared=True, size=RegionLayout(size).bytes, dtype=torch.uint8)
        for r in range(size)
    ]
    memory = PeerMemory(rank, torch.tensor([region.data_ptr() for region in regions]), regions)
    for dtype in (torch.float32, torch.float16):  # the interpreter truncates bfloat16 instead of rounding it
        for way in ways(size):
            check_sums(rank, memory, dtype, way, 3, 48)
        check_sums(rank, memory, dtype, "flags", 7, 16)  # more rows than programs, so a meeting handles several
        check_sums(rank, memory, dtype, "words", 3, 2)  # a row has fewer words than there are ranks
        for rows, columns, vocab in ((3, 40, 40 * size), (2, 150, 150 * size - 3), (1, 31, 31 * size - 1)):
            for tile in (0, 128, 32, 64):  # places are the same for every earlier move
                check_gather(rank, memory, dtype, rows, columns, vocab, tile)
    for seed in range(3):  # uses both places, and one of them again
        check_drawn(rank, memory, seed)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
