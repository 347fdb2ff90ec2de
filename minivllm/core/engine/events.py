"""Events that an engine reports to listeners.  One ``EngineEvents`` object is created before the engine and passed to
its components.

    events.request_added.subscribe(listener)        a listener subscribes
    events.request_added(request)                   the engine reports it, almost free of cost without listeners

A listener runs on the thread of the engine's loop, within the turn that it reports on.  It may read the arguments but
must not change them.  A listener that raises breaks the step, so user code is called through a wrapper that catches
its errors (``runtime.hooks.bridge``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    import numpy as np

    from minivllm.core.interfaces.evictor import BlockInfo
    from minivllm.core.interfaces.plan import StepPlan, StepResult

    from .flight import Flight
    from .request import Request, Seq

P = ParamSpec("P")
T = TypeVar("T")


class Event(Generic[P]):
    """An event of the engine.  Calling it calls all listeners, in the order of their subscription."""

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: tuple[Callable[P, object], ...] = ()

    def subscribe(self, listener: Callable[P, object]) -> None:
        self.listeners = (*self.listeners, listener)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self.listeners:
            listener(*args, **kwargs)


class WrappedCall(Generic[P, T]):
    """A call of the engine that listeners wrap.  Each wrapper receives the call and its arguments, and returns the
    call's result.  The wrapper that subscribed first is the innermost."""

    __slots__ = ("wrappers",)

    def __init__(self) -> None:
        self.wrappers: tuple[Callable[Concatenate[Callable[P, T], P], T], ...] = ()

    def subscribe(self, wrapper: Callable[Concatenate[Callable[P, T], P], T]) -> None:
        self.wrappers = (*self.wrappers, wrapper)

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        for wrapper in self.wrappers:
            call = partial(wrapper, call)
        return call(*args, **kwargs)


class EngineEvents:
    """Events of an engine.  Each attribute is one kind of event, and its type gives the arguments of a listener."""

    def __init__(self) -> None:
        # A request was accepted; an accepted request has ended, with or without an error.
        self.request_added: Event[[Request]] = Event()
        self.request_finished: Event[[Request]] = Event()
        # A running sequence was preempted; reported once for all beams of a search.
        self.sequence_preempted: Event[[Seq]] = Event()
        # New tokens of requests with ``Request.stream``, except for the last token of an answer:
        # (stream i64 [n], sample i32 [n], token id i32 [n]).
        self.tokens_streamed: Event[[np.ndarray, np.ndarray, np.ndarray]] = Event()
        # (KV group, keys u64 [n]) of blocks that entered the prefix cache, were evicted from it for
        # lack of space, or were removed from it for another reason.
        self.blocks_stored: Event[[int, np.ndarray, BlockInfo]] = Event()
        self.blocks_evicted: Event[[int, np.ndarray]] = Event()
        self.blocks_dropped: Event[[int, np.ndarray]] = Event()
        # The call that plans and submits a step and returns its plan (or None), and the call that
        # processes the result of a step.
        self.planning: WrappedCall[[], StepPlan | None] = WrappedCall()
        self.publishing: WrappedCall[[Flight, StepResult], None] = WrappedCall()
        # One iteration of the engine's loop has ended; its times are in the engine's clock.
        self.turn_ended: Event[[]] = Event()
        # ``Engine.stats`` is called; a listener may add entries to the dict.
        self.stats_asked: Event[[dict[str, Any]]] = Event()
        # The engine was stopped; the argument is the error with which it had ended before, or None.
        self.engine_stopped: Event[[str | None]] = Event()
