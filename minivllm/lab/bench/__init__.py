"""Benchmarks: measure the speed and quality of a configuration on a machine, and test whether two of them differ.

workload    requests, generated from a seed or read from a file
client      send requests to a server over HTTP;  direct: to an engine in this process
serving     a closed loop, an open loop, and the search for the highest sustainable rate
offline     latency, throughput, memory and startup of an engine in this process
answers     times of requests as results with the names of vLLM's benchmark
repeats     results of several runs as medians with confidence intervals; statistics: intervals and tests
state       clock, power, energy and load of the machine during a measurement
ablate      remove one part of a configuration at a time
"""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # a result of a run (names and values), or an object inside a result; not to be changed
Rows = Sequence[Row]
Result = dict[str, Any]  # a result of a run (names and values), which the function that creates it fills in
