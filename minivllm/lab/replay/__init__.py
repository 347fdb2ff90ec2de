"""Replay of a trace without a model: what a policy or an evictor does to real traffic, in minutes on one core.

    blocks.py      the cache alone: blocks in, hits out       optimum.py     Belady's offline optimum, as an evictor
    serve.py       the engine's own planner, blocks, policy and evictor, with a device that only counts
    compare.py     several configurations over one trace, as a table

There is no clock but the step; ``minivllm.lab.simulate`` has one that measured costs of steps drive.
"""
