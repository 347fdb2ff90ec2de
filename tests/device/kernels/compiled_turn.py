"""The kernel of vision towers that rotates queries and keys, compiled for a Hopper where none is.

Run by test_turn_kernel.py without Triton's interpreter.  It prints the numbers of launches and variants."""

from __future__ import annotations

import torch
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.device.kernels import turn as module


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    module._turn = Compiled(module._turn)
    for patches in (1, 16, 100, 4096):
        qkv = torch.empty(3 * patches, 3, 16, 72, dtype=torch.bfloat16, device="meta")
        angles = torch.empty(patches, 72, device="meta")
        module.turn(qkv, angles, angles)
    print(len(MADE), len({kernel.hash for kernel in MADE}))


if __name__ == "__main__":
    main()
