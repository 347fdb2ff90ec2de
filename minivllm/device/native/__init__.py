"""The native part: kernels for CPUs in C++, one shared library that ctypes calls, found by ``library.py``.

``hatch_build.py``, in the root of the sources, compiles it when the package is installed.  ``program.cpp`` is compiled
for any x86-64 and holds the C ABI; ``kernels.cpp`` is compiled once for each instruction set, in a namespace of its
name.
"""
