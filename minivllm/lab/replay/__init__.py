"""Replay a trace without a model, to compare schedulers and evictors on real traffic in minutes on one core.

    blocks.py      the cache alone: blocks in, hits out       optimum.py     Belady's offline optimum, as an evictor
    serve.py       the engine's own planner, blocks, scheduler and evictor, with a device that only counts
    compare.py     compare several configurations on one trace, as a table

Time is counted in steps.  ``minivllm.lab.simulate`` has a clock in seconds, from measured costs of steps.
"""
