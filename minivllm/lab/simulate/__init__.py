"""The engine over a trace on a virtual clock, whose steps take what steps of a real engine were measured to take.

    calibrate.py   a real engine under many kinds of steps      fit.py       costs of steps from what was measured
    device.py      the device that costs time and no more       drive.py     a trace through an engine, real or not
    cases.py       what is run: configurations, bounds          figures.py   percentiles, throughput, goodput
    leap.py        steps of which all is known, without the turns of the engine's loop

Planner, block pools, scheduler and evictor are the engine's own (``lab.replay.serve`` builds it); requests see the
clock.
"""
