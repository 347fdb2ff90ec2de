"""The kernels of adapters, compiled for a Hopper where none is, for steps of several numbers of tokens.

Run by test_lora_kernels.py without Triton's interpreter.  It prints the numbers of launches and of variants."""

from __future__ import annotations

import torch
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.device.kernels import lora


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    lora._shrink, lora._expand = Compiled(lora._shrink), Compiled(lora._expand)
    empty = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    places, rank, inputs, outputs = 8, 16, 4096, 6144
    ranks = empty(places, dtype=torch.int32)
    made = lora.LoraProduct(empty(places, 3, rank, inputs), empty(places, outputs, rank), ranks, [0, 4096, 5120], False)
    for tokens in (1, 2, 17, 32, 200):
        made(empty(tokens, inputs), empty(tokens, outputs), empty(tokens, dtype=torch.int32))
    few = len({kernel.hash for kernel in MADE})
    for tokens in (256, 1000, 4096):
        made(empty(tokens, inputs), empty(tokens, outputs), empty(tokens, dtype=torch.int32))
    print(len(MADE), few, len({kernel.hash for kernel in MADE}))


if __name__ == "__main__":
    main()
