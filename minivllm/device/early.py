"""Parts of the start that threads run while the main thread imports modules, reads files and loads weights.

The driver, the loader of libraries, and the library that hashes files release Python's lock.  A thread that fails
changes nothing: the main thread then does the same work at its first use and reports the error.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRIVER = "libcuda.so.1"
HASHING = threading.Lock()  # held by the thread that computes the key of Triton's cache
EXIT_SECONDS = 10.0  # longest time that the end of the process waits for threads
TORCH_LIBRARIES = ("libtorch_global_deps.so", "libtorch.so")  # names of files, in the order in which torch loads them


_threads: list[threading.Thread] = []  # threads that ``begin`` has started


def begin(work: Callable[..., Any], *args: Any) -> threading.Thread:
    """Start a thread that calls ``work(*args)`` and ignores its exceptions.

    The end of the process waits for the thread, at most EXIT_SECONDS.  Otherwise the process would crash, because it
    would destroy the data of a library that the thread is loading."""

    def run() -> None:
        with contextlib.suppress(Exception):
            work(*args)

    thread = threading.Thread(target=run, name="minivllm-start", daemon=True)
    thread.start()
    _threads.append(thread)
    return thread


@atexit.register
def _wait_for_threads() -> None:
    """Wait for the threads of ``begin``, at most EXIT_SECONDS altogether."""
    end = time.monotonic() + EXIT_SECONDS
    with contextlib.suppress(KeyboardInterrupt):
        for thread in _threads:
            thread.join(max(0.0, end - time.monotonic()))


def open_torch() -> threading.Thread | None:
    """Start to load the shared libraries of torch, before it is imported.

    Return the thread, or None if torch has been imported, is not installed, or the system is not Linux.  The import
    itself loads libraries with Python's lock, so that no other module is imported meanwhile."""
    found = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if found is None or found.origin is None or sys.platform != "linux":
        return None
    return begin(_load_libraries, Path(found.origin).parent / "lib")


def _load_libraries(folder: Path) -> None:
    """Load TORCH_LIBRARIES from a folder, the first for all later libraries, as torch does.

    A function of ctypes releases the lock while it runs, and ``ctypes.CDLL`` does not."""
    load = ctypes.CDLL(None).dlopen
    load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    for name, visible in zip(TORCH_LIBRARIES, (os.RTLD_GLOBAL, os.RTLD_LOCAL), strict=True):
        if not load(os.fsencode(folder / name), os.RTLD_NOW | visible):
            return


def open_driver(
    device: str, context: bool = False, library: str = DRIVER, found: Callable[[], None] | None = None
) -> threading.Thread | None:
    """Start to initialize the CUDA driver for the device "auto" or "cuda" before torch is imported, and then to compute
    the key of Triton's cache.

    With ``context``, also make the context of the first GPU, which torch then uses.  ``found`` is called if there is a
    driver.  Return the thread, or None for another device.  The driver takes a few tenths of a second for each GPU of
    the host.  torch initializes it when ``find_device`` lists the devices; it then waits until the driver is
    initialized."""
    return begin(_initialize, library, context, found) if device in ("auto", "cuda") else None


def _initialize(library: str, context: bool, found: Callable[[], None] | None) -> None:
    """Initialize the driver, call ``found``, make the context of the first GPU if ``context`` is set, and hash Triton's
    library.

    OSError without a driver."""
    driver = ctypes.CDLL(library)
    device, made = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0):
        return
    if found is not None:
        found()
    if context and not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(made), device)
    hash_compiler()


def prepare_kernels(device: str) -> list[threading.Thread]:
    """Start to make the context of a GPU, and to compute the key of Triton's cache, while the weights are loaded.

    Return the threads, none for another device."""
    if not device.startswith("cuda"):
        return []
    return [begin(_open_products, device), begin(hash_compiler)]


def _open_products(device: str) -> None:
    """Create the CUDA context of a device and the handle of its library of matrix products, and wait until both
    exist."""
    import torch

    square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    torch.mm(square, square)
    torch.cuda.synchronize(device)


def hash_compiler() -> None:
    """Compute Triton's own part of the key of compiled kernels, so that it is cached.  ImportError without Triton.

    Triton hashes its library of 450 MB at the first kernel, which takes 0.3 to 0.5 seconds of a CPU, and keeps the
    result."""
    with HASHING:
        from triton.runtime.cache import triton_key

        triton_key()
