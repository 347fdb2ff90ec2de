"""The spec of the architecture.  ``architecture`` and ``model_type`` are its names in config.json."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(2, 8),
    summary="Arcee: Llama with squared ReLU in the MLP",
    limits={"architecture": {"ArceeForCausalLM"}, "model_type": {"arcee"}, "device": ANY, "dtype": ANY},
)
