"""The spec of the drafter."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 3),
    summary="drafts the tokens that followed the last occurrence of the last token",
    limits={"device": ANY},
)
