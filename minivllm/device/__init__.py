"""Computations on tensors, which are the worker, layers, kernels, the native library and the reading of checkpoints."""
