"""The kernels of adapters, compiled for a Hopper where none is, for steps of several numbers of tokens.

Run by test_lora_kernels.py without Triton's interpreter.  It prints the numbers of launches and of variants."""

from __future__ import annotations

import torch
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.plugins.adapter import triton_extended as extended
from minivllm.plugins.adapter import triton_lora as lora
from minivllm.plugins.adapter import triton_merged as merged

PLACES, RANK = 8, 16


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def separate() -> None:
    """Compile the kernels beside the products of a layer."""
    lora._group, lora._shrink, lora._expand = (Compiled(run) for run in (lora._group, lora._shrink, lora._expand))
    inputs, outputs = 4096, 6144
    ranks = empty(PLACES, 10, dtype=torch.int32)
    made = lora.LoraProduct(empty(PLACES, 3, RANK, inputs), empty(PLACES, outputs, RANK), 7, [0, 4096, 5120])
    variants = []
    for steps in ((1, 2, 17, 32, 256), (257, 600, 1000), (1025, 4096)):
        for tokens in steps:
            groups = lora.group(empty(tokens, dtype=torch.int32), ranks, False)
            made(empty(tokens, inputs), empty(tokens, outputs), groups)
        variants.append(len({kernel.hash for kernel in MADE}))
    wide = min(kernel.asm["ptx"].count("ld.global.v4") for kernel in MADE if kernel.name == "_expand")
    print(len(MADE), *variants, wide > 2)


def gates() -> None:
    """Compile the kernel between the products of an MLP."""
    merged._gated = Compiled(merged._gated)
    ranks = empty(PLACES, 10, dtype=torch.int32)
    up = lora.LoraProduct(empty(PLACES, 2, RANK, 4096), empty(PLACES, 28672, RANK), 1, [0, 14336])
    down = lora.LoraProduct(empty(PLACES, 1, RANK, 14336), empty(PLACES, 4096, RANK), 2, [0])
    before = len(MADE)
    for tokens in (1025, 4096, 8192):
        groups = lora.group(empty(tokens, dtype=torch.int32), ranks, False)
        merged.gated(up, down, up.shrink(empty(tokens, 4096), groups), empty(tokens, 28672), "silu", groups)
    made = [kernel for kernel in MADE[before:] if kernel.name == "_gated"]
    print(len(made), len({kernel.hash for kernel in made}))


def behind() -> None:
    """Compile the kernels for products of A that come with those of the weight."""
    extended._expand, extended._gate = Compiled(extended._expand), Compiled(extended._gate)
    ranks = empty(PLACES, 10, dtype=torch.int32)
    down = lora.LoraProduct(empty(PLACES, 1, RANK, 14336), empty(PLACES, 4096, RANK), 2, [0])
    up = lora.LoraProduct(empty(PLACES, 2, RANK, 4096), empty(PLACES, 28672, RANK), 1, [0, 14336])
    before = len(MADE)
    for tokens in (1, 2, 17, 32, 256, 257, 600, 1000):
        groups = lora.group(empty(tokens, dtype=torch.int32), ranks, False)
        y = empty(tokens, 4096 + PLACES * RANK)
        extended.expand_behind(down, y, groups)
        extended.add_behind(down, y, empty(tokens, 4096), empty(4096), groups)
        sums = extended.Sums(empty(tokens, 16, dtype=torch.float32), 4096, 1e-5)
        for given in (None, sums):
            extended.gate_behind(up, empty(tokens, 28672 + 2 * PLACES * RANK), "silu", groups, given)
        extended.expand_behind(down, y, groups, sums)
    made = [kernel for kernel in MADE[before:] if kernel.name in ("_expand", "_gate")]
    narrow = max(kernel.asm["ptx"].count("ld.global.b16") for kernel in made)
    print(len(made), len({kernel.hash for kernel in made}), narrow < 16)


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    separate()
    gates()
    behind()


if __name__ == "__main__":
    main()
