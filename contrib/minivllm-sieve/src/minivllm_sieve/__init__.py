"""SIEVE eviction for minivllm's prefix cache.  This module imports nothing, so that reading the spec costs nothing."""
