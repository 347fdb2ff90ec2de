"""Simulate the engine on a trace with a virtual clock, which advances by measured costs of steps.

    calibrate.py   measure many kinds of steps of an engine      fit.py       fit costs to measured steps
    device.py      a device that only advances the clock         drive.py     run a trace on a real or simulated engine
    cases.py       configurations and bounds to simulate         figures.py   percentiles, throughput, goodput
    leap.py        take predictable steps without turns of the engine's loop
    uncertainty.py carry the error of the costs into the results

The engine has its own planner, block pools, scheduler and evictor (``lab.replay.serve`` builds it).  The times of
requests are those of the virtual clock.
"""
