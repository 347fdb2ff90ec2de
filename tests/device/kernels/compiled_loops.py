"""Kernels of packed weights, compiled for a Hopper where none is, and what their loops leave in flight: a line each.

Run by test_quant_kernels.py without Triton's interpreter.  A product on a Hopper's tensor cores runs on behind its
instruction, and reads a side that lies in registers as late as then.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from minivllm.core.interfaces.quantizer import StoredWeight
from minivllm.device.kernels import grouped, packed_experts, quant, quant_large_m
from minivllm.device.kernels.experts import Division

MADE: list[Any] = []


class Hopper:
    """In the driver's place: it knows what to compile for, and no more."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """In a kernel's place: a launch compiles it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: MADE.append(self.kernel.warmup(*args, grid=grid, **options))


def left(body: list[str]) -> tuple[int, int]:
    """Return (products with an operand in registers, those without a wait behind them) of the lines of a loop."""
    found = pending = 0
    for line in body:
        if "ttng.warp_group_dot " in line:
            in_registers = re.search(r":\s*(tensor|!ttg\.memdesc)<[^*]*\*", line)
            assert in_registers is not None, line
            found, pending = found + (in_registers[1] == "tensor"), pending + (in_registers[1] == "tensor")
        if wait := re.search(r"warp_group_dot_wait .*pendings = (\d+)", line):
            pending = min(pending, int(wait[1]))
    return found, pending


def loops(text: str) -> list[list[str]]:
    lines, found = text.splitlines(), []
    for begin, line in enumerate(lines):
        if "scf.for" in line:
            margin = line[: len(line) - len(line.lstrip())] + "}"
            end = next(i for i in range(begin + 1, len(lines)) if lines[i].startswith(margin))
            found.append(lines[begin + 1 : end])
    return found


def weights() -> list[tuple[str, quant.Quantized]]:
    empty = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    made = []
    for n, k in ((4096, 4096), (28672, 4096)):
        for name, dtype in (("int8", torch.int8), ("float8", torch.float8_e4m3fn)):
            made.append((name, quant.Quantized(empty(n, k, dtype=dtype), empty(n))))
        for group in (32, 128):
            packed = empty(n, k // 2, dtype=torch.uint8)
            made.append((f"int4 in groups of {group}", quant.Quantized(packed, empty(n, k // group), None, group)))
    return made


def in_groups() -> list[tuple[str, grouped.GroupedProduct]]:
    """Return grouped products of 8 bits, with zero points and without."""
    empty = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    made = []
    for n, k in ((4096, 4096), (28672, 4096)):
        for dtype, group, zero in ((torch.int8, 32, 0), (torch.float8_e4m3fn, 64, 0), (torch.uint8, 128, 1)):
            scale = empty(n, k // group)
            product = grouped.GroupedProduct(empty(n, k, dtype=dtype), scale, scale if zero else None)
            made.append((f"{dtype} in groups of {group}", product))
    return made


def experts(bits: int) -> None:
    """Compile the products of experts with 4 bits in groups, or 8 bits."""
    empty = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device="meta")  # noqa: E731
    kept = lambda n, k: (  # noqa: E731
        StoredWeight(empty(n, k // 2, dtype=torch.uint8), empty(n, k // 32), None, 32)
        if bits == 4
        else StoredWeight(empty(n, k, dtype=torch.int8), empty(n), None)
    )
    made = packed_experts.PackedExperts(8, kept(8 * 2 * 256, 512), kept(8 * 512, 256))
    for tokens in (16, 512):
        x, ids = empty(tokens, 512, dtype=torch.bfloat16), empty(tokens, 2, dtype=torch.int32)
        order, expert = empty(tokens * 4, dtype=torch.int32), empty(tokens, dtype=torch.int32)
        made._grouped(x, ids, empty(tokens, 2), order, expert, Division(x, 0.0, 0))


def main() -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    for module in (grouped, quant, quant_large_m, packed_experts):
        module.pdl = lambda like: {"PDL": True, "launch_pdl": True}  # type: ignore[attr-defined]
        module.capability = lambda device: 9  # type: ignore[attr-defined]
    quant_large_m._matmul, quant_large_m._halves = Compiled(quant_large_m._matmul), Compiled(quant_large_m._halves)
    grouped._dots = Compiled(grouped._dots)
    packed_experts._up, packed_experts._down = Compiled(packed_experts._up), Compiled(packed_experts._down)
    for name, kernels in weights():
        for rows in (16, 64, 256):
            x = torch.empty(rows, kernels.form.k, dtype=torch.bfloat16, device="meta")
            for tma in (False, True):
                quant_large_m.matmul(kernels, x, tma=tma)
                print(name, rows, f"tma={tma}", *(left(body) for body in loops(MADE[-1].asm["ttgir"])))
    for name, product in in_groups():
        for rows in (16, 64, 256):
            product.dots(torch.empty(rows, product.k, dtype=torch.bfloat16, device="meta"))
            print(name, rows, "dots", *(left(body) for body in loops(MADE[-1].asm["ttgir"])))
    for bits in (4, 8):
        before = len(MADE)
        experts(bits)
        for kernel in MADE[before:]:
            print(f"experts of {bits} bits", *(left(body) for body in loops(kernel.asm["ttgir"])))


if __name__ == "__main__":
    main()
