"""Compiles the native part of minivllm, a shared library for CPUs, when a wheel is built or the package is installed.

    pip install .            into the wheel               MINIVLLM_NATIVE=0   without the native part
    pip install -e .         into minivllm/device/native  MINIVLLM_NATIVE=1   an error where it cannot be compiled
    python hatch_build.py    the same, for who changes the C++ sources

The library is called by ctypes and knows nothing of Python, so one wheel serves all versions of it
(``py3-none-linux_x86_64``).  Where it cannot be compiled, for want of a compiler or of x86-64 and Linux, the wheel is
one of Python alone (``py3-none-any``) with a text file that says why; ``minivllm explain`` shows it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # python hatch_build.py needs no hatchling
    BuildHookInterface = object

NATIVE = Path(__file__).resolve().parent / "minivllm" / "device" / "native"
LIBRARY, REASON = "_cpu.so", "_why_not.txt"
SWITCH = "MINIVLLM_NATIVE"
PLATFORM = "linux_x86_64"
COMPILERS = ("c++", "g++", "clang++")  # after $CXX
SECONDS = 600.0  # for one file

# no -ffast-math: sums stay in the order in which they are written.  -ffp-contract: where a product and a sum are fused
# is written too, so that compilers agree.  errno and traps would keep loops from being vectorized.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-fvisibility=hidden",
         "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")  # fmt: skip
AVX2 = ("-DISA=avx2", "-mavx2", "-mfma", "-mf16c", "-mbmi2")
AVX512 = ("-DISA=avx512", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mbmi2",
          "-mprefer-vector-width=512")  # fmt: skip
OBJECTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (  # object, source, flags beside FLAGS
    ("program.o", "program.cpp", ()),
    ("parts.o", "parts.cpp", ()),
    ("rings.o", "rings.cpp", ()),
    ("avx2.o", "kernels.cpp", AVX2),
    ("avx512.o", "kernels.cpp", AVX512),
    ("recurrent_avx2.o", "recurrent.cpp", AVX2),
    ("recurrent_avx512.o", "recurrent.cpp", AVX512),
)
LINK = ("-shared", "-pthread", "-Wl,-z,defs")  # what is not defined is an error now, not when it is loaded
EXPORTS = "{ global: minivllm_*; local: *; };\n"  # else those of a static libstdc++ too, which meet torch's
STATIC = ("-static-libstdc++", "-static-libgcc")  # so that the library needs no compiler's libraries where it runs


class NotBuilt(Exception):
    """Why there is no library, in a line."""


def platform_tag() -> str:
    """Return the platform of this Python as the name of a wheel spells it, such as linux_x86_64."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def build(folder: Path, environ: Mapping[str, str]) -> Path:
    """Leave either the library or the reason why there is none in ``folder``; which one is the result.  NotBuilt where
    ``MINIVLLM_NATIVE=1`` wants the library, or for a value of it that is not known."""
    asked = environ.get(SWITCH, "")
    if asked not in ("", "0", "1"):
        raise NotBuilt(f"{SWITCH}={asked!r}: expected 0 (none), 1 (an error if it cannot be built), or leave it unset")
    made, other = folder / LIBRARY, folder / REASON
    try:
        if asked == "0":
            raise NotBuilt(f"it was built with {SWITCH}=0: reinstall without")
        compile_library(made, environ)
    except NotBuilt as exc:
        if asked == "1":
            raise
        made, other = other, made
        made.write_text(f"{exc}\n", encoding="utf-8")
    other.unlink(missing_ok=True)  # the two never contradict each other
    return made


def compile_library(target: Path, environ: Mapping[str, str]) -> None:
    """NotBuilt with the compiler's first error.  The library appears whole or not at all, under a new inode: a process
    that runs the old one goes on with it."""
    if platform_tag() != PLATFORM:
        raise NotBuilt(f"it is made for {PLATFORM} only, and this Python is one of {platform_tag()}")
    compiler = find_compiler(environ)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as temporary:
        objects = [f"{temporary}/{name}" for name, _, _ in OBJECTS]
        commands = [
            [*compiler, *FLAGS, *flags, "-c", source, "-o", made]
            for (_, source, flags), made in zip(OBJECTS, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(commands)) as pool:
            list(pool.map(run, commands))
        made, exports = f"{temporary}/{LIBRARY}", Path(temporary) / "exports.map"
        exports.write_text(EXPORTS, encoding="utf-8")
        link = [*compiler, *LINK, f"-Wl,--version-script={exports}", *objects, "-o", made]
        try:
            run([*link, *STATIC])
        except NotBuilt:  # static libraries are a package of their own on some systems
            run(link)
        os.replace(made, target)


def find_compiler(environ: Mapping[str, str]) -> list[str]:
    """Return the command of the C++ compiler: ``$CXX``, which may have arguments, or the first one on the path.

    NotBuilt if there is none."""
    if environ.get("CXX", "").strip():
        return shlex.split(environ["CXX"])
    for name in COMPILERS:
        if found := shutil.which(name, path=environ.get("PATH")):
            return [found]
    raise NotBuilt(f"no C++ compiler was found ($CXX, {', '.join(COMPILERS)}): install one and reinstall")


def run(command: Sequence[str]) -> None:
    """Run a command of the compiler in the folder of the sources.  NotBuilt if it fails.

    The sources are named relative to the folder, so no path of this machine gets into the library."""
    try:
        done = subprocess.run(
            command, cwd=NATIVE, env={**os.environ, "LC_ALL": "C"}, capture_output=True, timeout=SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotBuilt(f"the C++ compiler did not run: {one_line(str(exc))}") from exc
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        said = next((line for line in lines if "error" in line), lines[-1] if lines else "it says nothing")
        raise NotBuilt(f"the C++ compiler {command[0]} failed with status {done.returncode}: {one_line(said)}")


def one_line(text: str, most: int = 300) -> str:
    return " ".join(text.split())[:most]


class NativeHook(BuildHookInterface):
    """hatchling's: a wheel gets the library without a trace in the sources, an editable install has it there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            self.build(NATIVE)
            return
        self.temporary = tempfile.TemporaryDirectory(prefix="minivllm-native-")
        made = self.build(Path(self.temporary.name))
        build_data["force_include"][str(made)] = f"minivllm/device/native/{made.name}"
        if made.name == LIBRARY:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"

    def build(self, folder: Path) -> Path:
        try:
            return build(folder, os.environ)
        except NotBuilt as exc:
            self.app.abort(f"The native part was not built: {exc}")  # ends the process
            raise

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.temporary.cleanup()


def is_new(library: Path) -> bool:
    """Whether the library was made after its sources, and this file, were changed."""
    sources = [*NATIVE.glob("*.cpp"), *NATIVE.glob("*.h"), Path(__file__)]
    return library.is_file() and library.stat().st_mtime > max(path.stat().st_mtime for path in sources)


def main() -> None:
    if not (os.environ.get(SWITCH) or os.environ.get("CXX")) and is_new(NATIVE / LIBRARY):
        print(f"{NATIVE / LIBRARY} is newer than its sources; delete it, or set CXX, to compile it again")
        return
    start = time.perf_counter()
    try:
        made = build(NATIVE, os.environ)
    except NotBuilt as exc:
        sys.exit(f"not built: {exc}")
    if made.name == REASON and os.environ.get(SWITCH) != "0":
        sys.exit(f"not built: {made.read_text(encoding='utf-8').strip()}")
    print(f"{made}: written in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
