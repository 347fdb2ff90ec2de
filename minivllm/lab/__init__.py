"""Offline tools for experiments: benchmarks, replay, simulation, traces, quantization, comparison with transformers."""
