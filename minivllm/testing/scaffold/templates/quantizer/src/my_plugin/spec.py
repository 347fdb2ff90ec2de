"""What the quantizer says about itself."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 6),
    summary="int8 weights with a scale an output row, made while loading",
    limits={
        "device": ANY,
        "sm": ANY,
        "dtype": {"bfloat16", "float16", "float32"},
        "checkpoint": {"none"},  # the method that config.json names, if the weights come quantized
    },
    traits={"bits": 8},
)
