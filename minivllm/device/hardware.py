"""Find the device, the memory of the machine and the dtypes in which a CPU multiplies safely and fast.

Some virtual machines offer AMX without the CPUID leaf that describes its tiles.  oneDNN then builds AMX kernels, which
end the process with SIGILL.  ``prepare_environment`` therefore limits oneDNN to instruction sets below AMX if the
operating system does not offer AMX, and ``cpu_matmul`` tries a product in a child process before this process computes
one.

oneDNN compiles a kernel for each number of rows of each weight's shape, and an engine uses nearly all of these shapes
over time.  A kernel takes 0.3 to 0.5 MiB.  By default oneDNN keeps 1,024 kernels and torch another 1,024, in each
thread, so that the process grows by half a GiB in its first hour.  ``prepare_environment`` limits both caches.

OpenMP's idle threads spin until the next operation, with GNU's default for some milliseconds.  If another process needs
the same cores, such as the HTTP server or a second engine, spinning slows down both far more than twofold.
``prepare_environment`` limits spinning to less than a tenth of a millisecond.  This is longer than the gap between two
operations of a layer, and short enough for other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, ResourceError
from minivllm.limits import allowed_memory, limit_threads, memory_limit

CAP = "ONEDNN_MAX_CPU_ISA"
# Kernels that oneDNN keeps, enough for the last fifty batch sizes. torch's own cache holds the same kernels again and
# saves no measurable time, but a size of 0 crashes it.
KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "16"}
# rounds that idle OpenMP threads spin; read by GNU's OpenMP when torch is imported
WAITING = {"GOMP_SPINCOUNT": "2000"}
WAIT_POLICY = "OMP_WAIT_POLICY"
ISAS = (  # oneDNN's names of instruction sets in ascending order
    "SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16",
    "AVX512_CORE_FP16",
)  # fmt: skip
# dtype -> (first element of ISAS with products of this dtype, CPU flag of its vector instructions, CPU flag of its tile
# instructions)
PRODUCTS = {
    "bfloat16": ("AVX512_CORE_BF16", "avx512_bf16", "amx_bf16"),
    "float16": ("AVX512_CORE_FP16", "avx512_fp16", "amx_fp16"),
}
PROBED = ("float32", "bfloat16")  # the dtypes between which dtype=auto chooses
DTYPES = ("float32", "bfloat16", "float16")
ROWS = (1, 32)  # numbers of rows of the trial: a decode step of one sequence, and a small prefill
_REPEATS = (20, 5)  # products of each size in a measurement of about 2 ms, longer than usual interruptions
FASTER = 1.25  # bfloat16 must be faster by this factor for both sizes, so that noise does not decide
DOUBT = (1.0, 2.5)  # a speedup between these limits is measured again, up to AGAIN times
AGAIN = 3
_DIM = 1024  # inputs and outputs of the measured product; its float32 weight of 4 MiB exceeds the cache of a core
# seconds that a forked child and a new process may take; usual are 0.1 and 2, but torch may be read from a cold disk
_FORK_SECONDS, _PROCESS_SECONDS = 5.0, 60.0


@dataclass(frozen=True)
class Device:
    """The device of an engine.

    ``sm`` is 10 * major + minor of the compute capability, 0 on a CPU.  ``memory`` is its total memory in bytes.
    ``seconds`` is the time that it took to find the device, with the initialization of the driver.
    """

    kind: str  # cpu | cuda
    name: str
    sm: int
    memory: int
    why: str
    devices: int = 1  # number of GPUs of the host, 1 for a CPU
    seconds: float = field(default=0.0, compare=False)


def prepare_environment(environ: Any = None, cpuinfo: str | None = None) -> str | None:
    """Set variables that limit kernel caches, threads, spinning and oneDNN's instruction set.

    Return the limit of the instruction set, None if it is not limited here.  It is limited only if the operating system
    offers AVX512-BF16 but not AMX.  torch reads the variables when it is imported and at its first matrix product, so
    this function must run before.  Variables that the user has set keep their values.
    """
    environ = os.environ if environ is None else environ
    if WAIT_POLICY not in environ:
        for name, most in WAITING.items():
            environ.setdefault(name, most)
    for name, most in KEPT.items():
        environ.setdefault(name, most)
    limit_threads(environ)
    if CAP in environ:
        return None
    if cpuinfo is None:
        try:
            with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
                cpuinfo = next((line for line in file if line.startswith("flags")), "")
        except OSError:
            return None
    flags = set(cpuinfo.split())
    if "avx512_bf16" not in flags or "amx_tile" in flags:
        return None
    environ[CAP] = "AVX512_CORE_FP16" if "avx512_fp16" in flags else "AVX512_CORE_BF16"
    return environ[CAP]


def find_device(requested: str) -> Device:
    """Return the device for "auto", "cpu" or "cuda" (the current device), with the time that this took.  ResourceError
    if there is no such device."""
    begun = time.perf_counter()
    found = _find_device(requested)
    return replace(found, seconds=time.perf_counter() - begun)


def _find_device(requested: str) -> Device:
    import torch

    if requested != "cpu" and torch.cuda.is_available():
        props = torch.cuda.get_device_properties(torch.cuda.current_device())
        why = "asked for" if requested == "cuda" else "a CUDA device is there"
        return Device(
            "cuda", props.name, 10 * props.major + props.minor, props.total_memory, why, torch.cuda.device_count()
        )
    if requested == "cuda":
        raise ResourceError("device='cuda': torch sees no CUDA device; use device='cpu' or 'auto'")
    why = "asked for" if requested == "cpu" else "torch sees no CUDA device"
    return Device("cpu", _cpu_name(), 0, _host_memory(), why)


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    import platform

    return platform.processor() or platform.machine()


def _host_memory() -> int:
    """Return the bytes of memory that this process may use: all of the machine, or the limit of its control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return total if limit is None else min(total, limit)


