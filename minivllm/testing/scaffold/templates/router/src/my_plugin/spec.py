"""The spec of the router."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 0),
    summary="chooses the replica with the fewest requests, and of equal ones the one chosen longest ago",
)
