"""What the policy says about itself."""

from minivllm.plugin import Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 2),
    summary="least work first, with ageing",
    options="my_plugin.options:Options",
    features=frozenset({"starvation_free"}),  # a promise, which the kit tests; take it out if the policy may starve
)
