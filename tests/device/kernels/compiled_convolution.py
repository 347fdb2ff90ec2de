"""The kernel of the short convolution, compiled for a Hopper where none is, for steps of several numbers of rows.

Run by test_short_conv_kernels.py without Triton's interpreter.  It prints the numbers of variants before and after."""

from __future__ import annotations

import torch
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.core.interfaces.states import COPIES, StepStates
from minivllm.device.kernels import short_conv

CHANNELS, WIDTH = 64, 3


def step_of(rows: int) -> StepStates:
    """Return the states of a step, without memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    states = empty(rows, dtype=torch.int64)
    drafts = empty(rows, dtype=torch.bool)
    copies = empty(rows, COPIES, dtype=torch.int64)
    columns = (states, empty(rows), empty(rows), empty(rows + 1), drafts, empty(rows, COPIES), copies)
    return StepStates(*columns, lambda: None)


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    short_conv.pdl = lambda like: {"PDL": True, "launch_pdl": True}
    short_conv.keep = lambda *args: None
    short_conv._conv = Compiled(short_conv._conv)
    weight = torch.empty(CHANNELS, WIDTH, dtype=torch.bfloat16, device="meta")
    ring = torch.empty(9, WIDTH, CHANNELS, dtype=torch.bfloat16, device="meta")
    for rows in (1, 2, 7, 16, 200):
        for tokens in (rows, 3 * rows):
            mixed = torch.empty(tokens, 3 * CHANNELS, dtype=torch.bfloat16, device="meta")
            short_conv.convolve(mixed, weight, None, ring, step_of(rows))
    variants = {kernel.hash for kernel in MADE}
    print(len(MADE), len(variants))


if __name__ == "__main__":
    main()
