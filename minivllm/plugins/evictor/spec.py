"""What the built-in evictors say about themselves."""

from minivllm.spec import Spec

LRU = Spec(
    impl="minivllm.plugins.evictor.lru:Lru",
    api=(1, 0),
    summary="gives up what was used longest ago",
    priority=10,
    traits={"order": "lru"},
)
