"""What an engine tells whoever listens: one object, made before the engine and handed to each of its parts.

    events.request_added.subscribe(listener)        somebody wants to know
    events.request_added(request)                   the engine says it; without a listener that costs next to nothing

A listener is called on the thread of the engine's loop, within the turn that it hears of, and what it is given is the
engine's own: it reads and changes nothing.  One that raises breaks the step, so code of others is called through
something that catches it (``runtime.hooks.bridge``).
"""

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
    """Something that happens.  Listeners are called in the order in which they subscribed."""

    __slots__ = ("listeners",)

    def __init__(self) -> None:
        self.listeners: tuple[Callable[P, object], ...] = ()

    def subscribe(self, listener: Callable[P, object]) -> None:
        self.listeners = (*self.listeners, listener)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for listener in self.listeners:
            listener(*args, **kwargs)


class WrappedCall(Generic[P, T]):
    """A part of a turn that listeners stand round: each is given the call and its arguments, and returns its result.
    The first that subscribed is the innermost."""

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
    """Each attribute is one kind of event; its type says what a listener is given."""

    def __init__(self) -> None:
        # A request was accepted; it has ended, in whatever way, once for each that was added.
        self.request_added: Event[[Request]] = Event()
        self.request_finished: Event[[Request]] = Event()
        # A running sequence has lost its slot and its blocks; of a beam search one for all of its beams.
        self.sequence_preempted: Event[[Seq]] = Event()
        # Tokens in the middle of answers with ``Request.stream``: (stream i64 [n], sample i32 [n], token i32 [n]).
        self.tokens_streamed: Event[[np.ndarray, np.ndarray, np.ndarray]] = Event()
        # (KV group, keys u64 [n]) of blocks that a prefix hit finds from now on, or finds no longer: their room was
        # needed, or they were dropped for another reason.
        self.blocks_stored: Event[[int, np.ndarray, BlockInfo]] = Event()
        self.blocks_evicted: Event[[int, np.ndarray]] = Event()
        self.blocks_dropped: Event[[int, np.ndarray]] = Event()
        # Planning and submitting a step (None: there was none), and handing its result to its sequences.
        self.planning: WrappedCall[[], StepPlan | None] = WrappedCall()
        self.publishing: WrappedCall[[Flight, StepResult], None] = WrappedCall()
        # A turn of the loop has ended, with its times in the engine's clock.
        self.turn_ended: Event[[]] = Event()
        # ``Engine.stats`` is asked for: a listener may add figures of its own to the dict.
        self.stats_asked: Event[[dict[str, Any]]] = Event()
        # The engine has given everything back; the error is what ended it before that, or None.
        self.engine_stopped: Event[[str | None]] = Event()
