"""The spec of the tokenizer."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 0),
    summary="a token for each byte of UTF-8, and two special tokens",
    limits={"format": ANY, "tokenizer_class": ANY},
    features=frozenset({"lossless"}),
)
