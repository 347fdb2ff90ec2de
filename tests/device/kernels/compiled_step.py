"""The kernel that reads the rows of a step, compiled for a Hopper where none is.

Run by test_step_kernels.py without Triton's interpreter.  It prints the number of variants."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.device.kernels import step


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    step._begin = Compiled(step._begin)
    empty = lambda *shape, dtype=torch.int64: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    slots, groups, blocks = 257, 2, 300
    for dropped in (None, empty(groups, slots)):
        state = SimpleNamespace(
            tokens=empty(slots, 4097, dtype=torch.int32),
            known=empty(slots),
            stopped=empty(slots, dtype=torch.bool),
            table=empty(groups, slots, blocks, dtype=torch.int32),
            block=16,
            dropped=dropped,
        )
        for rows in (1, 3, 16, 256):
            made = empty(rows), empty(rows), empty(groups, rows, dtype=torch.int32), empty(groups, rows)
            step.begin(empty(rows), state, *made)
    print(len({kernel.hash for kernel in MADE}))


if __name__ == "__main__":
    main()
