"""The adapters of one process.  Threads load them during steps, and deltas copy them to the device.

verb "adapters" ──► a thread reads the folder ──► host memory, by number
Delta.adapter (place, number) ──► place on the device
Join.adapter ──► column of the slots

A method (``AdapterMethod``) reads and applies the adapters.  Each place has an adapter of one method.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minivllm.core.external_calls import as_exception
from minivllm.core.interfaces.adapter import (
    AdaptedLayer,
    AdaptedModel,
    AdapterContext,
    AdapterMemory,
    AdapterMethod,
)
from minivllm.core.interfaces.model import tap_points
from minivllm.core.interfaces.taps import read_only
from minivllm.device.layers.adapters import ActiveMethods, AdaptedTaps, LayerAdapters
from minivllm.device.layers.linear import Linear
from minivllm.device.loading.adapter_files import TYPE, AdapterChecks, method_of
from minivllm.device.loading.adapter_weights import AdapterReader
from minivllm.errors import MinivllmError, describe_error
from minivllm.limits import usable_cores
from minivllm.registry import build_part

from .capture import ALONE
from .pinned import PinnedSlabs, allocate

if TYPE_CHECKING:
    from minivllm.core.interfaces.attention import AttnMeta
    from minivllm.core.interfaces.executor import Wiring
    from minivllm.core.interfaces.model import Model, StepTaps
    from minivllm.core.interfaces.plan import Delta, StepPlan
    from minivllm.core.interfaces.quantizer import ModuleInfo
    from minivllm.device.layers.parts import ModelParts


THREADS = min(8, usable_cores())  # folders that are read at the same time


class LoadedAdapter(NamedTuple):
    """An adapter in host memory."""

    method: int
    weights: Any  # the result of ``AdapterMemory.read``
    points: tuple[str, ...]  # tap points (named places in the model) whose values the adapter changes


def make_methods(wiring: Wiring) -> dict[str, AdapterMethod]:
    """Build the methods of a wiring, by the ``peft_type`` of the folders that they read."""
    limits = wiring.adapters
    ctx = AdapterContext(limits.max_loras, limits.max_lora_rank)
    methods = {}
    for part in limits.methods:
        peft_type = str(part.traits[TYPE])
        methods[peft_type] = build_part("adapter", part, ctx)
    return methods


def rows_behind(wiring: Wiring) -> Callable[[ModuleInfo], int]:
    """Return the function that returns the number of further rows to allocate behind a linear layer's weight."""
    methods = () if wiring.batch_invariant else tuple(make_methods(wiring).values())
    return partial(_rows_behind, methods)


def _rows_behind(methods: Sequence[AdapterMethod], info: ModuleInfo) -> int:
    """Return the number of further rows behind a weight: that of the only method that needs rows, else 0."""
    wanted = [rows for method in methods if (rows := method.rows_behind(info))]
    return wanted[0] if len(wanted) == 1 else 0


def adapter_checks(wiring: Wiring) -> AdapterChecks:
    """Return the checks of folders on the host."""
    return AdapterChecks(make_methods(wiring))


