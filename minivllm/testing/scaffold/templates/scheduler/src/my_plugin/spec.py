"""The spec of the policy."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 5),
    summary="least work first, with ageing",
    options="my_plugin.options:Options",
    features=frozenset({"starvation_free"}),  # a promise that the kit tests; remove it if a request may starve
)
