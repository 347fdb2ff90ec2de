"""What the built-in model architectures say about themselves.

``architecture`` is what config.json calls it; ``model_type`` picks transformers' config class.
"""

from minivllm.spec import ANY, Spec

WINDOWS = ("use_sliding_window", "max_window_layers")  # transformers makes ``layer_types`` of them, which is read

LLAMA = Spec(
    impl="minivllm.plugins.model.llama:Llama",
    api=(1, 1),
    summary="Llama 2 and 3",
    limits={"architecture": {"LlamaForCausalLM"}, "model_type": {"llama"}, "device": ANY, "dtype": ANY},
    features=frozenset({"batch_invariant"}),  # made of the layers it is given
    traits={"ignores": ("pretraining_tp",)},  # cut the products of old versions into pieces, with the same result
)
QWEN2 = Spec(
    impl="minivllm.plugins.model.qwen2:Qwen2",
    api=(1, 1),
    summary="Qwen 2 and 2.5",
    limits={"architecture": {"Qwen2ForCausalLM"}, "model_type": {"qwen2"}, "device": ANY, "dtype": ANY},
    features=frozenset({"batch_invariant"}),  # made of the layers it is given
    traits={"ignores": WINDOWS},
)
QWEN3 = Spec(
    impl="minivllm.plugins.model.qwen3:Qwen3",
    api=(1, 1),
    summary="Qwen 3, dense; pocket is one",
    limits={"architecture": {"Qwen3ForCausalLM"}, "model_type": {"qwen3"}, "device": ANY, "dtype": ANY},
    features=frozenset({"batch_invariant"}),  # made of the layers it is given
    traits={"ignores": WINDOWS},
)
