"""The spec of the quantizer."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 7),
    summary="int8 weights with a scale for each output row, quantized while loading",
    limits={
        "device": ANY,
        "sm": ANY,
        "dtype": {"bfloat16", "float16", "float32"},
        "checkpoint": {"none"},  # the quantization method in config.json, "none" for plain weights
    },
    traits={"bits": 8},
)
