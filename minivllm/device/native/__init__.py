"""The native part, which is a shared library of CPU kernels in C++ that ctypes calls.

``hatch_build.py`` in the root of the sources compiles it when the package is installed.  ``program.cpp`` holds the C
ABI and is compiled for any x86-64.  ``kernels.cpp`` is compiled once for each instruction set, in a namespace with the
name of the set.  ``library.py`` loads the result.
"""
