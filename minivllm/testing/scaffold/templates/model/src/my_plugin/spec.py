"""What the architecture says about itself.  ``architecture`` and ``model_type`` are what config.json calls it."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(2, 3),
    summary="Arcee: Llama with squared ReLU in the MLP",
    limits={"architecture": {"ArceeForCausalLM"}, "model_type": {"arcee"}, "device": ANY, "dtype": ANY},
)
