"""The spec of the evictor."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 2),
    summary="evicts the block with the fewest hits, and of equal blocks the one freed longest ago",
)
