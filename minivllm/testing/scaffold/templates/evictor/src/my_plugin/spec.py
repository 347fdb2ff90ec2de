"""What the evictor says about itself."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 1),
    summary="gives up the block with the fewest hits, of equal ones the one freed longest ago",
)
