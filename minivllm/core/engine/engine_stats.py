"""The statistics that ``Engine.stats`` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Capacity
    from minivllm.core.timing import StepClock

    from .adapters import EngineAdapters
    from .cache import KVCache
    from .compression import Compression
    from .images import Images
    from .planner import Planner
    from .predictions import Predictions
    from .publisher import Publisher
    from .slots import Slots
    from .speculation import Speculation
    from .weights import Weights


class CountedEngine(Protocol):
    """The attributes of an engine that the statistics read."""

    capacity: Capacity
    slots: Slots
    cache: KVCache
    planner: Planner
    publisher: Publisher
    weights: Weights
    clock: StepClock
    finished: int
    speculation: Speculation | None
    predictions: Predictions | None
    compression: Compression | None
    adapters: EngineAdapters | None
    images: Images | None


def engine_stats(engine: CountedEngine) -> dict[str, Any]:
    """Return the statistics of an engine by name.  Optional components such as adapters have entries only if the engine
    has them."""
    stats: dict[str, Any] = {
        "running": engine.slots.n_running,
        "waiting": engine.planner.n_waiting + loading(engine),
        "finished": engine.finished,
        **engine.publisher.stats(),
        "preemptions": engine.planner.preemptions,
        **engine.cache.stats(),
        "prefix_waits": engine.planner.underway.waits,
        "weights": engine.weights.stats(),
        **engine.clock.summary(),
    }
    if engine.speculation:
        stats["speculation"] = engine.speculation.summary()
    if engine.predictions:
        stats["predictor"] = engine.predictions.stats()
    if engine.compression:
        stats["compression"] = engine.compression.stats()
    if engine.cache.checkpoints is not None:
        stats |= engine.cache.checkpoints.stats(engine.capacity.state_bytes)
    for part in (engine.cache.tiers, engine.adapters, engine.images):
        if part is not None:
            stats |= part.stats()
    return stats


def loading(engine: CountedEngine) -> int:
    """Return how many sequences wait until their LoRA adapter, or their KV pages from a storage tier, are loaded."""
    n = 0
    for part in (engine.cache.tiers, engine.adapters):
        if part is not None:
            n += len(part.waits)
    return n
