"""One rank that makes collective calls, for ``tests/device/test_collectives.py``, and prints its results as JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from minivllm.device.layers.communicator import LostRank, ProcessGroup

SHAPES = {"small": (1, 5), "odd": (7, 33), "large": (64, 1000)}
SECONDS = 30.0  # seconds of a wait for another rank, at most
DTYPES = ("float32", "bfloat16")


def input_of(rank: int, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    """Return the tensor that a rank contributes."""
    made = torch.Generator().manual_seed(100 * rank + shape[0])
    return torch.randn(shape, generator=made).to(getattr(torch, dtype))


def bits(x: torch.Tensor) -> list[list[float]]:
    return x.cpu().double().tolist()


def results(group: ProcessGroup, device: str) -> dict:
    """Make each call on each shape and dtype."""
    found: dict = {"sums": {}, "columns": {}}
    for name, shape in SHAPES.items():
        for dtype in DTYPES:
            x = input_of(group.rank, shape, dtype).to(device)
            group.all_reduce(x)
            found["sums"][f"{name} {dtype}"] = bits(x)
    # the first row alone must have the same bits in its sum as within the tensor
    row = input_of(group.rank, SHAPES["odd"], "float32")[:1].clone().to(device)
    group.all_reduce(row)
    found["row"] = bits(row)
    columns = group.gather(input_of(group.rank, SHAPES["odd"], "float32").to(device), 70)
    found["gathered"] = None if columns is None else bits(columns)
    sent = torch.full((4,), group.rank + 1, dtype=torch.int64, device=device)
    group.broadcast(sent)
    found["broadcast"] = sent.tolist()
    found["all"] = group.all_gather([group.rank, 10 * group.rank, -1])
    found["least"] = [bool(one) for one in group.least([True, group.rank != 1])]
    found["calls"] = group.calls
    return found


def main() -> None:
    rank, size, device, store, ends = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
    if device == "cuda":
        torch.cuda.set_device(rank)
    group = ProcessGroup(rank, size, device)
    group.join(store, SECONDS)
    found = results(group, device)
    if ends == "1":
        if rank == size - 1:
            print(json.dumps(found), flush=True)
            os._exit(0)  # end without leaving the group
        begin = time.monotonic()
        try:
            for _ in range(2):
                group.all_reduce(torch.ones(3, 3, device=device))
        except LostRank as error:
            found["lost"] = str(error)
        found["seconds"] = time.monotonic() - begin
    else:
        group.leave()
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