def free_ram() -> int:
    """Return the bytes of memory that are available to this process on the host, an estimate if they are unknown."""
    found = 4 << 30
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as file:
        found = int(next(line for line in file if line.startswith("MemAvailable")).split()[1]) * 1024
    allowed = allowed_memory()
    return found if allowed is None else min(found, allowed)


# ---------------------------------------------------------------- which dtypes a CPU multiplies


@dataclass(frozen=True)
class Matmul:
    """Milliseconds of a matrix product by dtype, one value per entry of ``ROWS``.

    A dtype is missing if its product ended the process.
    """

    times: Mapping[str, tuple[float, ...]]

    def safe(self, dtype: str) -> bool:
        return dtype in self.times

    def least(self, other: Matmul) -> Matmul:
        """Return the smaller time of each product in this and the ``other`` measurement, for the dtypes that are in
        both."""
        both = [name for name in self.times if name in other.times]
        return Matmul({name: tuple(map(min, self.times[name], other.times[name])) for name in both})

    def speedup(self, dtype: str) -> tuple[float, ...]:
        """Return how many times faster than float32 a dtype is, for each number of rows in ``ROWS``."""
        return tuple(a / b for a, b in zip(self.times["float32"], self.times[dtype], strict=True))


@functools.cache
def cpu_matmul() -> Matmul:
    """Measure products in each dtype of ``PROBED`` in a child process, which takes about 0.05 s, once per process."""
    return settled(functools.partial(probe, _measure))


@functools.cache
def _other_matmul(dtype: str) -> Matmul:
    """Measure products in a dtype that is not in ``PROBED``, which is only used if the user sets it."""
    return probe(_measure, names=(dtype,))


