"""What the built-in decoding strategies say about themselves."""

from minivllm.spec import Spec

BEAM = Spec(
    impl="minivllm.plugins.strategy.beam:Beam",
    api=(1, 3),
    summary="beam search: width, length penalty, early stopping as in transformers",
)
PARALLEL = Spec(
    impl="minivllm.plugins.strategy.parallel:Parallel",
    api=(1, 3),
    summary="n independent samples of one prompt, or the n likeliest of best_of, whose blocks they share",
)
SINGLE = Spec(
    impl="minivllm.plugins.strategy.single:Single",
    api=(1, 3),
    summary="one sample",
)
