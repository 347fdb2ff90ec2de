"""The kernels of compressions, compiled for a Hopper where none is.

Run by test_kernels.py without Triton's interpreter.  It prints the number of launches and of variants, and whether a
barrier lies between the loads and the stores of a move."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from compiled_loops import MADE, Compiled, Hopper
from triton.runtime import driver

from minivllm.device.kernels import kept_tokens

BLOCK, HEADS = 256, 8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def copied(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return empty(*array.shape, dtype=torch.int64)


def cache_of(scaled: bool) -> dict[str, torch.Tensor]:
    shape = (40, BLOCK, HEADS, 128)
    if not scaled:
        return {name: empty(*shape) for name in "kv"}
    whole = {name: empty(*shape, dtype=torch.int8) for name in "kv"}
    return whole | {f"{name}_scale": empty(*shape[:3], dtype=torch.float32) for name in "kv"}


def ordered(ptx: str) -> bool:
    """Return whether a barrier follows the last load of the kernel, before a store."""
    lines = [line.strip() for line in ptx.splitlines()]
    at = [i for i, line in enumerate(lines) if "bar.sync" in line or "barrier.sync" in line]
    loads = [i for i, line in enumerate(lines) if "ld.global" in line]
    stores = [i for i, line in enumerate(lines) if "st.global" in line]
    return bool(loads and stores) and any(loads[-1] < i < stores[0] for i in at)


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    names = ("_move", "_gather", "_choose")
    for name in names:
        setattr(kept_tokens, name, Compiled(getattr(kept_tokens, name)))
    kept_tokens.copied = copied
    tokens, blocks = SimpleNamespace(shape=(32, 8, 4000), data_ptr=lambda: 16), SimpleNamespace(data_ptr=lambda: 16)
    for scaled in (False, True):
        moved = kept_tokens.GroupTensors([cache_of(scaled)] * 32)
        for rows in (1, 2, 16):
            moved.move([kept_tokens.Move(tokens, blocks, blocks)] * rows)  # type: ignore[arg-type]
    for stored in (4128, 16000, 16001):
        kept_tokens.gather([cache_of(False)["k"]] * 4, empty(63, dtype=torch.int32), stored)
        kept_tokens.choose(empty(32, 8, stored, dtype=torch.float32), 4000)
    moves = [kernel for kernel in MADE if kernel.name == "_move"]
    print(len(MADE), len({kernel.hash for kernel in MADE}), all(ordered(kernel.asm["ptx"]) for kernel in moves))


if __name__ == "__main__":
    main()
