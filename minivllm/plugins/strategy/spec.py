"""What the built-in decoding strategies say about themselves."""

from minivllm.spec import Spec

PARALLEL = Spec(
    impl="minivllm.plugins.strategy.parallel:Parallel",
    api=(1, 0),
    summary="n independent samples of one prompt, whose blocks they share",
)
SINGLE = Spec(
    impl="minivllm.plugins.strategy.single:Single",
    api=(1, 0),
    summary="one sample",
)
