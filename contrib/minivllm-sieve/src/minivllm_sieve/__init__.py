"""SIEVE eviction for minivllm's prefix cache.  Nothing is imported here: asking for the spec must cost nothing."""
