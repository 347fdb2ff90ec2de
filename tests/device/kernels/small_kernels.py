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
