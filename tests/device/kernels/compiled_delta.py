"""The kernels of the delta rule, compiled for a Hopper where none is, for steps of several numbers of rows and tokens.

Run by test_delta_rule_kernels.py without Triton's interpreter.  It prints a line for each kernel: its name, the number
of its variants, and the number of its products whose operand in registers has fewer than 64 columns beside it.  The
last line has the fused multiply-adds of ``_scan``, without and with ``batch_invariant``."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from compiled_loops import Hopper
from triton.runtime import driver

from minivllm.core.interfaces.states import COPIES, StepStates
from minivllm.device.kernels import delta_chunks, delta_rule

KEY_HEADS, HEADS, DIM, WIDTH = 16, 32, 128, 4
CHANNELS, INNER = (2 * KEY_HEADS + HEADS) * DIM, HEADS * DIM
FOUND: dict[str, dict[str, Any]] = defaultdict(dict)  # kernel -> hash of a variant -> the compiled kernel


class Compiled:
    """A stand-in for a kernel whose launches only compile it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.warmup, grid=grid)

    def warmup(self, *args: Any, grid: Any, **options: Any) -> None:
        made = self.kernel.warmup(*args, grid=grid, **options)
        FOUND[self.kernel.__name__][made.hash] = made


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def step_of(rows: int, tokens: int) -> StepStates:
    """Return the states of a step, without memory."""
    states = empty(rows, dtype=torch.int64)
    drafts = empty(rows, dtype=torch.bool)
    copies = empty(rows, COPIES, dtype=torch.int64)
    columns = (states, empty(rows), empty(rows), empty(rows + 1), drafts, empty(rows, COPIES), copies)
    step = StepStates(*columns, lambda: None)
    step.row = empty(tokens, dtype=torch.int64)
    step.longest = tokens - rows + 1
    return step


def compile_step(rows: int, tokens: int, invariant: bool = False) -> None:
    """Compile the kernels that a step runs."""
    half = torch.bfloat16
    both = empty(tokens, CHANNELS + INNER + 2 * HEADS, dtype=half)
    x, z, ab = both.split([CHANNELS, INNER, 2 * HEADS], dim=-1)
    wide = torch.float32
    weights = empty(CHANNELS, WIDTH, dtype=half), empty(HEADS, dtype=wide), empty(HEADS, dtype=wide)
    memory = {
        "ring": empty(9, WIDTH, CHANNELS, dtype=half),
        "gates": empty(9, WIDTH, 2 * HEADS, dtype=half),
        "state": empty(9, HEADS, DIM, DIM, dtype=wide),
    }
    sizes = (KEY_HEADS, HEADS, DIM, DIM)
    step = step_of(rows, tokens)
    delta_rule.mix(x, ab, z, weights, empty(DIM, dtype=half), 1e-6, memory, sizes, step, invariant)


def narrow(text: str) -> int:
    """Count the products of a kernel whose left operand is in registers and whose right one has under 64 columns."""
    found = re.findall(r"warp_group_dot .*: tensor<[^>]*>> \* !ttg\.memdesc<\d+x(\d+)x", text)
    return sum(int(columns) < 64 for columns in found)


def fused(invariant: bool) -> int:
    """Return the number of fused multiply-adds of ``_scan`` in a step of rows with several tokens."""
    FOUND.clear()
    compile_step(7, 20, invariant)
    (made,) = FOUND["_scan"].values()
    count: int = made.asm["ptx"].count("fma.rn.f32")
    return count


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    for module in (delta_rule, delta_chunks):
        module.pdl = lambda like: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined]
    kernels = {delta_rule: ("_one", "_scan", "_keep", "_norm"), delta_chunks: ("_mix", "_prepare", "_advance")}
    for module, names in kernels.items():
        for name in names:
            setattr(module, name, Compiled(getattr(module, name)))
    for rows, tokens in ((1, 1), (7, 7), (16, 16), (256, 256), (1, 40), (1, 4000), (3, 1024), (16, 8192), (200, 2048)):
        compile_step(rows, tokens)
    for name, variants in sorted(FOUND.items()):
        print(name, len(variants), sum(narrow(made.asm["ttgir"]) for made in variants.values()))
    print("fused", fused(False), fused(True))


if __name__ == "__main__":
    main()
