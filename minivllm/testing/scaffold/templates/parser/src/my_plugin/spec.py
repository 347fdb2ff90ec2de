"""The spec of the parser."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 0),
    summary="finds reasoning in <r>, and calls as <call>NAME {...}</call>",
)
