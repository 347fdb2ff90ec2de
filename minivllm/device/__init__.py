"""Everything that computes on tensors: the worker, layers, kernels, the native library, the reading of checkpoints."""
