"""The arguments of an engine besides its executor: the plug-ins chosen by name, and the cache options."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .events import EngineEvents

if TYPE_CHECKING:
    from minivllm.core.interfaces.adapters import AdapterFiles
    from minivllm.core.interfaces.evictor import Evictor, EvictorContext
    from minivllm.core.interfaces.predictor import Predictor, PredictorContext
    from minivllm.core.interfaces.sampling import Processor, Row, Sampler
    from minivllm.core.interfaces.scheduler import SchedulerContext, SchedulerPolicy
    from minivllm.core.interfaces.strategy import DecodingStrategy

    from .request import Seq

    # (sequence, its request's functions, the sampler, its row) -> draw(logits f32 [V], ids so far) -> token
    HostSampler = Callable[[Seq, Sequence[Callable[..., Any]], Sampler, Row | None], Any]


def monotonic() -> float:
    return time.monotonic()  # looked up in each call, because tests replace it in this module


@dataclass(frozen=True)
class EngineParts:
    """Host plug-ins of an engine, with its events, clock and energy account."""

    policy: Callable[[SchedulerContext], SchedulerPolicy]
    evictor: Callable[[EvictorContext], Evictor]  # called once for each KV group
    processors: Sequence[tuple[str, Processor]]  # (name, instance) in order, the sampler last
    # The first strategy that accepts a request runs it.
    strategies: Sequence[tuple[str, DecodingStrategy]]
    # draws for requests with ``logits_processors``; None means that such requests are refused
    host_sampler: HostSampler | None = None
    # the compiled grammars of requests (``runtime.structured.service.Grammars``)
    grammars: Any = None
    # listeners may subscribe before the engine exists
    events: EngineEvents = field(default_factory=EngineEvents)
    # folder -> the files of an adapter, checked (RequestError); needed if adapters are served
    check_adapter: Callable[[str], AdapterFiles] | None = None
    now: Callable[[], float] = monotonic  # the engine's clock, seconds
    predictor: Callable[[PredictorContext], Predictor] | None = None  # None predicts nothing
    energy: Any = None  # the account of joules (``runtime.energy.account.EnergyAccount``)


@dataclass(frozen=True)
class CacheOptions:
    """Options of the KV cache."""

    # sliding window of each KV group in tokens; None = all tokens
    windows: Sequence[int | None] = (None,)
    prefix_caching: bool = True
    partial_hits: bool = True  # whether a cached block is copied if only its first tokens match
