"""Compile the kernel of products of many rows and their gate for compute capability 9.0 on a machine without one.

Run by test_gated_product.py without Triton's interpreter.  A line has the outputs and inputs, the bytes of shared
memory, the products and the copies by TMA in the code, the registers, the bytes of registers that were spilled, and
whether other numbers of rows have the same variant.
"""

from __future__ import annotations

import sys

import torch
from compiled_hopper import spilled
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.device.kernels import gated_product


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    gated_product.multiprocessors = lambda device: 132
    gated_product._multiply = Compiled(gated_product._multiply)
    for shape in sys.argv[1:]:
        n, k = map(int, shape.split("x"))
        weight = torch.empty(2 * n, k, dtype=torch.bfloat16)
        for rows in (128, 333, 2048):
            gated_product.multiply(torch.empty(rows, k, dtype=torch.bfloat16), weight)
        ptx = MADE[-1].asm["ptx"]
        counts = ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor")
        same = len({made.hash for made in MADE[-3:]}) == 1
        print(shape, MADE[-1].metadata.shared, *counts, *spilled(ptx), same)


if __name__ == "__main__":
    main()
