"""The spec of the evictor."""

from minivllm.plugin import Spec

SIEVE = Spec(
    impl="minivllm_sieve.sieve:Sieve",
    api=(1, 0),
    summary="SIEVE (NSDI 2024): spares what was hit since its hand last came, without moving it",
)
