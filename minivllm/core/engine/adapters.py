"""The adapters (LoRA) of an engine: which are loaded, which are on the device, and which requests wait for one.

    request ──► folder checked ──► load ordered (the request waits beside the queue) ──► queue
    admitted ──► place on the device: an empty one, or the evictor's choice among adapters without a running row
             ──► delta.adapter copies the weights, in the order of the steps

So a place changes only behind all steps that were planned before, and an adapter with a running row keeps its place.
Adapters on the device stay in host memory, which holds at most ``max_cpu_loras``.  The evictor also chooses there.  If
requests use all of them and another one is needed, new requests of one adapter wait until its earlier ones have ended.
It then leaves, so that no adapter waits for ever.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.evictor import EvictorContext
from minivllm.errors import ConfigError, RequestError, shown

from .adapter_set import FAILED, LOADING, NEW, READY, Adapter, ResidentSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from minivllm.core.interfaces.adapters import AdapterFiles, LoRARequest
    from minivllm.core.interfaces.evictor import Evictor
    from minivllm.core.interfaces.executor import AdapterWiring, Executor, Wiring

    from .parts import EngineParts
    from .request import Request, Seq
    from .slots import Slots

VERB = "adapters"  # of ``Executor.call``
POLL = 2e-3  # seconds between two checks of the running loads while steps run
# Value of the first column of a row of ``Delta.adapter`` that frees an adapter's host memory.  In other
# rows this column is the place on the device to which the adapter is copied.
FREE = -1


class EngineAdapters:
    """The adapters of an engine.  Invariant: an adapter on the device is in host memory too."""

    def __init__(
        self,
        limits: AdapterWiring,
        slots: Slots,
        check: Callable[[str], AdapterFiles],
        evictor: Callable[[EvictorContext], Evictor],
        now: Callable[[], float],
    ) -> None:
        """Start without adapters.  ``check(folder)`` checks an adapter's files without reading its weights, and raises
        RequestError for malformed ones.  ``evictor`` makes the evictor for the device memory and the one for host
        memory."""
        self.limits = limits
        self.slots = slots
        self.check = check
        self.now = now
        self.device = ResidentSet(
            limits.max_loras, evictor(EvictorContext(limits.max_loras, 1, "device"))
        )
        self.host = ResidentSet(
            limits.max_cpu_loras, evictor(EvictorContext(limits.max_cpu_loras, 1, "cpu"))
        )
        self.known: dict[int, Adapter] = {}  # id that clients give an adapter -> the adapter
        self.names: dict[str, Adapter] = {}
        self.by_place: list[Adapter | None] = [None] * limits.max_loras
        # sequences that wait for their adapter's load, outside of the queue
        self.waits: dict[Seq, Adapter] = {}
        # the adapter that is about to be removed; new requests with it wait until it is removed
        self.leaving: Adapter | None = None
        # (adapter, callback) of adapters that are loaded without a request; the callback receives
        # "" or the error
        self.preloads: list[tuple[Adapter, Callable[[str], None]]] = []
        # place on the device -> number of the adapter to copy there with the next delta
        self.rows: dict[int, int] = {}
        # numbers of the adapters whose host memory the next delta frees
        self.freed: list[int] = []
        # (number, folder) of adapters to load with the next call of the executor
        self.orders: list[tuple[int, str]] = []
        self.loading: dict[int, Adapter] = {}
        self.loads = self.swaps = self.failed = 0
        self._uses = self._number = 0
        # ids of adapters that were unloaded; no new request may use such an id
        self.unloaded: set[int] = set()
        self._polled = -1.0

    @classmethod
    def of(
        cls, wiring: Wiring, executor: Executor, slots: Slots, parts: EngineParts
    ) -> EngineAdapters | None:
        """Return the object that manages LoRA adapters; None if the configuration serves none.  ConfigError if the
        executor does not load adapters."""
        limits = wiring.adapters
        if not limits.max_loras or parts.check_adapter is None:
            return None
        try:
            executor.call(VERB, {"load": []})
        except NotImplementedError as e:
            who = type(executor).__name__
            raise ConfigError(
                f"the executor {who} loads no adapters; use local, process or multiprocess"
            ) from e
        return cls(limits, slots, parts.check_adapter, parts.evictor, parts.now)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def find(self, request: LoRARequest) -> Adapter:
        """Return the adapter that a new request names, and count the request among its users until ``release`` is
        called.

        RequestError if the adapter's folder is malformed, or if another adapter has its id or name."""
        adapter = self._find(request)
        adapter.users += 1
        return adapter

    def _find(self, request: LoRARequest) -> Adapter:
        if request.lora_int_id in self.unloaded:
            raise RequestError(
                f"adapter {shown(request.lora_name)} was unloaded: load it again, under a new id",
                "lora_request",
            )
        adapter = self.known.get(request.lora_int_id)
        if adapter is not None and adapter.request == request:
            if adapter.state == FAILED and not adapter.users:
                self.forget(adapter)
            elif self.check(request.lora_path) == adapter.files:
                return adapter
            else:
                raise RequestError(
                    f"the files of adapter {shown(request.lora_name)} have changed since it was loaded: "
                    "give the new adapter another name and id",
                    "lora_request",
                )
        for what, value, other in (
            ("id", request.lora_int_id, self.known.get(request.lora_int_id)),
            ("name", request.lora_name, self.names.get(request.lora_name)),
        ):
            if other is not None and not self._forgettable(other):
                raise RequestError(
                    f"the {what} {shown(value)} belongs to adapter {shown(other.request.lora_name)} of "
                    f"{shown(other.request.lora_path)}: choose another {what}",
                    "lora_request",
                )
            if other is not None:
                self.forget(other)
        files = self.check(request.lora_path)
        self._number += 1
        adapter = Adapter(self._number, request, files)
        self.known[request.lora_int_id] = self.names[request.lora_name] = adapter
        return adapter

    def _forgettable(self, adapter: Adapter) -> bool:
        """Return whether an adapter can be removed at once: no request uses it, and its weights are neither loaded nor
        being loaded."""
        return not adapter.users and adapter.state in (NEW, FAILED)

    def release(self, adapter: Adapter) -> None:
        """Count one user less of an adapter, because a request with it has ended.  An unloaded adapter without users is
        removed."""
        adapter.users -= 1
        unloaded = self.names.get(adapter.request.lora_name) is not adapter
        if self._forgettable(adapter) or (
            unloaded and not adapter.users and adapter.state == READY
        ):
            self.forget(adapter)

    def forget(self, adapter: Adapter) -> None:
        """Remove an adapter that no request uses from device memory, from host memory and from all tables of
        adapters."""
        request = adapter.request
        if self.known.get(request.lora_int_id) is adapter:
            del self.known[request.lora_int_id]
        if self.names.get(request.lora_name) is adapter:
            del self.names[request.lora_name]
        self.device.drop(adapter)
        self._leave_place(adapter)
        self._leave_host(adapter)

    def preload(self, request: LoRARequest, done: Callable[[str], None]) -> None:
        """Load an adapter without a request.  ``done`` is called with "" when it is loaded, or with the error.
        RequestError as in ``find``."""
        self.preloads.append((self.find(request), done))

    def unload(self, name: str) -> bool:
        """Remove an adapter by its name, and return False if no adapter has the name.

        Requests that use the adapter keep it until they end.
        """
        adapter = self.names.pop(name, None)
        if adapter is None:
            return False
        self.known.pop(adapter.request.lora_int_id, None)
        self.unloaded.add(adapter.request.lora_int_id)
        if not adapter.users and adapter.state != LOADING:
            self.forget(adapter)
        return True

    # ---- loads -------------------------------------------------------------------------------------------------------

    def begin(self, seq: Seq) -> bool:
        """Return whether a sequence must wait because its adapter is not in host memory, and record that it waits."""
        adapter = seq.request.adapter
        if adapter is None or (adapter.state == READY and adapter is not self.leaving):
            return False
        self.waits[seq] = adapter
        return True

    def leave(self, seq: Seq) -> None:
        """Remove a sequence that has ended from the sequences that wait for their adapter."""
        self.waits.pop(seq, None)

    def turn(
        self, call: Callable[..., Any], at_rest: bool
    ) -> tuple[list[Seq], list[tuple[Seq, str]]]:
        """Order new loads of adapters through the executor's method ``call``, and process the results of earlier loads.
        ``at_rest`` means that no step is in flight.

        Return the waiting sequences whose adapters are now loaded, and (sequence, error) for those whose adapters
        failed to load."""
        # No running row uses an adapter here. So no step reads the adapters to free, and perhaps no
        # delta would follow.
        if at_rest and self.freed and not self.rows:
            numbers = self.freed
            self.freed = []
            self._note_ended(call(VERB, {"free": numbers}))
        if not self.waits and not self.loading and not self.preloads:
            return [], []
        self._order_all()
        if self.orders or self.now() - self._polled >= POLL:
            self._polled = self.now()
            self._poll(call)
        ready = [
            seq
            for seq, adapter in self.waits.items()
            if adapter.state == READY and adapter is not self.leaving
        ]
        failed = [
            (seq, adapter.error) for seq, adapter in self.waits.items() if adapter.state == FAILED
        ]
        for seq in (*ready, *(seq for seq, _ in failed)):
            del self.waits[seq]
        ended = [one for one in self.preloads if one[0].state in (READY, FAILED)]
        self.preloads = [one for one in self.preloads if one not in ended]
        for adapter, done in ended:
            done(adapter.error)
            self.release(adapter)
        return ready, failed

    def _order_all(self) -> None:
        """Order the loads of adapters for which sequences or callers wait, in the order of waiting, as long as host
        memory has room."""
        preloads = [adapter for adapter, _ in self.preloads]
        wanted = dict.fromkeys((*self.waits.values(), *preloads))
        for adapter in wanted:
            if adapter.state == NEW and not self._order(adapter):
                return  # host memory is full, so the loads of the later adapters are not ordered either
        self.leaving = None

    def _order(self, adapter: Adapter) -> bool:
        """Order the load of an adapter into host memory, and return True.  Return False if host memory is full of
        adapters in use, so that none can be removed for the new one."""
        if self.host.full:
            victim = self.host.evict(
                lambda one: bool(one.users) or one.place >= 0 or one.state == LOADING
            )
            if victim is None:
                self._make_place()  # the adapter that leaves the device may leave host memory at the next turn
                victim = self._unused()
            if victim is None:
                return False
            self._leave_host(victim)
            if not victim.users:
                self.forget(victim)
        adapter.state = LOADING
        self.host.add(adapter)
        self.loading[adapter.number] = adapter
        self.orders.append((adapter.number, adapter.files.folder))
        self.loads += 1
        return True

    def _unused(self) -> Adapter | None:
        """Return an adapter that can leave host memory although requests name it, because all of these requests still
        wait; None if there is none yet.

        One adapter is selected for this, the one with the fewest requests that have begun to run.  New requests with it
        wait, so that it becomes free."""
        resting = {
            seq.request: adapter for seq, adapter in self.waits.items() if _rests(seq.request)
        }
        waiting = Counter(resting.values())

        def uses(adapter: Adapter) -> int:
            return adapter.users - waiting[adapter]

        if self.leaving is None or self.leaving.state != READY:
            ready = [one for one in self.host.adapters.values() if one.state == READY]
            self.leaving = min(ready, key=uses, default=None)
        leaving = self.leaving
        if leaving is None or uses(leaving):
            return None
        self.device.drop(leaving)
        self._leave_place(leaving)
        self.leaving = None
        return leaving

    def _poll(self, call: Callable[..., Any]) -> None:
        orders = self.orders
        self.orders = []
        answers: Sequence[Iterable[Any]] = call(VERB, {"load": orders})
        for number, _ in orders:
            self.loading[number].waiting = len(answers)
        self._note_ended(answers)

    def _note_ended(self, answers: Sequence[Iterable[Any]]) -> None:
        """Process the ended loads that the worker processes report: ``answers`` has (number of the adapter, error or
        None) for each of them."""
        for ended in answers:
            for number, error in ended:
                adapter = self.loading[number]
                adapter.waiting -= 1
                adapter.error = adapter.error or error or ""
        for adapter in [one for one in self.loading.values() if not one.waiting]:
            del self.loading[adapter.number]
            adapter.state = FAILED if adapter.error else READY
            if adapter.error:
                self.failed += 1
                self._leave_host(adapter)
            if not adapter.users and self.names.get(adapter.request.lora_name) is not adapter:
                self.forget(adapter)  # the adapter was unloaded while it was loading

    def _leave_host(self, adapter: Adapter) -> None:
        """Remove an adapter from host memory.  The next delta frees the memory in the worker processes."""
        if adapter.state in (READY, FAILED) and adapter.number not in self.freed:
            self.freed.append(adapter.number)
        self.host.drop(adapter)
        if adapter.state == READY:
            adapter.state = NEW

    # ---- places on the device ----------------------------------------------------------------------------------------

    def place(self, seq: Seq) -> bool:
        """Ensure that the adapter of a sequence is in a place on the device, and return True.  Return False if running
        rows use all places."""
        adapter = seq.request.adapter
        if adapter is None:
            return True
        self._uses += 1
        adapter.used = self._uses
        if adapter.place >= 0:
            self.device.use(adapter)
            return True
        at = self._make_place()
        if at is None:
            return False
        adapter.place = at
        self.by_place[at] = adapter
        self.rows[at] = adapter.number
        self.device.add(adapter)
        self.host.use(adapter)
        return True

    def _make_place(self) -> int | None:
        """Return an empty place on the device; None if running rows use all places.  If none is empty, an adapter
        without running rows is removed from its place."""
        if None in self.by_place:
            return self.by_place.index(None)
        s = self.slots
        running = {int(place) for place in s.adapter[s.running]}
        victim = self.device.evict(lambda one: one.place in running)
        if victim is None:
            return None
        at = victim.place
        self._leave_place(victim)
        self.swaps += 1
        return at

    def _leave_place(self, adapter: Adapter) -> None:
        if adapter.place >= 0:
            self.rows.pop(adapter.place, None)
            self.by_place[adapter.place] = None
            adapter.place = -1

    def changes(self) -> list[tuple[int, int]]:
        """Return the rows (place on the device or FREE, number of the adapter) for ``Delta.adapter`` of the next step,
        and clear them."""
        if not self.rows and not self.freed:
            return []
        rows = [*self.rows.items(), *((FREE, number) for number in self.freed)]
        self.rows = {}
        self.freed = []
        return rows

    def repeat(self, rows: Iterable[Iterable[int]]) -> None:
        """Repeat rows of ``Delta.adapter`` in the next delta, because a step failed before the device had them.

        A row is left out if another adapter has its place now, or if a freed adapter is loaded again."""
        for place, number in rows:
            if place == FREE:
                if number not in self.host.adapters and number not in self.freed:
                    self.freed.append(number)
                continue
            adapter = self.by_place[place]
            if adapter is not None and adapter.number == number:
                self.rows[place] = number

    def stats(self) -> dict[str, Any]:
        figures = {
            "on_device": sum(one is not None for one in self.by_place),
            "in_host_memory": len(self.host.adapters),
            "waiting": len(self.waits),
            "loads": self.loads,
            "failed_loads": self.failed,
            "replaced_on_device": self.swaps,
        }
        return {"adapters": figures}


def _rests(request: Request) -> bool:
    """Return whether no sequence of a request is in a slot, in the queue or in a step in flight.

    Sequences of the request may still wait outside of the queue.  They call ``begin`` before they enter it."""
    pairs = [one for seq in request.sequences for one in seq.pair]
    return not any(one.slot >= 0 or one.queued or one.in_flight for one in pairs)
