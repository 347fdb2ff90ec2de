"""Specs of the built-in evictors."""

from functools import partial

from minivllm.registration.spec import Spec

HERE = "minivllm.plugins.evictor"
_evictor = partial(Spec, api=(1, 2))

LRU = _evictor(
    impl=f"{HERE}.lru:Lru",
    summary="evicts the block that was used longest ago",
    priority=10,
    traits={"order": "lru"},
)
LFU = _evictor(
    impl=f"{HERE}.lfu:Lfu",
    summary="evicts the block that was hit least often",
    traits={"order": "lfu"},
)
FIFO = _evictor(
    impl=f"{HERE}.fifo:Fifo",
    summary="evicts the block that was cached longest ago",
    traits={"order": "fifo"},
)
S3FIFO = _evictor(
    impl=f"{HERE}.s3fifo:S3Fifo",
    summary="S3-FIFO (SOSP 2023): blocks that are used once leave through a small queue",
    options=f"{HERE}.options:S3FifoOptions",
)
PREFIX_DEPTH = _evictor(
    impl=f"{HERE}.prefix_depth:PrefixDepth",
    summary="evicts the deepest block, so that the beginnings of prompts stay",
    options=f"{HERE}.options:PrefixDepthOptions",
)
TAIL_LRU = _evictor(
    impl=f"{HERE}.tail_lru:TailLru",
    summary="tail-optimised LRU (2025): first the ends of sessions whose next request stays within its budget",
    options=f"{HERE}.options:TailLruOptions",
)
AGENT_TTL = _evictor(
    impl=f"{HERE}.agent_ttl:AgentTtl",
    summary="lru, but keeps blocks of a session for some time after a turn, as long as the next one is expected",
    options=f"{HERE}.options:AgentTtlOptions",
)
COST_AWARE = _evictor(
    impl=f"{HERE}.cost_aware:CostAware",
    summary="evicts the block with the least cost x learned chance of reuse / size, aged (GreedyDual)",
    options=f"{HERE}.options:CostAwareOptions",
)
