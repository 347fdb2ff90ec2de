"""Describe the built-in routers."""

from minivllm.registration.spec import Spec

HERE = "minivllm.plugins.router"

LEAST_TOKENS = Spec(
    impl=f"{HERE}.loads:LeastTokens",
    api=(1, 0),
    summary="the replica with the fewest prompt tokens of requests that have not ended",
)
PREFIX = Spec(
    impl=f"{HERE}.prefix:Prefix",
    api=(1, 0),
    summary="the replica that has to compute the least, by cached prefixes and waiting tokens",
    options=f"{HERE}.options:PrefixOptions",
)
ROUND_ROBIN = Spec(
    impl=f"{HERE}.loads:RoundRobin",
    api=(1, 0),
    summary="all replicas in turn",
)
SESSION = Spec(
    impl=f"{HERE}.session:SessionRouter",
    api=(1, 0),
    summary="the replica of the session; the least loaded one for a new session",
    options=f"{HERE}.options:SessionOptions",
    features=frozenset({"sticky"}),
)
