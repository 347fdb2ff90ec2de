"""Sums of products on tensor cores: the end of a loop, and sums that several programs compute in parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import target_info


@triton.jit
def drained(acc, PDL: tl.constexpr):
    """Return acc after all products in its sum have ended.  Call it at the end of a loop whose dots have an operand in
    registers.

    On Hopper such a product continues after its instruction.  Triton lets the product of one iteration overlap the next
    iteration, which overwrites its registers before they are read (triton-lang/triton#9433; PTX of
    ``wgmma.mma_async``).  The statement generates no instruction except the wait before acc is used.  PDL is set on
    Hopper and later devices; later devices have other product instructions.
    """
    if PDL and not target_info.cuda_capability_geq(10, 0):
        acc = tl.inline_asm_elementwise("// $0", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def together(acc, scratch, arrived, row, tile, part, om, on, N: tl.constexpr, SK: tl.constexpr):
    """Store the sums of this program's part, and return the sums [BN, BM] of all parts and whether this program is the
    last.

    Only the program that arrives last adds the parts, in their order; for other programs the sums are their own part.
    """
    last = True
    if SK > 1:
        wide: tl.constexpr = (N + acc.shape[0] - 1) // acc.shape[0] * acc.shape[0]
        at = scratch + om.to(tl.int64)[None, :] * wide + on[:, None]
        step = tl.num_programs(0).to(tl.int64) * acc.shape[1] * wide
        tl.store(at + part * step, acc)
        tl.debug_barrier()  # all threads must have stored their sums before one thread counts the program as arrived
        counter = arrived + row * tl.num_programs(1) + tile
        last = tl.atomic_add(counter, 1, sem="acq_rel") == SK - 1
        if last:
            acc = tl.load(at, cache_modifier=".cg")
            for i in tl.static_range(1, SK):
                acc += tl.load(at + i * step, cache_modifier=".cg")
            tl.store(counter, 0)
    return acc, last


def scratch_of(like: Tensor, parts: int, sums: int) -> Tensor:
    """Return f32 memory for the ``sums`` sums of each of ``parts`` programs; ``like`` if no sum is split."""
    if parts == 1:
        return like
    return torch.empty(parts * sums, dtype=torch.float32, device=like.device)
