"""What the built-in evictors say about themselves."""

from minivllm.registration.spec import Spec

HERE = "minivllm.plugins.evictor"

LRU = Spec(
    impl=f"{HERE}.lru:Lru",
    api=(1, 1),
    summary="gives up what was used longest ago",
    priority=10,
    traits={"order": "lru"},
)
LFU = Spec(
    impl=f"{HERE}.lfu:Lfu",
    api=(1, 1),
    summary="gives up what was hit least often",
    traits={"order": "lfu"},
)
FIFO = Spec(
    impl=f"{HERE}.fifo:Fifo",
    api=(1, 1),
    summary="gives up what was cached longest ago",
    traits={"order": "fifo"},
)
S3FIFO = Spec(
    impl=f"{HERE}.s3fifo:S3Fifo",
    api=(1, 1),
    summary="S3-FIFO (SOSP 2023): a small queue lets blocks pass that are used once",
    options=f"{HERE}.options:S3FifoOptions",
)
PREFIX_DEPTH = Spec(
    impl=f"{HERE}.prefix_depth:PrefixDepth",
    api=(1, 1),
    summary="gives up the deepest block, so that beginnings stay",
    options=f"{HERE}.options:PrefixDepthOptions",
)
COST_AWARE = Spec(
    impl=f"{HERE}.cost_aware:CostAware",
    api=(1, 1),
    summary="gives up what is worth least: cost x learned chance of reuse / size, fading (GreedyDual)",
    options=f"{HERE}.options:CostAwareOptions",
)
