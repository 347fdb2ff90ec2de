"""Energy: counters of joules (``counters``), and the share of each request (``account``).

    counters    NVML's total energy of a GPU, Linux's RAPL of a CPU, or the reason why there is no counter
    account     the joules of a busy engine, divided among its requests, and the joules of an idle engine

This package does not import torch.  Counters are read only with the option ``energy``.
"""
