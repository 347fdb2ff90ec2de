"""The experimenter's bench: what a configuration does on a machine, and whether two of them differ.

workload    requests: generated from a seed, or read from a file
client      asks a server over HTTP;  direct: asks an engine in this process
serving     closed loop, open loop, the search for the knee
offline     latency, throughput, memory, startup of an engine in this process
answers     timings of requests -> figures with the names that vLLM gives them
repeats     figures of several runs -> medians with confidence intervals; statistics: intervals and tests
state       clock, watts, joules, load of others while something is measured
ablate      one thing off at a time
"""
