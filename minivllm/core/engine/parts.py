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

    # draws a token on the host: (sequence, its request's functions, the sampler, its row) -> a
    # function (logits f32 [V], token ids so far) -> token id
    HostSampler = Callable[[Seq, Sequence[Callable[..., Any]], Sampler, Row | None], Any]


def monotonic() -> float:
    return time.monotonic()  # looked up in each call, because tests replace it in this module


@dataclass(frozen=True)
class EngineParts:
    """The plug-ins of an engine that run on the host, with its events and its clock."""

    policy: Callable[[SchedulerContext], SchedulerPolicy]
    evictor: Callable[[EvictorContext], Evictor]  # makes the evictor of each KV group
    # (name, logits processor) in the order of application, the sampler last
    processors: Sequence[tuple[str, Processor]]
    # (name, decoding strategy); the first strategy that accepts a request runs it
    strategies: Sequence[tuple[str, DecodingStrategy]]
    # draws the tokens of requests with ``logits_processors``; None refuses such requests
    host_sampler: HostSampler | None = None
    # compiles the grammars of requests (``runtime.structured.service.Grammars``); None without a
    # grammar plug-in
    grammars: Any = None
    # the engine's events; listeners may subscribe before the engine exists
    events: EngineEvents = field(default_factory=EngineEvents)
    # checks a folder and returns the files of the LoRA adapter in it (RequestError); None if no
    # adapters are served
    check_adapter: Callable[[str], AdapterFiles] | None = None
    now: Callable[[], float] = monotonic  # the engine's clock, in seconds
    predictor: Callable[[PredictorContext], Predictor] | None = None  # None predicts nothing
    # measures the joules of requests (``runtime.energy.account.EnergyAccount``); None without
    # measurement
    energy: Any = None


@dataclass(frozen=True)
class CacheOptions:
    """Options of the KV cache."""

    # sliding window of each KV group in tokens; None means that a group attends to all tokens
    windows: Sequence[int | None] = (None,)
    prefix_caching: bool = True
    # whether a cached block is copied if only its first tokens match a prompt
    partial_hits: bool = True