class Adapters:
    """The adapters in host memory and on the device, and the adapter of each slot.

    ``column`` i32 [slots] has the place of each slot's adapter, -1 for none; ``of_slot`` is the same on the host.
    ``methods`` are the numbers of the memories by ``peft_type``, and ``of_place`` the loaded adapter of each place.
    With several methods, ``tables`` i32 [methods, places + 1] has a place's own number in the row of its method, and
    -1 elsewhere; the last column is -1."""

    def __init__(self, wiring: Wiring, cfg: Any, model: Model, parts: ModelParts, device: torch.device) -> None:
        slots = wiring.max_num_seqs + 1
        places = wiring.adapters.max_loras
        self.device = device
        if device.type == "cuda":
            # the device with its number, because the current device may differ in other threads
            self.device = torch.device("cuda", torch.cuda.current_device())
        layers = {name: module for name, module in parts.modules.items() if type(module) is Linear}
        made = make_methods(wiring)
        self.memories = self._make_memories(wiring, model, parts, device, made, layers)
        self.methods = {name: number for number, name in enumerate(made)}
        self.all = tuple(range(len(made)))
        self.active = ActiveMethods()
        for name, module in layers.items():
            found = LayerAdapters(name, self.active, self.memories)
            module.adapter = found if found.changes else None
        self.low_rank = self._low_rank_method(layers)
        options: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.column = torch.full((slots,), -1, **options)
        self.of_slot = np.full(slots, -1, np.int32)
        self.of_place: list[LoadedAdapter | None] = [None] * places
        self.pointed = False  # an adapter on the device changes tap points
        shape = len(made), places + 1
        self.tables = torch.full(shape, -1, **options)
        self.loaded: dict[int, LoadedAdapter] = {}
        # copies to a GPU that may not have finished, each with the event that follows it
        self._copied: deque[tuple[Any, LoadedAdapter]] = deque()
        self._pinned = PinnedSlabs(self._allocate)
        self._bytes = 0  # bytes of the pinned memory that was requested last
        self._sparing = threading.Lock()  # held while a spare piece is allocated, so that threads allocate one
        self._reader = AdapterReader(wiring, cfg, parts)
        self._orders: deque[tuple[int, str]] = deque()
        self._ended: deque[tuple[int, str | None]] = deque()
        self._wake = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._closed = False
        if self.device.type == "cuda":  # allocating pinned memory takes longer than a read
            _thread(self._reserve)

    def _make_memories(
        self,
        wiring: Wiring,
        model: Model,
        parts: ModelParts,
        device: torch.device,
        methods: Mapping[str, AdapterMethod],
        layers: Mapping[str, Linear],
    ) -> list[AdapterMemory]:
        """Allocate the memory of each method for the linear ``layers`` of a model."""
        points = {name: width for name, width in tap_points(model).items() if not read_only(name)}
        memories = []
        for method in methods.values():
            adapted_layers = {name: _adapted(module, method) for name, module in layers.items()}
            adapted = AdaptedModel(
                adapted_layers, points, parts.dtype, device, wiring.batch_invariant, self._zeros, self._empty
            )
            memories.append(method.memory(adapted))
        return memories

    def _low_rank_method(self, layers: Mapping[str, Linear]) -> int | None:
        """Return the number of a method whose effect on all ``layers`` is a low-rank product, None if there is none."""
        adapted = [module.adapter for module in layers.values() if module.adapter is not None]
        if not adapted:
            return None
        for number in self.all:
            products = [one.low_rank(number) for one in adapted]
            if all(product is not None for product in products):
                return number
        return None

    # ---- loads ---------------------------------------------------------------------------------------------------

    def answer(self, args: Mapping[str, Any]) -> list[list[Any]]:
        """Free adapters, queue folders to load, and return (number, error or None) of the loads that have ended
        since the last call.  No step in flight uses the freed adapters."""
        with self._wake:
            for number in args.get("free", ()):
                self.loaded.pop(int(number), None)
            for number, folder in args.get("load", ()):
                self._orders.append((int(number), str(folder)))
            if self._orders and not self._threads:
                self._start()
            self._wake.notify_all()
            ended = [list(one) for one in self._ended]
            self._ended.clear()
        return ended

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return host memory [size] of any content, pinned for a GPU."""
        if self.device.type != "cuda":
            return torch.empty(size, dtype=dtype)
        self._bytes = size * dtype.itemsize
        pinned = self._pinned.empty(self._bytes)
        return torch.from_numpy(pinned).view(dtype)

    def _zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return zeros [size] in host memory, pinned for a GPU."""
        return self._empty(size, dtype).zero_()

    def _allocate(self, size: int) -> Any:
        """Allocate ``size`` bytes of pinned host memory."""
        return allocate(size, self._alone)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Exclude captures while this thread registers memory with CUDA, which may wait for the device."""
        with ALONE, torch.cuda.device(self.device):
            yield

    def _reserve(self) -> None:
        """Allocate host memory for the first loads, on a thread."""
        for memory in self.memories:
            with suppress(RuntimeError, MemoryError, OSError):  # the loads fail later, each with its error
                memory.reserve()

    def _start(self) -> None:
        """Start the threads that load adapters."""
        for _ in range(THREADS):
            self._threads.append(_thread(self._load))

    def _load(self) -> None:
        """Read the queued folders of adapters one after another, on a thread, until ``close``.

        Store each adapter in host memory by its number, and the error of a failed read.
        """
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._orders or self._closed)
                if self._closed:
                    return
                number, folder = self._orders.popleft()
            error = None
            try:
                loaded = self._read(folder)
            except BaseException as e:
                expected = isinstance(e, MinivllmError)
                error = str(e) if expected else describe_error(as_exception(e))
            with self._wake:
                if error is None:
                    self.loaded[number] = loaded
                self._ended.append((number, error))
                idle = not self._orders
            if idle:
                self._keep_spare()

    def _keep_spare(self) -> None:
        """Allocate pinned memory for another adapter of the size of the last one, unless a free piece exists."""
        if self._bytes:
            with self._sparing, suppress(RuntimeError, MemoryError, OSError):  # the next load reports the error
                self._pinned.empty(self._bytes)

    def _read(self, folder: str) -> LoadedAdapter:
        """Read a folder by its method.  RequestError if it does not fit the model."""
        with self._reader.opened(folder) as source:
            method = method_of(folder, source.config, self.methods)
            number = self.methods[method]
            memory = self.memories[number]
            weights = memory.read(source)
            points = tuple(memory.points(weights))
        return LoadedAdapter(number, weights, points)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def apply(self, delta: Delta) -> None:
        """Copy adapters to the device and set the places of slots that join or fork."""
        for place, number in delta.adapter.tolist():
            if place < 0:
                self.loaded.pop(number, None)
            else:
                self._store(place, self.loaded[number])
        if (join := delta.join) is not None:
            places = join.adapter
            if not len(places):
                places = np.full(len(join.slot), -1, np.int32)
            self._set(join.slot, places)
        if len(delta.fork):
            source, to, _ = delta.fork.T
            self._set(to, self.of_slot[source])

    def _set(self, slots: np.ndarray, places: np.ndarray) -> None:
        """Set the places i32 [n] of the adapters of ``slots`` [n].  Nothing is copied if all of them are -1 and stay
        so."""
        before = self.of_slot[slots]
        if (places < 0).all() and (before < 0).all():
            return
        self.of_slot[slots] = places
        both = np.stack([slots, places]).astype(np.int64)
        index, values = torch.from_numpy(both).to(self.device, non_blocking=True)
        self.column[index] = values.int()

    def _store(self, place: int, adapter: LoadedAdapter) -> None:
        self.of_place[place] = adapter
        self.pointed = any(one is not None and one.points for one in self.of_place)
        if len(self.all) > 1:
            self.tables[:, place] = -1
            self.tables[adapter.method, place] = place
        self.memories[adapter.method].store(place, adapter.weights)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._copied.append((event, adapter))
            while self._copied:
                earliest, _ = self._copied[0]
                if not earliest.query():
                    break
                self._copied.popleft()

    def of_step(self, plan: StepPlan) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return the numbers of the methods of a step's rows, and the tap points that their adapters change."""
        places = self.of_slot[plan.slots]
        if not (places >= 0).any():
            return (), ()
        if len(self.all) == 1 and not self.pointed:
            return self.all, ()
        methods: set[int] = set()
        points: set[str] = set()
        for place in np.unique(places).tolist():
            adapter = self.of_place[place] if place >= 0 else None
            if adapter is not None:
                methods.add(adapter.method)
                points.update(adapter.points)
        return tuple(sorted(methods)), tuple(sorted(points))

    def taps(self, methods: tuple[int, ...], points: tuple[str, ...], then: StepTaps | None) -> StepTaps | None:
        """Return the taps of a step: adapters of ``methods`` change the values of ``points`` before the taps ``then``
        of requests.

        Without ``points`` the result is ``then``.
        """
        if not points:
            return then
        memories = [self.memories[n] for n in methods]
        return AdaptedTaps(memories, points, then)

    @contextmanager
    def step(self, meta: AttnMeta, methods: tuple[int, ...], kept: Tensor | None) -> Iterator[None]:
        """Apply the adapters of ``methods`` in the layers of a step.

        ``kept`` i64 [N] are the tokens that the model keeps after its last attention, None for all."""
        tokens = self.column[meta.slots[meta.row]]
        try:
            self.active.numbers = methods
            self.active.tokens = len(tokens)
            if kept is not None:
                self.active.keep = partial(self._keep, methods, tokens, kept)
            self._begin(methods, tokens)
            yield
        finally:
            self.active.numbers = ()
            self.active.keep = None
            self._end(methods)

    def _keep(self, methods: tuple[int, ...], tokens: Tensor, kept: Tensor) -> None:
        """Begin the methods again for the tokens ``kept`` i64 [N], where ``tokens`` i32 [T] are the places of all."""
        self._end(methods)
        self._begin(methods, tokens[kept])

    def _begin(self, methods: tuple[int, ...], tokens: Tensor) -> None:
        """Begin a step of the methods, where ``tokens`` i32 [T] are the places of the tokens' adapters."""
        several = len(self.all) > 1
        for n in methods:
            places = self.tables[n][tokens] if several else tokens
            self.memories[n].begin(places)

    def _end(self, methods: tuple[int, ...]) -> None:
        for n in methods:
            self.memories[n].end()

    def close(self) -> None:
        """End the threads after the loads that they are running."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()


def _adapted(module: Linear, method: AdapterMethod) -> AdaptedLayer:
    """Return the description of a linear layer that an adapter method receives."""
    extended = None
    if method.rows_behind(module.info):
        extended = getattr(module.scheme, "extended", None)
    return AdaptedLayer(module.info, module.bias, extended)


def _thread(run: Callable[[], None]) -> threading.Thread:
    """Start a thread that calls ``run``."""
    thread = threading.Thread(target=run, name="minivllm-adapters", daemon=True)
    thread.start()
    return thread


def applied(
    adapters: Adapters | None, meta: AttnMeta, methods: tuple[int, ...], kept: Tensor | None = None
) -> AbstractContextManager[None]:
    """Return the context of a step's layers, in which the adapters of ``methods`` apply; () applies none.

    ``kept`` i64 [N] are the tokens that the model keeps after its last attention, None for all."""
    if adapters is None or not methods:
        return nullcontext()
    return adapters.step(meta, methods, kept)
