"""What an engine is made with, beside its executor: the parts that were chosen by name, and how its cache works."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .events import EngineEvents

if TYPE_CHECKING:
    from minivllm.core.interfaces.evictor import Evictor, EvictorContext
    from minivllm.core.interfaces.sampling import Processor, Row, Sampler
    from minivllm.core.interfaces.scheduler import SchedulerContext, SchedulerPolicy
    from minivllm.core.interfaces.strategy import DecodingStrategy

    from .request import Seq

    # (sequence, its request's functions, the sampler, its row) -> draw(logits f32 [V], ids so far) -> token
    HostSampler = Callable[[Seq, Sequence[Callable[..., Any]], Sampler, Row | None], Any]


def monotonic() -> float:
    return time.monotonic()  # looked up in each call: a test puts a clock of its own in this module


@dataclass(frozen=True)
class EngineParts:
    """Plug-ins of the host, and what stands round the engine."""

    policy: Callable[[SchedulerContext], SchedulerPolicy]
    evictor: Callable[[EvictorContext], Evictor]  # called once for each KV group
    processors: Sequence[tuple[str, Processor]]  # (name, instance) in order, the sampler last
    strategies: Sequence[tuple[str, DecodingStrategy]]  # the first that takes a request has it
    # for requests with ``logits_processors``; None: they are refused
    host_sampler: HostSampler | None = None
    # the compiled grammars of requests (``runtime.structured.service.Grammars``)
    grammars: Any = None
    # who listens may subscribe before there is an engine
    events: EngineEvents = field(default_factory=EngineEvents)
    now: Callable[[], float] = monotonic  # the engine's clock, seconds
    energy: Any = None  # the account of joules (``runtime.energy.account.EnergyAccount``)


@dataclass(frozen=True)
class CacheOptions:
    """How the KV cache keeps what it has."""

    windows: Sequence[int | None] = (None,)  # tokens that each KV group looks back; None: all
    prefix_caching: bool = True
    partial_hits: bool = True  # a block that is equal in its first tokens is copied
