"""The kernels of adapters, compiled for a Hopper where none is, for steps of several numbers of tokens.

Run by test_lora_kernels.py without Triton's interpreter.  It prints the numbers of launches and of variants."""

from __future__ import annotations

import torch
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.plugins.adapter import triton_lora as lora


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    lora._group, lora._shrink, lora._expand = (Compiled(run) for run in (lora._group, lora._shrink, lora._expand))
    empty = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    places, rank, inputs, outputs = 8, 16, 4096, 6144
    ranks = empty(places, 10, dtype=torch.int32)
    made = lora.LoraProduct(empty(places, 3, rank, inputs), empty(places, outputs, rank), 7, [0, 4096, 5120])
    variants = []
    for steps in ((1, 2, 17, 32, 256), (257, 600, 1000), (1025, 4096)):
        for tokens in steps:
            groups = lora.group(empty(tokens, dtype=torch.int32), ranks, False)
            made(empty(tokens, inputs), empty(tokens, outputs), groups)
        variants.append(len({kernel.hash for kernel in MADE}))
    wide = min(kernel.asm["ptx"].count("ld.global.v4") for kernel in MADE if kernel.name == "_expand")
    print(len(MADE), *variants, wide > 2)


if __name__ == "__main__":
    main()