def settled(measured: Callable[[], Matmul]) -> Matmul:
    """Return a measurement, repeated if the speedup is close to the limit between two dtypes.

    Other work on the machine only adds time, so the smallest time of each product counts.
    """
    found = measured()
    for _ in range(AGAIN):
        if not (found.safe("float32") and found.safe("bfloat16")):
            break
        if not DOUBT[0] < min(found.speedup("bfloat16")) < DOUBT[1]:
            break
        found = found.least(measured())
    return found


def probe(
    measure: Callable[[str], tuple[float, ...]], fork: bool = sys.platform == "linux", names: Sequence[str] = PROBED
) -> Matmul:
    """Measure each dtype in child processes.  If a child dies, a new child measures the dtypes after the fatal one.

    A forked child is fast and has exactly this process's oneDNN settings.  It may hang on a lock that another thread
    held at the fork.  After a time limit, a new process measures instead.
    """
    times: dict[str, tuple[float, ...]] = {}
    left = list(names)
    while left:
        text = _in_fork(measure, left) if fork else None
        if text is None and (text := _in_process(left)) is None:
            break  # the remaining dtypes could not be tried, so they do not count as safe
        for line in text.splitlines():
            name, *values = line.split()
            times[name] = tuple(float(v) for v in values)
        done = [name for name in left if name in times]
        left = left[len(done) + 1 :]
    return Matmul(times)


def _measure(name: str) -> tuple[float, ...]:
    """Return the shortest times in milliseconds of some products [rows, DIM] x [DIM, DIM] on one thread."""
    import torch

    torch.set_num_threads(1)  # a forked child lacks the threads of its parent, for which torch would wait
    dtype = getattr(torch, name)
    weight = torch.ones(_DIM, _DIM, dtype=dtype)
    results = []
    for rows, repeats in zip(ROWS, _REPEATS, strict=True):
        x = torch.ones(rows, _DIM, dtype=dtype)
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            best = min(best, time.perf_counter() - start)
        results.append(1000 * best)
    return tuple(results)


