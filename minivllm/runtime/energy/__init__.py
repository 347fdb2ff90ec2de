"""Joules: counters of a machine (``counters``), and whose they were of an engine's requests (``account``).

    counters    NVML's total energy of a GPU, Linux's RAPL of a CPU: what there is, and why there is none
    account     what a counter gave while an engine was busy, shared among its requests; what it gave else

Nothing here imports torch, and nothing is read unless it was asked for (``energy`` among the options).
"""
