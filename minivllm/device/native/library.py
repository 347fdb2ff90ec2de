"""Load the native part, a shared library of CPU kernels, or return the reason why it cannot be used.

    load()     the library, or None        isa()    the instruction set of the kernels that run
    why_not()  None, or the reason         summary()   both as one line for ``minivllm explain``

The library only makes the engine faster.  It is missing if the package was installed without a C++ compiler.  Two
environment variables are read once.  ``MINIVLLM_NATIVE=0`` disables the library.  ``MINIVLLM_ISA`` limits the
instruction set, so that kernels of a lower set can be tested on a CPU with a higher one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import ConfigError, brief, shown

ABI = 9  # value of ``minivllm_abi`` in program.cpp; increment both if a call or a struct changes
ISAS = ("none", "avx2", "avx512")  # instruction sets, ascending; ``minivllm_isa`` returns an index of this tuple
SWITCH, LIMIT = "MINIVLLM_NATIVE", "MINIVLLM_ISA"
FOLDER = Path(__file__).parent
LIBRARY, REASON = "_cpu.so", "_why_not.txt"  # names of the library and of a text why there is none; one of them exists
NOT_BUILT = "the package was not built with it: reinstall with a C++ compiler"


@dataclass(frozen=True)
class NativePart:
    """The loaded native CPU library and its instruction set.  If there is no library, ``isa`` is "none" and ``why_not``
    the reason."""

    library: ctypes.CDLL | None
    isa: str = "none"
    why_not: str | None = None


def load() -> ctypes.CDLL | None:
    """Return the native library, or None if it cannot be used; ``why_not`` then returns the reason.

    ConfigError for an unknown value of its environment variables.
    """
    return _found().library


def why_not() -> str | None:
    """Return the reason, in one line, why the native CPU library cannot be used; None if it can."""
    return _found().why_not


def isa() -> str:
    """Return the instruction set of the kernels that run: "avx512", "avx2", or "none" if ``load`` returns None."""
    return _found().isa


def summary() -> str:
    """Return a line of text about captured steps on a CPU: available, or the reason why not."""
    reason = why_not()
    return f"{isa()}: captured CPU steps are available" if reason is None else f"none: no captured CPU steps ({reason})"


@functools.cache
def _found() -> NativePart:
    return find(FOLDER, os.environ)


def find(folder: Path, environ: Mapping[str, str]) -> NativePart:
    """Load the native CPU library from a folder and choose its instruction set.  If that fails, the result has the
    reason."""
    limit = _choice(environ, LIMIT, ISAS) or ISAS[-1]
    if _choice(environ, SWITCH, ("0", "1")) == "0":
        return NativePart(None, why_not=f"switched off by {SWITCH}=0")
    if limit == "none":
        return NativePart(None, why_not=f"switched off by {LIMIT}=none")
    path = folder / LIBRARY
    if not os.path.isfile(path):
        return NativePart(None, why_not=_why_not_built(folder))
    try:
        library = ctypes.CDLL(str(path))
        # both functions return int32_t and take no argument
        abi, best = int(library.minivllm_abi()), int(library.minivllm_isa())
    except (OSError, AttributeError) as exc:  # the file is no shared library, or lacks one of the functions
        return NativePart(None, why_not=f"{brief(str(exc), 240)}: reinstall")
    if abi != ABI:
        return NativePart(None, why_not=f"{path} has ABI {abi}, this package needs {ABI}: reinstall")
    if best == 0:
        return NativePart(None, why_not="this CPU does not have all of AVX2, FMA, F16C and BMI2")
    return NativePart(library, ISAS[min(best, ISAS.index(limit))])


def _choice(environ: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = environ.get(name, "")
    if value and value not in known:
        raise ConfigError(
            f"the environment variable {name}={shown(value)}: expected {', '.join(known)}, or leave it unset"
        )
    return value


def _why_not_built(folder: Path) -> str:
    try:
        return (folder / REASON).read_text(encoding="utf-8").strip() or NOT_BUILT
    except OSError:
        return NOT_BUILT
