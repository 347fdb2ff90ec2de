"""What the built-in processors say about themselves."""

from minivllm.spec import ANY, Spec

LOGIT_BIAS = Spec(
    impl="minivllm.plugins.processor.logit_bias:LogitBias",
    api=(1, 0),
    summary="adds a number to the logits of chosen tokens",
    limits={"device": ANY},
    features=frozenset({"graph_safe"}),
)
PENALTIES = Spec(
    impl="minivllm.plugins.processor.penalties:Penalties",
    api=(1, 0),
    summary="repetition, presence and frequency penalties",
    limits={"device": ANY},
    features=frozenset({"graph_safe"}),
)
