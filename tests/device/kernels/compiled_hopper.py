"""Compile the Hopper kernel of prefill attention for compute capability 9.0 on a machine without one: a line each.

Run by test_hopper_prefill.py without Triton's interpreter.  A line has the shape, the bytes of shared memory, the
products and the copies by TMA in the code, the registers, and the bytes of registers that were spilled.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.core.interfaces.attention import AttnLayer, AttnSpec
from minivllm.plugins.attention import hopper_choice, triton_hopper
from minivllm.plugins.attention.triton_prefill import Tiles
from minivllm.testing.attention_world import make_meta

SHAPES = {
    "128": (AttnSpec(32, 8, 128, 128), 64),
    "64": (AttnSpec(14, 2, 64, 64, window=2000, sinks=True), 16),
    "256": (AttnSpec(8, 4, 256, 256, softcap=50.0), 256),
}


def spilled(ptx: str) -> tuple[int, int]:
    """Return the registers and the bytes of spilled registers in PTX code."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "a.ptx")
        file.write_text(ptx)
        command = [str(ptxas), "-v", "--gpu-name=sm_90a", str(file), "-o", str(Path(folder, "a.cubin"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, stores = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    return int(registers[1]), int(stores[1]) if stores else 0


def compile_shape(spec: AttnSpec, block: int, dtype: torch.dtype) -> str:
    cache = {name: torch.empty(8, block, spec.kv_heads, spec.dim_qk, dtype=dtype) for name in "kv"}
    layer = AttnLayer(0, 0, spec, cache, sinks=torch.empty(spec.heads))
    meta = make_meta([(0, 40, 40)], np.ones((1, 2, 9), np.int32), block)
    q = torch.empty(40, spec.heads, spec.dim_qk, dtype=dtype)
    i32 = torch.zeros(4, dtype=torch.int32)
    tiles = Tiles(i32, i32, hopper_choice.LINES, i32)
    triton_hopper.attend(
        layer, q, meta, q.clone(), torch.empty(40, spec.heads), tiles, hopper_choice.VARIANTS[spec.dim_qk]
    )
    made = MADE[-1]
    ptx = made.asm["ptx"]
    counts = ptx.count("wgmma.mma_async"), ptx.count("cp.async.bulk.tensor")
    return " ".join(map(str, (made.metadata.shared, *counts, *spilled(ptx))))


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    triton_hopper.multiprocessors = lambda device: 132
    triton_hopper._attend = Compiled(triton_hopper._attend)
    for name in sys.argv[1:] or SHAPES:
        for dtype in (torch.bfloat16, torch.float16) if name == "64" else (torch.bfloat16,):
            print(name, compile_shape(*SHAPES[name], dtype), flush=True)


if __name__ == "__main__":
    main()
