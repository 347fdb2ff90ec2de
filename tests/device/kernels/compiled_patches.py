"""Compile the attention kernel of vision towers for compute capability 9.0 on a machine without one: a line each.

Run by test_patch_attention.py without Triton's interpreter.  A line has the size of the heads, the bytes of shared
memory, the products and the copies by TMA in the code, the registers, the bytes of registers that were spilled, and
the copies to uniform registers in each loop over key tiles without a mask.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from compiled_hopper import spilled
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.device.kernels import patch_attention


def copies_in_loops(cubin: bytes) -> list[int]:
    """Return the numbers of R2UR in the inner loops that have products and 64 powers of two, and no mask."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        nvdisasm = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        command = [str(nvdisasm), "-c", file.name]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    labels = {line.strip().rstrip(":"): i for i, line in enumerate(lines) if line.startswith(".L")}
    found = []
    for i, line in enumerate(lines):
        jump = re.search(r"BRA.*`\((\.L\w+)\)", line)
        body = "\n".join(lines[labels[jump[1]] : i]) if jump and labels.get(jump[1], i) < i else ""
        if "HGMMA" in body and body.count("MUFU.EX2") == 64 and "FSEL" not in body:
            found.append(body.count("R2UR"))
    return found


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    patch_attention.multiprocessors = lambda device: 132
    patch_attention._attend = Compiled(patch_attention._attend)
    for dim in map(int, sys.argv[1:]):
        for images, length in ((3, 300), (2, 1024)):
            qkv = torch.empty(images * length, 3, 16, dim, dtype=torch.bfloat16)
            patch_attention.attend(*qkv.unbind(1), length)
        ptx = MADE[-1].asm["ptx"]
        counts = ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor")
        same = MADE[-1].hash == MADE[-2].hash
        print(dim, MADE[-1].metadata.shared, *counts, *spilled(ptx), same, *copies_in_loops(MADE[-1].asm["cubin"]))


if __name__ == "__main__":
    main()
