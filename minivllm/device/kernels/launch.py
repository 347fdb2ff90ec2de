"""Programmatic dependent launch (sm_90 and later), in which a kernel is set up while the preceding one still runs.

A kernel in such a chain calls ``wait(PDL)`` before it reads results of an earlier kernel, or overwrites memory that an
earlier kernel reads.  It may load constants, such as weights, before.  Every kernel in a chain must wait, because each
wait only covers the preceding kernel.  ``wait`` can be split::

    settle, then release     the next kernel starts after all earlier kernels have ended, so it may read their results
                             without waiting
    release, then settle     the next kernel is set up as early as possible; its programs may then find some of the
                             multiprocessors in use and crowd on the others, which costs most with few programs
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .compile_keys import order_keys

order_keys()  # before a key is computed: every process that compiles kernels imports this module


def cdiv(n: int, size: int) -> int:
    """Return n / size, rounded up.  ``triton.cdiv`` takes microseconds, because kernels may call it too."""
    return -(-n // size)


def power(n: int) -> int:
    """Return the least power of two that is at least n, as ``triton.next_power_of_2`` in less time."""
    return 1 << max(int(n) - 1, 0).bit_length()


def kernel(*changing: str) -> Callable[[Any], Any]:
    """Return ``triton.jit`` for a kernel with arguments that change from step to step.

    Triton compiles no variant for values of these arguments that are 1 or divisible by 16, nor for aligned pointers.
    Such a variant would be compiled during a request.  Constants still lead to variants.
    """

    def decorate(run: Any) -> Any:
        if unknown := set(changing) - set(inspect.signature(run).parameters):
            raise TypeError(f"{run.__name__} has no argument {', '.join(sorted(unknown))}")
        return triton.jit(do_not_specialize=changing, do_not_specialize_on_alignment=changing)(run)

    return decorate


@triton.jit
def release(PDL: tl.constexpr):
    """Allow the next kernel of the stream to start before this one has ended."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def settle(PDL: tl.constexpr):
    """Wait until the preceding kernel of the stream has ended."""
    if PDL:
        gdc_wait()


@triton.jit
def wait(PDL: tl.constexpr):
    """Allow the next kernel of the stream to start, then wait until the preceding one has ended."""
    release(PDL)
    settle(PDL)


@lru_cache(maxsize=16)
def capability(device: torch.device) -> int:
    """Return NVIDIA's major compute capability, 0 for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def roomy(device: torch.device) -> bool:
    """Return whether a program may use 227 KiB of shared memory, for which tiles of the copy engine were chosen.

    Devices of compute capability 12 (GeForce RTX 50) have the copy engine, but 99 KiB.
    """
    return 9 <= capability(device) < 12


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors, and a small number on a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@lru_cache(maxsize=16)
def shared_memory(device: torch.device) -> int:
    """Return the shared memory of a multiprocessor in bytes, which all its programs share."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def keep_room(launched: Any, programs: int, device: torch.device) -> None:
    """Reserve shared memory for ``programs`` programs of a kernel on each multiprocessor; 0 means as many as fit.

    Shared memory and the first-level cache share 256 KiB of a Hopper's multiprocessor.  Loads to registers pass through
    the cache, so a smaller cache has fewer bytes in flight.  By default the driver reserves shared memory for as many
    programs as the registers allow.  Kernels that start before a multiprocessor is idle, as in a chain of dependent
    launches, use the division of the kernel before them.

    ``launched`` is the compiled kernel that a launch returned, None under the interpreter.  The driver applies the
    preference to all later launches of this variant of the kernel.
    """
    if launched is None or programs == 0 or capability(device) == 0:
        return
    share = programs * (launched.metadata.shared + 1024)  # the driver reserves 1 KiB for each program
    _prefer(launched.function, min(100, -(-100 * share // shared_memory(device))))


@cache
def _prefer(function: int, percent: int) -> None:
    """Set the share, in percent, of its largest shared memory that a multiprocessor reserves for a kernel."""
    carveout = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    try:
        ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), carveout, percent)
    # the driver cannot be called; the kernel then runs with its default, which is only slower
    except (OSError, AttributeError):
        return


_COMPILED: set[tuple[Any, ...]] = set()  # variants that ``compile_once`` has compiled


def compile_once(run: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Compile the variant of a kernel that a launch with these arguments and options runs, without running it.

    So the first such launch, in the middle of a request, need not wait for the compiler.  Only the first call for a
    kernel, its options and the dtype and device of its first argument, a tensor, does anything."""
    like = args[0]
    key = (run, like.dtype, like.device, *options.items())
    if key not in _COMPILED and capability(like.device):
        _COMPILED.add(key)
        run.warmup(*args, grid=(1,), **options)


def pdl(like: torch.Tensor) -> dict[str, Any]:
    """Return the launch options of a kernel with the argument ``PDL``, for tensors on the device of ``like``."""
    return {"PDL": True, "launch_pdl": True} if capability(like.device) >= 9 else {"PDL": False}
