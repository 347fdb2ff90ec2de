"""The specs of the KV format, and of an attention back end that reads it."""

from minivllm.plugin import ANY, MultipleOf, Spec

MY_PLUGIN = Spec(
    impl="my_plugin.plugin:MyPlugin",
    api=(1, 0),
    summary="keys and values in int8, with a scale a token and head",
    limits={
        "device": ANY,
        "sm": ANY,
        "dtype": {"bfloat16", "float16", "float32"},
        "holds": frozenset(),  # it stores no dtype without loss, so that it is only used by name
    },
)
ATTENTION = Spec(
    impl="minivllm.plugins.attention.sdpa:Sdpa",
    api=(1, 0),
    summary="the built-in sdpa over the KV format my-plugin/my-plugin",
    limits={
        "device": ANY,
        "sm": ANY,
        "dtype": {"bfloat16", "float16", "float32"},
        "kv_format": {"my-plugin/my-plugin"},
        "dim_qk": ANY,
        "dim_v": ANY,
        "queries_per_kv": ANY,
        "block": MultipleOf(1),
    },
    features=frozenset({"sinks", "softcap", "window"}),
    prefer={"block": 16},
    traits={"graph": "none", "plan": "host"},
)
