"""The loop: plan, submit, collect, publish.

    plan = planner.next(now)                        host only
    if plan: executor.submit(plan)                  enqueues
    for result in executor.collect(in_flight): ...  every finished step; waits until at most ``depth`` remain
        publisher.publish(flight, result)

The same for every device; only the depth differs (0 on CPU: each step is collected at once).  A request that fails ends
alone; a step that fails ends the requests in it; three failed steps in a row end the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from minivllm.core import checks
from minivllm.core.external_calls import alone, call_foreign
from minivllm.core.interfaces.evictor import EvictorContext
from minivllm.core.interfaces.finish import Finish, FinishReason, eos_within
from minivllm.core.interfaces.plan import LateInputs, StepPlan
from minivllm.core.timing import PLAN, PUBLISH, SUBMIT, WAIT, StepClock
from minivllm.errors import (
    ConfigError,
    EngineDeadError,
    MinivllmError,
    RequestError,
    describe_error,
    shown,
)

from . import publication
from .adapters import EngineAdapters
from .blocks import BlockPool
from .cache import KVCache
from .captures import IdleCaptures
from .checkpoints import Checkpoints
from .compression import Compression
from .engine_stats import engine_stats
from .flight import Flight
from .guides import add_guide
from .images import Images, check_images
from .masks import RowMasks
from .planner import Planner
from .predictions import Predictions, begin_prediction, note_step, scheduler_context
from .publisher import Publisher
from .request import FINISHED, Request, Seq
from .request_checks import binders, host_draw, prepare, salt_of
from .searches import advance, finish_beams
from .sessions import kinds_of, report_turn, turn_of
from .slots import Slots
from .speculation import Speculation
from .step_budget import StepBudget
from .step_limit import StepLimit
from .strategies import answer
from .taps import TapLimits
from .tiers import POLL, VERB, Tiers
from .weights import Weights

if TYPE_CHECKING:
    import numpy as np

    from minivllm.core.interfaces.adapters import LoRARequest
    from minivllm.core.interfaces.evictor import Evictor
    from minivllm.core.interfaces.executor import Capacity, Executor, Wiring
    from minivllm.core.interfaces.plan import StepResult

    from .adapter_set import Adapter
    from .parts import CacheOptions, EngineParts
    from .tier_names import NamedPrefixes

FAILED_STEPS = 3  # the engine ends after this many failed steps in a row
CHECK = "MINIVLLM_CHECK"  # environment variable; 1 calls ``check`` after every step
IDLE = 0.05  # seconds between two attempts to plan a step while no request can run, at most
MAX_TENANTS = 65536  # largest number of tenants that keep their number
log = logging.getLogger("minivllm")
# No log handler by default, because the application configures logging. Errors are also returned to
# their requests.
log.addHandler(logging.NullHandler())


class Engine:
    """The engine, which generates the tokens of requests and sends them to the sinks (callbacks) of the requests.  All
    its methods are called on one thread (see ``async_llm``).  ``eos_ids`` are the model's end-of-sequence token ids
    that lie inside its vocabulary."""

    dead: str | None = None  # error message with which the engine has ended, or None
    # name of a phase of the engine's start -> its seconds, if the builder of the engine sets it
    start_times: Mapping[str, float] = {}

    def __init__(
        self,
        wiring: Wiring,
        executor: Executor,
        capacity: Capacity,
        parts: EngineParts,
        caching: CacheOptions,
    ) -> None:
        self.wiring = wiring
        self.executor = executor
        self.capacity = capacity
        self.events = parts.events
        self.now = parts.now
        self.energy = parts.energy
        self.within = ""  # name of the engine method that is running (see ``external_calls.alone``)
        self.clock = StepClock()
        self.processors = parts.processors
        self.strategies = parts.strategies
        self.host_sampler = parts.host_sampler
        self.eos_ids = eos_within(wiring.eos_ids, capacity.vocab_size)
        groups = len(caching.windows)
        self.slots = Slots(wiring.max_num_seqs, wiring.max_model_len, groups, wiring.block)
        self.cache = self._cache(parts, caching)
        self.adapters = EngineAdapters.of(wiring, executor, self.slots, parts)
        self.images = Images.of(wiring, capacity)
        self.predictions = Predictions.of(parts, wiring, self.clock.seams.run)
        self.speculation = Speculation.of(wiring, capacity)
        self.compression = Compression.of(wiring, capacity, executor, self.cache)
        self.planner = self._planner(parts)
        self.publisher = Publisher(
            self.slots,
            self.cache,
            self.planner,
            self.finish,
            self.events,
            self.now,
            self.speculation,
            TapLimits.of(capacity, wiring),
        )
        self.grammars = parts.grammars
        self.masks = RowMasks(
            self.slots,
            capacity.vocab_size,
            parts.grammars,
            self.finish,
            self.clock.seams,
            executor.mask_memory,
        )
        self.binders = binders(parts.processors)
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[Flight] = deque()
        self.tenants: dict[str, int] = {}
        self._tenant = itertools.count()
        self.finished = self.failed_steps = 0
        self.weights = Weights(self)
        self.captures = IdleCaptures()
        self.checked = os.environ.get(CHECK, "") not in ("", "0")
        self._ids = itertools.count()
        self._seeds = random.Random(wiring.seed)

    def _planner(self, parts: EngineParts) -> Planner:
        """Return a new planner with the scheduling policy and the other components that plan steps."""
        wiring = self.wiring
        return Planner(
            self.slots,
            self.cache,
            parts.policy(scheduler_context(wiring, self.predictions)),
            wiring.max_num_batched_tokens,
            self.clock.seams,
            self.finish,
            self.events,
            self.speculation,
            self.adapters,
            self.compression,
            self.images,
            StepBudget.of(wiring, self.capacity.step_sizes),
            StepLimit.of(self.capacity, wiring.max_num_seqs),
        )

    def _cache(self, parts: EngineParts, caching: CacheOptions) -> KVCache:
        """Return a new KV cache with one block pool per KV group, with checkpoints if the model has recurrent states,
        and with the configured storage tiers if prefixes are cached."""
        pools = [self._pool(g, parts.evictor) for g in range(len(caching.windows))]
        count = self.capacity.checkpoints
        checkpoints = None
        if count is not None:
            checkpoints = Checkpoints(self.wiring.max_num_seqs + 1, count)
        windows = list(caching.windows)
        prefix = caching.prefix_caching
        cache = KVCache(pools, windows, self.slots, prefix, caching.partial_hits, checkpoints)
        if self.wiring.cache.stores and cache.prefix:
            self._add_tiers(cache, parts)
        return cache

    def _add_tiers(self, cache: KVCache, parts: EngineParts) -> None:
        """Add the storage tiers of the configuration (such as CPU memory and disk) to the KV cache.  ConfigError if the
        executor does not implement tiers."""
        names = [part.name.removeprefix("minivllm/") for part in self.wiring.cache.stores]
        try:
            opened = self.executor.call(VERB, {"open": True})
        except NotImplementedError as e:
            who = type(self.executor).__name__
            raise ConfigError(
                f"kvstore={', '.join(names)}: the executor {who} keeps no tiers; use local, process, multiprocess, ray "
                "or sim, or leave kvstore out"
            ) from e

        def context(name: str, pages: int) -> EvictorContext:
            return EvictorContext(pages, self.wiring.block, name, self.now)

        Tiers(cache, opened, names, parts.evictor, context, self.now)

    def _pool(self, group: int, evictor: Any) -> BlockPool:
        total = self.capacity.blocks[group]
        size = self.capacity.block_bytes[group]
        block = self.wiring.block
        made: Evictor = evictor(EvictorContext(total - 1, block, "device", self.now))
        return BlockPool(total, block, made, size, self.clock.seams, self.events, group)

    # ---- requests ----------------------------------------------------------------------------------------------------

    @alone
    def add(self, request: Request) -> None:
        """Check a request and queue it.  RequestError refuses it without any change; EngineDeadError if the engine has
        ended."""
        if self.dead:
            raise EngineDeadError(self.dead)
        if request.id in self.requests:
            what = f"request id {shown(request.id)} is in use; choose a new one"
            raise RequestError(what, "request_id")
        request.adapter = self._adapter_of(request)
        try:
            self._add(request)
        except BaseException:
            if self.adapters is not None and request.adapter is not None:
                self.adapters.release(request.adapter)
            if self.images is not None:
                self.images.end(request)
            raise

    def _adapter_of(self, request: Request) -> Adapter | None:
        """Return the LoRA adapter that a new request names, None if it names none.  RequestError if the adapter cannot
        be used."""
        if request.lora is None:
            return None
        if self.adapters is None:
            what = "this engine serves no adapters; set enable_lora=true, or adapters"
            raise RequestError(f"lora_request: {what}", "lora_request")
        return self.adapters.find(request.lora)

    def _add(self, request: Request) -> None:
        """Check a request, create its sequences and queue them.  Its LoRA adapter, if any, has been looked up
        before."""
        p = request.params
        check_images(request, self.images, self.wiring.images, self.capacity)
        started = prepare(self, request)
        request.arrival = request.arrival if self.executor.now is None else self.now()
        who = request.owner or p.tenant
        if who not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            self.tenants.clear()
        request.tenant = self.tenants.setdefault(who, next(self._tenant))
        request.owner_number = 1 + request.tenant if request.owner else 0
        request.salt = self.weights.salted(salt_of(request, self.wiring))
        tokens = request.prompt
        if self.images is not None and request.images:
            tokens = self.images.begin(request)
        request.turn = turn_of(request)
        if request.turn is not None:
            request.kinds = kinds_of(request, self.wiring.block)
        begin_prediction(self.predictions, request)
        seed = p.seed if p.seed is not None else self._seeds.getrandbits(63)
        for b in started:
            seq = Seq(
                next(self._ids),
                request,
                b.sample,
                seed,
                tokens=tokens,
                known=len(request.prompt),
                weights=[(self.weights.version, 0)],
            )
            seq.choose = p.choose_fn or host_draw(self, seq)
            if b.guide is not None:
                add_guide(self, seq, b.guide)
            request.sequences.append(seq)
        first, *rest = request.sequences
        # Sequences with guides are queued one by one, because they do not fork from a common first
        # sequence.
        apart = first.guide is not None
        first.branches = list(rest) if request.beams is None and not apart else []
        queued = request.sequences if apart else [first]
        try:
            for seq in queued:
                self.planner.add(seq)
        except Exception as e:
            for seq in queued:
                if seq.queued:
                    self.planner.waiting.remove(seq)
                if self.cache.tiers is not None:
                    self.cache.tiers.leave(seq)
                if self.adapters is not None:
                    self.adapters.leave(seq)
            who = type(self.planner.policy).__name__
            why = describe_error(e, self.planner.policy)
            raise RequestError(f"scheduler {who} failed on this request: {why}") from e
        self.requests[request.id] = request
        self.planner.limit.enter(request)
        self.events.request_added(request)

    @alone
    def abort(self, request_id: str) -> bool:
        """End a request and return True, or return False for an unknown id.  Its blocks are free before the next
        step is planned."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        for seq in list(request.sequences):
            if seq.status != FINISHED:
                self.finish(seq, "abort")
        return True

    def finish(
        self,
        seq: Seq,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End a sequence that waits, runs or was preempted.  When the last sequence of a request ends, the request
        ends.  All beams of a request end together, and so do a sequence and its guide."""
        seq = seq.lead or seq
        if seq.request.beams is not None:
            finish_beams(self, seq.request, Finish(reason, stop_reason), error)
            return
        if reason in ("abort", "error"):
            self.publisher.flush(seq)  # send the tokens generated so far to the client
            if seq.status == FINISHED:
                return
        cacheable = seq.slot >= 0 and reason != "error"
        try:
            for one in seq.pair if cacheable else ():
                publication.publish_tail(self.cache, one.slot, one)
            report_turn(self.cache, seq, "ended")
            self.planner.end(seq)
        # the evictor plug-in failed, so the state of the blocks is uncertain
        except EngineDeadError as e:
            self._die(str(e))
            return
        self.close(seq, reason, stop_reason, error)

    def close(
        self, seq: Seq, reason: FinishReason, stop_reason: int | str | None, error: str | None
    ) -> None:
        """Mark a sequence as finished, after it has left its slot or the queue.  If all sequences of its request are
        finished, the request is finished, and its ``on_done`` is called."""
        self.publisher.taps.end()
        seq.status = FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        seq.error = error
        self.masks.forget(seq)
        # Branches that have not forked from this sequence yet end together with it.
        for b in (*seq.branches, *seq.pair[1:]):
            b.status = FINISHED
            b.finish_reason = reason
            b.error = error
        request = seq.request
        if request.done and request.finished is None:
            request.answer = self.clock.seams.run("strategy", answer, request)
            request.finished = self.now()
            if self.adapters is not None and request.adapter is not None:
                self.adapters.release(request.adapter)
            if self.images is not None:
                self.images.end(request)
            self.finished += 1
            self.requests.pop(request.id, None)
            self.planner.limit.leave(request)
            self.events.request_finished(request)
            if request.on_done is not None:
                try:
                    call_foreign(request.on_done, request)
                except Exception:  # an error in a callback must not end the engine
                    log.exception("request %s: its on_done failed", request.id)

    def answer(self, request: Request) -> list[Seq]:
        """Return the sequences that form the answer of a finished request, best first.  Its decoding strategy has
        chosen and ordered them."""
        return request.answer

    # ---- the loop ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        loads = self.adapters is not None and bool(self.adapters.preloads)
        return bool(self.requests or self.in_flight) or loads

    @alone
    def step(self) -> bool:
        """Plan, submit and collect one step of the loop.  Return False if nothing could be planned and nothing was in
        flight (see ``idle``), or if the engine is paused or asleep.  A fault of the executor or the cache ends the
        engine.  EngineDeadError if the engine has ended before."""
        if self.dead:
            raise EngineDeadError(self.dead)
        if self.weights.held:
            return False
        self.clock.begin()
        try:
            self._turn_loads()
            plan = self.events.planning(self._launch)
            if self.dead or (plan is None and not self.in_flight):
                return False
            if plan is not None and len(plan.late):
                self._supply(plan)
            if not self.dead:
                self.collect(self.capacity.depth if plan is not None else len(self.in_flight) - 1)
            if not self.in_flight:
                self._turn_loads()
            self.check() if self.checked else self.cache.audit()
        except BaseException as e:
            # The executor or the cache failed, so the engine's state is uncertain, and the engine
            # ends.
            self._die(str(e) if isinstance(e, MinivllmError) else describe_error(e))
            log.error("the engine ends", exc_info=e)
            # other than Exception, for example a KeyboardInterrupt that a signal handler raised
            if not isinstance(e, Exception):
                raise
            plan = None
        self.clock.lap(PUBLISH)
        if plan is None:
            self.clock.end(0, 0)
        else:
            self.clock.end(len(plan.slots), int(plan.q_len.sum()))
        self.events.turn_ended()
        return True

    def _turn_loads(self) -> None:
        """Start the loads of LoRA adapters and of KV pages from tiers, and queue the sequences whose loads have
        ended."""
        if self.adapters is not None and not self.dead:
            call = partial(self.ask, self.executor.call)
            ready, failed = self.adapters.turn(call, not self.in_flight)
            for seq in ready:
                self.planner.requeue(seq)
            for seq, error in failed:
                self.finish(seq, "error", error=error)
        tiers = self.cache.tiers
        if tiers is None or self.dead:
            return
        for seq in tiers.turn(partial(self.ask, self.executor.call), not self.in_flight):
            self.planner.requeue(seq)

    def _launch(self) -> StepPlan | None:
        """Plan a step and submit it to the executor.  Return its plan, or None if nothing can run."""
        flight = self.plan()
        self.clock.lap(PLAN)
        if flight is None:
            return None
        self.in_flight.append(flight)
        self.ask(self.executor.submit, flight.plan)
        self.clock.lap(SUBMIT)
        return flight.plan

    def _supply(self, plan: StepPlan) -> None:
        """Send the token masks of a step to the executor while the device already runs the layers of this step.

        The masks depend on the tokens of all earlier steps, so these are collected first.  Nothing else is done before,
        so that the device waits as little as possible."""
        self.collect(1)
        self.clock.lap(PUBLISH)
        if self.dead:
            return
        self.ask(self.executor.supply, plan.id, LateInputs(self.masks.of(self.in_flight[-1])))
        self.clock.lap(SUBMIT)

    def collect(self, in_flight: int) -> None:
        """Wait until at most ``in_flight`` submitted steps have not finished, and process the results of all finished
        ones."""
        found = self.ask(self.executor.collect, in_flight)
        self.clock.lap(WAIT)
        for result in self.ask(self._results, found):
            flight = self.in_flight.popleft()
            self.clock.collected(result.device_ms, result.seams, result.form)
            encodes = self.images is not None and self.images.changed_by(flight.plan)
            if self.cache.tiers is not None and not encodes:
                self.cache.tiers.choice.step_ended(flight.plan.q_len, result.device_ms)
            self.events.publishing(self._publish, flight, result)
            self._count_failures(result)

    def _publish(self, flight: Flight, result: StepResult) -> None:
        note_step(self.predictions, flight.plan, result.device_ms)
        for beams in self.publisher.publish(flight, result):
            advance(self, beams)

    def _results(self, found: Any) -> list[StepResult]:
        """Check the collected results against the plans in flight and return them.  ValueError if the executor returned
        more steps than are in flight."""
        due = [flight.plan for flight in itertools.islice(self.in_flight, len(found))]
        if len(found) > len(due):
            raise ValueError(f"collect() returned {len(found)} steps but {len(due)} are in flight")
        at = self.capacity
        return [checks.result(result, plan, at) for result, plan in zip(found, due, strict=True)]

    def ask(self, question: Callable[..., Any], *args: Any) -> Any:
        """Call a method of the executor and return its result.  An exception becomes an EngineDeadError that names the
        executor, because an executor must not raise here."""
        try:
            return call_foreign(question, *args)
        except EngineDeadError:
            raise
        except Exception as e:
            who = type(self.executor).__name__
            message = describe_error(e, self.executor)
            raise EngineDeadError(f"executor {who} failed: {message}") from e

    def watch(self) -> None:
        """Check that the executor is alive, and let it capture a step, while no request runs.  The engine ends if the
        executor is dead."""
        if self.dead:
            return
        try:
            if self.executor.alive():
                if not self.weights.held:
                    self.captures.turn(self.executor.call, self.publisher.tokens)
                return
            self.ask(self.executor.collect, 0)
            self._die(f"executor {type(self.executor).__name__} is not alive")
        # the error message becomes the reason why the engine has ended
        except EngineDeadError as e:
            self._die(str(e))

    def idle(self) -> float:
        """Return how many seconds to wait after a ``step`` that found no work: until the time before which the
        scheduling policy admits no request, and at most ``IDLE``."""
        hold = self.planner.wake_at - self.now() if self.planner.wake_at else IDLE
        tiers = self.cache.tiers
        adapters = self.adapters
        loads = adapters is not None and bool(adapters.loading)
        longest = POLL if loads or (tiers is not None and tiers.active) else IDLE
        return min(max(hold, 0.0), longest)

    def plan(self) -> Flight | None:
        """Plan the next step.  Return None if no request can run or planning failed.  If the scheduling policy raises,
        this turn of the loop plans no step.  After three failures in a row the engine ends."""
        try:
            plan = self.planner.next(self.now())
            return None if plan is None else Flight.of(plan, self.slots, self.cache.read)
        except EngineDeadError as e:
            self._die(str(e))
        except Exception as e:
            policy = self.planner.policy
            self._failed(f"planning failed ({type(policy).__name__}): {describe_error(e, policy)}")
        return None

    def _count_failures(self, result: Any) -> None:
        step_error = result.failure
        if step_error is None:
            self.failed_steps = 0
        else:
            self._failed(f"{step_error.plugin}: {step_error.message}")

    def _failed(self, message: str) -> None:
        self.failed_steps += 1
        if self.failed_steps >= FAILED_STEPS:
            self._die(f"{FAILED_STEPS} steps failed in a row; the last: {message}")

    def _die(self, message: str) -> None:
        """End the engine with the error ``message``: all requests fail with it, and new ones are refused.  Slots and
        blocks stay as they are, because no later step uses them."""
        self.dead = message
        for request in list(self.requests.values()):
            try:
                self._fail(request, message)
            # one request in an inconsistent state must not prevent the end of the other requests
            except Exception:
                log.exception("request %s could not be ended", request.id)

    def _fail(self, request: Request, message: str) -> None:
        if request.beams is not None:
            finish_beams(self, request, Finish("error"), message)
            return
        for seq in request.sequences:
            if seq.status != FINISHED:
                self.publisher.flush(seq)
                self.close(seq, "error", None, message)

    # ---- maintenance -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare all block tables and pools.  AssertionError if a block is not accounted for.  The check takes
        milliseconds per thousand blocks.  With MINIVLLM_CHECK=1 it runs after every step, and a fault ends the
        engine."""
        self.cache.check()

    @alone
    def reset_prefix_cache(self) -> None:
        """Remove the cached prefixes that no running sequence uses.  If the evictor plug-in fails, the engine ends and
        EngineDeadError is raised."""
        self.drop_prefixes()

    def drop_prefixes(self, keep_tiers: bool = False) -> None:
        """Remove the cached prefixes that are not in use.  ``keep_tiers`` keeps the pages in the storage tiers."""
        try:
            if keep_tiers:
                self._turn_loads()
            for pool in self.cache.pools[::-1]:
                pool.reset()
            if keep_tiers:
                # the worker processes must read all blocks that are to be stored before the caller
                # changes the blocks
                self._turn_loads()
            elif self.cache.tiers is not None:
                self.cache.tiers.reset()
        # the evictor plug-in failed, so the state of the blocks is uncertain
        except EngineDeadError as e:
            self._die(str(e))
            raise

    @alone
    def settle(self) -> None:
        """Wait for all steps in flight and process their results.  If one fails, the engine ends."""
        self.collect_all()

    def collect_all(self) -> None:
        """Do the work of ``settle`` for other methods of the engine."""
        try:
            self.collect(0)
        except Exception as e:
            self._die(str(e) if isinstance(e, MinivllmError) else describe_error(e))
            raise

    def named_prefixes(self) -> NamedPrefixes:
        """Return the object that stores KV prefixes under names.  RequestError if no storage tier keeps names, or while
        steps are in flight."""
        tiers = self.cache.tiers
        if tiers is None:
            raise RequestError("prefixes with names need a tier that keeps them: set kvstore=disk")
        if self.in_flight:
            raise RequestError("prefixes are saved and dropped while nothing runs")
        assert tiers.prefixes.index is not None
        return tiers.prefixes

    @alone
    def save_prefix(self, name: str, tokens: np.ndarray, salt: tuple[str, ...]) -> int:
        """Store the KV pages of a prompt i32 [n] permanently under a name, and return the number of their tokens.  The
        prompt must have been computed."""
        call = partial(self.ask, self.executor.call)
        return self.named_prefixes().save(name, tokens, salt, call)

    @alone
    def drop_prefix(self, name: str) -> None:
        """Remove the name of a stored prefix.  Its KV pages stay until they are evicted."""
        self.named_prefixes().drop(name, partial(self.ask, self.executor.call))

    @alone
    def load_adapter(self, adapter: LoRARequest, done: Callable[[str], None]) -> None:
        """Load a LoRA adapter into host memory while steps run.  ``done`` is called with "" when it is loaded, or with
        the error.  RequestError if its folder is malformed, or if the engine is paused or asleep."""
        if self.adapters is None:
            problem = "this engine serves no adapters; set enable_lora=true, or adapters"
            raise RequestError(problem, "lora_name")
        self.weights.refuse_held("loads no adapter")
        self.adapters.preload(adapter, done)

    @alone
    def unload_adapter(self, name: str) -> bool:
        """Remove a LoRA adapter by its name, and return False if the name is unknown.  Unfinished requests with the
        adapter still use it."""
        return self.adapters is not None and self.adapters.unload(name)

    @alone
    def call(self, verb: str, args: Mapping[str, Any] | None = None) -> Any:
        """Call the method of the executor with the name ``verb``, such as "profile", and return its result.
        EngineDeadError if the engine has ended."""
        if self.dead:
            raise EngineDeadError(self.dead)
        return self.executor.call(verb, args)

    def stats(self) -> dict[str, Any]:
        """Return the statistics of the engine by name.  Listeners of the event ``stats_asked`` may add some."""
        stats = engine_stats(self)
        self.events.stats_asked(stats)
        return stats

    def fail_all(self, message: str) -> None:
        """End every request with an error and refuse new ones."""
        if not self.dead:
            self._die(message)

    @alone
    def stop(self) -> None:
        """End all requests and stop the executor.  The engine accepts no request afterwards."""
        error = self.dead
        self.fail_all("the engine was stopped")
        if self.cache.tiers is not None and error is None and self.executor.alive():
            # an error here loses only pages that were not stored yet
            with contextlib.suppress(EngineDeadError):
                self.cache.tiers.flush(partial(self.ask, self.executor.call), time.sleep)
        with contextlib.ExitStack() as rest:  # the rest is closed even if the executor raises
            rest.callback(self.events.engine_stopped, error)
            if self.grammars is not None:
                rest.callback(self.grammars.close)
            call_foreign(self.executor.stop)
