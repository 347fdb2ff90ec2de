"""Parts of the start on a GPU that threads run while the main thread imports modules, reads files and loads weights.

The driver, and the library that hashes its files, release Python's lock.  A thread that fails changes nothing: the main
thread then does the same work at its first use and reports the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from typing import Any

DRIVER = "libcuda.so.1"


def begin(work: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a thread that calls ``work(*args)``, ignores its exceptions, and does not delay the end of the process."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work(*args)

    thread = threading.Thread(target=run, name="minivllm-start", daemon=True)
    thread.start()
    return thread


def open_driver(device: str, library: str = DRIVER) -> threading.Thread | None:
    """Start to initialize the CUDA driver for the device "auto" or "cuda", before torch is imported.

    Return the thread, or None for another device.  The driver takes a few tenths of a second for each GPU of the host.
    torch initializes it when ``find_device`` lists the devices; it then waits until the thread has ended."""
    return begin(_initialize, library) if device in ("auto", "cuda") else None


def _initialize(library: str) -> None:
    """Initialize the driver.  OSError if there is none."""
    ctypes.CDLL(library).cuInit(0)


def prepare_kernels(device: str) -> list[threading.Thread]:
    """Start to make the context of a GPU, and to compute the key of Triton's cache, while the weights are loaded.

    Return the threads, none for another device."""
    if not device.startswith("cuda"):
        return []
    return [begin(_open_context, device), begin(hash_compiler)]


def _open_context(device: str) -> None:
    """Make the context of a device, and wait for it."""
    import torch

    torch.cuda.synchronize(device)


def hash_compiler() -> None:
    """Compute the part of the key of a compiled kernel that depends on Triton alone.  ImportError without Triton.

    Triton hashes its library of 450 MB at the first kernel, which takes 0.3 to 0.5 seconds of a CPU, and keeps the
    result."""
    from triton.runtime.cache import triton_key

    triton_key()
