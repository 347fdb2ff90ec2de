"""Kernels of the tests of compilation, in a module that another process can import."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double(x, y, n, N: tl.constexpr, HALF: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    v = tl.load(x + at, mask=at < n)
    tl.store(y + at, v / 2 if HALF else v * 2, mask=at < n)


@triton.jit
def broken(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.nothing_of_this_name(N))


@triton.jit
def negate(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, -tl.load(x + at))


@triton.jit
def number(x, N: tl.constexpr, NAME: tl.constexpr, KIND: tl.constexpr):
    if NAME == "fp16":
        tl.store(x + tl.arange(0, N), tl.full((N,), 1, KIND).to(tl.float32))


FACTOR = tl.constexpr(3.0)


@triton.jit
def scaled(v):
    """Read a constant, which is part of the keys of the kernels that call this function."""
    return v * FACTOR


@triton.jit
def scale(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, scaled(tl.load(x + at)))


@triton.jit
def scale_twice(x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x + at, scaled(scaled(tl.load(x + at))))


@triton.jit
def ask_target(x):
    """Store a number that depends on the GPU for which the kernel is compiled."""
    tl.store(x, 777 if tl.target_info.cuda_capability_geq(9, 0) else 555)
