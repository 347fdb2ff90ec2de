"""What the drafter says about itself."""

from minivllm.plugin import ANY, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 0),
    summary="drafts what followed when the last token was there before",
    limits={"device": ANY},
)