def _in_fork(measure: Callable[[str], tuple[float, ...]], names: list[str]) -> str | None:
    """Return the text that a forked child wrote before it ended, with one line for each dtype, or None if it hung."""
    import torch  # noqa: F401  (in the parent, or each child would import it)

    read, write = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork in a process with threads; see ``probe``
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _child(measure, names, write)
    os.close(write)
    text, deadline = b"", time.monotonic() + _FORK_SECONDS
    try:
        while select.select([read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            piece = os.read(read, 4096)
            if not piece:
                return text.decode()
            text += piece
        return None
    finally:
        os.close(read)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _child(measure: Callable[[str], tuple[float, ...]], names: list[str], write: int) -> None:
    try:
        import faulthandler
        import resource

        faulthandler.disable()  # the traceback of an expected crash would mislead the user
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        for name in names:
            os.write(write, _line(name, measure(name)))
    finally:
        os._exit(0)  # ends the child without running the exit handlers of its parent


def _line(name: str, times: tuple[float, ...]) -> bytes:
    return f"{name} {' '.join(map(str, times))}\n".encode()


def _in_process(names: list[str]) -> str | None:
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "minivllm.device.hardware", *names]
    try:
        return subprocess.run(command, env=env, capture_output=True, timeout=_PROCESS_SECONDS, text=True).stdout
    except subprocess.TimeoutExpired:
        return None


def multiplies(dtype: str) -> bool:
    """Return whether oneDNN has instructions of this CPU for products in "bfloat16" or "float16".

    oneDNN is torch's library for 16-bit products.  ``ONEDNN_MAX_CPU_ISA`` may forbid the instructions.
    """
    return has_products(dtype, _cpu_flags(), os.environ.get(CAP, ""))


def has_products(dtype: str, flags: Collection[str], cap: str) -> bool:
    """Return whether a CPU has instructions for products in a dtype.

    ``flags`` are the flags of the CPU, and ``cap`` limits the allowed instruction set.  The result is True outside of
    Linux on x86-64, where flags are unknown.
    """
    least, flag, tiles = PRODUCTS[dtype]
    name = cap.upper()
    allowed = name not in ISAS or ISAS.index(name) >= ISAS.index(least)
    return not flags or (allowed and (flag in flags or tiles in flags))


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """Return Linux's flags of the CPU, an empty set on other systems."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        return frozenset(next((line for line in file if line.startswith("flags")), "").split())
    return frozenset()


# ---------------------------------------------------------------- the dtype of a run


def choose_dtype(requested: str, checkpoint: str, device: Device, native: bool = False) -> tuple[str, str]:
    """Return the dtype of a run, and the reason as text.

    ``requested`` is "auto" or a dtype.  ``checkpoint`` is the dtype in config.json, "float32" if it has none.
    ``native`` is whether the native CPU library can be used.  ConfigError for an unknown dtype, ResourceError for a
    dtype whose products would end the process.
    """
    if requested not in ("auto", *DTYPES):
        raise ConfigError(f"dtype={requested!r}: expected auto, {', '.join(DTYPES)}")
    if requested != "auto":
        if device.kind == "cpu" and requested != "float32":
            require_safe(requested)
        return requested, "asked for"
    if device.kind != "cpu":
        if checkpoint in ("bfloat16", "float16"):
            return checkpoint, "the checkpoint's"
        return "bfloat16", f"half the memory of the checkpoint's {checkpoint}, and what a GPU is fast in"
    if checkpoint not in ("bfloat16", "float16"):
        return "float32", "the checkpoint's"
    return _cpu_dtype(cpu_matmul(), native)


def require_safe(dtype: str, matmul: Matmul | None = None) -> None:
    """Check that a matrix product in this dtype works on this CPU.  ResourceError if it kills the process."""
    if matmul is None:
        matmul = cpu_matmul() if dtype in PROBED else _other_matmul(dtype)
    if not matmul.safe(dtype):
        raise ResourceError(
            f"dtype={dtype!r}: a matrix product in it kills the process on this CPU (oneDNN uses instructions that "
            f"the machine does not have); use dtype='float32', or set {CAP}=AVX512_CORE_BF16 before Python starts"
        )


def _cpu_dtype(matmul: Matmul, native: bool = False) -> tuple[str, str]:
    if not (matmul.safe("bfloat16") and matmul.safe("float32")):
        return "float32", "a matrix product in bfloat16 kills the process on this CPU"
    gain = matmul.speedup("bfloat16")
    figures = f"{gain[0]:.1f} times the speed of float32 with {ROWS[0]} row, {gain[1]:.1f} times with {ROWS[1]}"
    if min(gain) >= FASTER:
        return "bfloat16", f"this CPU multiplies bfloat16 at {figures}"
    if native:
        return "bfloat16", "half the memory of float32, which the native part reads in half the time"
    return "float32", f"this CPU multiplies bfloat16 at only {figures}"


if __name__ == "__main__":
    for _name in sys.argv[1:]:
        sys.stdout.buffer.write(_line(_name, _measure(_name)))
        sys.stdout.buffer.flush()


def discard_pages(address: int, size: int) -> None:
    """Return whole pages of private memory to the system; they then hold zeros.

    ``address`` and ``size`` are in bytes.  OSError if the system refuses, or has no such call.
    """
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None or not sys.platform.startswith("linux"):
        raise OSError("this system cannot return the pages of memory in use; sleep needs Linux or a GPU")
    page = os.sysconf("SC_PAGE_SIZE")
    first = -(-address // page) * page
    end = (address + size) // page * page
    if end <= first:
        return
    if madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(mmap.MADV_DONTNEED)):
        code = ctypes.get_errno()
        raise OSError(code, f"the pages of memory cannot be returned: {os.strerror(code)}")


def trim_heap() -> None:
    """Return unused pages of the heap to the system, if the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
