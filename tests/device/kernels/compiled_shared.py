"""The kernels of shared prefixes, compiled for a Hopper where none is.

Run by test_shared_kernels.py without Triton's interpreter.  It prints a line for each variant of the largest kernels:
its name and shape, and the bytes of registers that it spills."""

from __future__ import annotations

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
from minivllm.plugins.attention import triton_decode, triton_shared
from minivllm.plugins.kvformat.scaled import Fp8KV, Int8KV
from minivllm.testing.attention_world import make_meta

BLOCK, SLOTS, COLUMNS = 64, 513, 129


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def cache_of(spec: AttnSpec, name: str) -> dict[str, torch.Tensor]:
    if name == "bf16":
        shape = (1000, BLOCK, spec.kv_heads, spec.dim_qk)
        return {part: empty(*shape, dtype=torch.bfloat16) for part in "kv"}
    layout = {"fp8": Fp8KV, "int8": Int8KV}[name]().layout(spec, BLOCK)
    return {n: empty(1000, *t.shape, dtype=getattr(torch, t.dtype)) for n, t in layout.tensors.items()}


def spilled(ptx: str, name: str) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(file), "-o", str(file) + ".o"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    words = log.replace(",", " ").split()
    registers = int(words[words.index("registers") - 1])
    return registers, int(words[words.index("spill") - 2])


def run(rows: int, group: int, dim: int, fmt: str, tma: bool) -> None:
    """Compile all kernels of a decode step with shared prefixes."""
    spec = AttnSpec(8 * group, 8, dim, dim)
    layer = AttnLayer(0, 0, spec, cache_of(spec, fmt))
    meta = make_meta([(i, 1, 100) for i in range(rows)], np.ones((1, SLOTS, COLUMNS), np.int32), BLOCK)
    for name in ("slots", "kv_len", "q_len", "table"):
        setattr(meta, name, getattr(meta, name).to("meta"))
    q = empty(rows, spec.heads, dim, dtype=torch.bfloat16)
    triton_shared.by_tma = lambda *facts: tma
    shared = triton_shared.find_shared(spec, meta.kv_len[0], meta, meta.table[0], rows, False, False)
    columns = meta.kv_len[0], meta.q_len, meta.slots
    work = triton_decode.deal(spec, *columns, rows, 4096, False, False, shared.parts)
    triton_shared.attend_shared(layer, q, meta, shared)
    triton_decode.decode(layer, q, meta, torch.empty_like(q), None, work, True)


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    for module, names in (
        (triton_shared, ("_find", "_group", "_cut", "_shared")),
        (triton_decode, ("_deal", "_decode")),
    ):
        for name in (*names, *(("_merge",) if module is triton_decode else ())):
            setattr(module, name, Compiled(getattr(module, name)))
        module.pdl = lambda like: {"PDL": True, "launch_pdl": True}
    triton_decode.keep_room = lambda *facts: None
    shapes = [(rows, group, 128, "bf16", True) for rows in (16, 512) for group in (2, 4)]
    shapes += [(512, 4, 64, "bf16", False), (512, 2, 256, "bf16", False), (512, 4, 128, "fp8", False)]
    shapes += [(512, 4, 128, "int8", False), (512, 1, 128, "bf16", True), (512, 8, 128, "bf16", True)]
    done = 0
    for shape in shapes if len(sys.argv) < 2 else shapes[:4]:
        run(*shape)
        for made in MADE[done:]:
            if made.name in ("_shared", "_decode"):
                print(made.name, *shape, *spilled(made.asm["ptx"], made.name), made.metadata.shared, flush=True)
        done = len(MADE)


if __name__ == "__main__":
    main()
