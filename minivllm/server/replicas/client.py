"""The client of several engines: it routes requests, moves them from ended engines, and joins their figures.

protocol ──stream()──► ReplicaClient ──router──► Replica 0 ── engine (a process)
                                                 Replica 1 ── engine (a process)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.router import RoutedRequest, RouterContext
from minivllm.errors import ConfigError, EngineDeadError, RequestError, ResourceError, shown
from minivllm.server.link.client import EngineClient, EngineInfo
from minivllm.server.link.process_client import ProcessClient
from minivllm.server.link.streams import Stream
from minivllm.server.logs import event

from .figures import TOTALS, merged
from .places import environments
from .replica import Orphan, Replica, difference, fail
from .routing import Routing, block_keys
from .weights import SLEEP, STATS, UPDATE, WAKE, ReplicatedWeights, model_files

if TYPE_CHECKING:
    from minivllm.config import Loaded
    from minivllm.core.interfaces.adapters import LoRARequest
    from minivllm.core.interfaces.params import SamplingParams

SLOW = 5.0  # time limit in seconds for the statistics of a replica


class MovedTooOften(EngineDeadError):
    """The error of a request that moved too often."""


def make_client(loaded: Loaded) -> EngineClient:
    """Return the client of the engines that a configuration describes.  ConfigError if the machine has no room."""
    server = loaded.server
    if server.replicas == 1:
        return ProcessClient(loaded, server.stuck_after, server.restart)
    return ReplicaClient(loaded)


class ReplicaClient(EngineClient):
    """An ``EngineClient`` of several replicas.

    A request is sent to one replica.  If the engine of the replica ends before the request has a token, the request
    moves to another replica, at most ``server.replica_retries`` times; else it ends with an error.  Engines that have
    ended are started again.
    """

    def __init__(self, loaded: Loaded) -> None:
        super().__init__()
        self._loaded = loaded
        self.routing = Routing(loaded)
        self._unplaced: list[Orphan] = []  # requests without a token that wait for any replica
        self.moved = 0  # number of moves of requests
        self._updating = asyncio.Lock()
        self._expected: EngineInfo | None = None  # facts that all engines have
        # file of the model -> its size and time of change when the replicas were last started or updated
        self._files: dict[str, tuple[int, int]] = {}
        numbers = itertools.count(1)
        hooks = (self._move_requests, self._use_started, self._verify)
        self.replicas: list[Replica] = []
        for number, environ in enumerate(environments(loaded)):
            self.replicas.append(Replica(number, loaded, environ, numbers, self._read, *hooks))
        self._weights = ReplicatedWeights(self.replicas, loaded.server.stuck_after)
        # tasks that change the weights; they go on when the caller is cancelled
        self._changes: set[asyncio.Task[Any]] = set()

    # ---- start and end -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        first = self.replicas[0]
        opening = [asyncio.create_task(one.open()) for one in self.replicas]
        try:
            await asyncio.gather(*opening)
            for one in self.replicas[1:]:
                if text := difference(vars(one.info), first.info):
                    raise ResourceError(f"replica {one.number} differs from replica 0: {text}")
            await first.load_tokenizer()
        except BaseException:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
            await self.close()
            raise
        for one in self.replicas:
            one.tokenizer, one.on_gap = first.tokenizer, self._gap
        self.tokenizer = first.tokenizer
        self._expected = first.info
        self._files = model_files(self._loaded.engine.model)
        self._join_info()
        blocks = max(1, first.info.kv_tokens // first.info.block)
        self.routing.start(RouterContext(len(self.replicas), first.info.block, blocks))
        self._gone = False

    def _join_info(self) -> None:
        """Set ``info`` to the facts that all engines have, with the sums of their sizes."""
        tokens = sum(one.info.kv_tokens for one in self.replicas)
        rows = sum(one.info.max_num_seqs for one in self.replicas)
        self.info = replace(self.replicas[0].info, kv_tokens=tokens, max_num_seqs=rows)

    async def _verify(self, one: Replica, description: Mapping[str, Any]) -> None:
        """Check a new engine, and give it the weights of the other replicas.

        ResourceError for an engine of another model or version, or with changed files.
        """
        if self._expected is not None and (text := difference(description, self._expected)):
            raise ResourceError(f"replica {one.number} differs from the others: {text}")
        if model_files(self._loaded.engine.model) != self._files:
            text = f"replica {one.number} would differ from the others: the files of the model have changed"
            raise ResourceError(f"{text}; POST /replicas/update replaces all replicas")
        await self._weights.repeat(one)

    async def close(self, drain: float = 0.0) -> bool:
        self._draining = True
        unplaced, self._unplaced = self._unplaced, []
        for orphan in unplaced:
            fail(orphan, EngineDeadError("the engine was stopped"))
        drained = await asyncio.gather(*(one.close(drain) for one in self.replicas))
        self._gone = True
        self._why = "the engine was stopped"
        return all(drained)

    def _gap(self, seconds: float, count: int) -> None:
        if self.on_gap is not None:
            self.on_gap(seconds, count)

    # ---- requests ------------------------------------------------------------------------------------------------

    async def stream(self, prompt_ids: Any, params: SamplingParams, request_id: str, **how: Any) -> Stream:
        self._check_open()
        if any(request_id in one.ids for one in self.replicas):
            raise RequestError(f"request id {shown(request_id)} is in use; expected a new one", "request_id")
        session = how.pop("session", "")
        if session:
            session = f"{how.get('owner', '')} {session}"
        request = self._routed(prompt_ids, params, session, how.get("lora"))
        tried: set[int] = set()
        while True:
            replica = self._choose(request, tried)
            try:
                return await replica.stream(prompt_ids, params, request_id, **how)
            except MovedTooOften:
                raise
            except EngineDeadError:  # the engine has ended or does not read, so the request was not accepted
                tried.add(replica.number)

    def _routed(
        self, prompt_ids: Any, params: SamplingParams, session: str, lora: LoRARequest | None = None
    ) -> RoutedRequest:
        """Return the facts about a request that the router receives."""
        block = self.replicas[0].info.block
        salt = params.salt if lora is None else (*params.salt, lora.lora_name)

        def keys() -> Sequence[int]:
            return block_keys(np.asarray(prompt_ids), salt, block)

        return RoutedRequest(len(prompt_ids), session, keys)

    def _choose(self, request: RoutedRequest, tried: set[int]) -> Replica:
        """Return the replica for a request, except those in ``tried``.  EngineDeadError if no replica accepts
        requests."""
        loads = [one.load() for one in self.replicas if one.accepts and one.number not in tried]
        if not loads:
            raise EngineDeadError(self.healthy()[1] or "no replica accepts requests; try again later")
        number = self.routing.choose(request, loads)
        self.routing.sent(request, number)
        return self.replicas[number]

    async def abort(self, request_id: str) -> None:
        for one in self.replicas:
            await one.abort(request_id)
        for orphan in self._unplaced:
            if orphan.stream.request_id == request_id:
                fail(orphan, RequestError("the request was aborted"))
        self._unplaced = [orphan for orphan in self._unplaced if orphan.stream.running]

    # ---- ends of engines -----------------------------------------------------------------------------------------

    def _move_requests(self, replica: Replica, why: str) -> None:
        """Move the requests without a token of a replica whose engine has ended to other replicas.  A request that has
        moved too often fails."""
        orphans = replica.take_untouched()
        most = self._loaded.server.replica_retries
        kept = [orphan for orphan in orphans if orphan.stream.moves < most]
        for orphan in orphans:
            if orphan.stream.moves >= most:
                fail(
                    orphan,
                    MovedTooOften(f"the request moved {most} times from engines that ended; the last one: {why}"),
                )
        self._place(kept)
        sentence = f"replica {replica.number} ended, {len(kept)} requests without a token move: {why}"
        event("a replica ended", logging.WARNING, sentence, replica=replica.number, moved=len(kept), reason=why)

    def _place(self, orphans: Sequence[Orphan]) -> None:
        """Send requests to replicas.  They wait if no replica accepts requests."""
        for orphan in orphans:
            if not orphan.stream.running:
                continue
            stream = orphan.stream
            request = self._routed(stream.prompt, stream.params, "")
            tried: set[int] = set()
            while True:
                try:
                    replica = self._choose(request, tried)
                except EngineDeadError:
                    orphan.stream.move(self._drop_unplaced, _cut_nothing)
                    self._unplaced.append(orphan)
                    break
                try:
                    replica.adopt(orphan)
                    self.moved += 1
                    break
                except EngineDeadError:
                    tried.add(replica.number)

    def _drop_unplaced(self, stream: Stream) -> None:
        """Forget a waiting request whose stream is not read any longer."""
        self._unplaced = [orphan for orphan in self._unplaced if orphan.stream is not stream]

    def _use_started(self, replica: Replica) -> None:
        """Use a replica whose engine has started."""
        if self._gone or self._draining:
            return
        self.routing.emptied(replica.number)
        self._place_unplaced()

    def _place_unplaced(self) -> None:
        """Send the requests that wait for any replica."""
        unplaced, self._unplaced = self._unplaced, []
        self._place(unplaced)

    # ---- questions -----------------------------------------------------------------------------------------------

    async def _each(self, call: Callable[[Replica], Any]) -> list[Any]:
        """Return the answers of all replicas, None for a replica without one."""

        async def one_answer(one: Replica) -> Any:
            try:
                return await asyncio.wait_for(call(one), SLOW)
            except (asyncio.TimeoutError, EngineDeadError):
                return None

        return list(await asyncio.gather(*map(one_answer, self.replicas)))

    async def stats(self) -> dict[str, Any]:
        """Return the statistics of all engines together, and those of each replica (``replicas``).

        EngineDeadError if no engine answers."""
        answers = await self._each(lambda one: one.stats())
        if not any(answers):
            raise EngineDeadError(self.healthy()[1])
        each = []
        running = []
        for one, found in zip(self.replicas, answers, strict=True):
            if found is None:
                each.append(one.totals.totals() | self._about(one))
                continue
            stats = one.totals.read(found)
            running.append(stats)
            each.append(stats | self._about(one))
        joined = merged(running)
        if running:
            newest = max((stats["weights"] for stats in running), key=lambda found: found["version"])
            joined["weights"] = newest | {"version": self._weights.version}
        for name in TOTALS:  # replicas that do not answer are included
            joined[name] = sum(stats.get(name, 0) for stats in each)
        return joined | {"replicas": each, "moved": self.moved, "router_faults": self.routing.faults}

    def _about(self, one: Replica) -> dict[str, Any]:
        """Return the state of a replica."""
        load = one.load()
        reason = {"reason": one.outdated} if one.outdated else {}
        return {
            **reason,
            "replica": one.number,
            "state": one.condition,
            "pid": one.pid,
            "restarts": one.restarted,
            "sent": one.requests,
            "requests": load.requests,
            "tokens": load.tokens,
        }

    def about(self) -> list[dict[str, Any]]:
        """Return the state of each replica."""
        return [self._about(one) for one in self.replicas]

    async def state(self, trim: bool) -> dict[str, Any]:
        return {"replicas": await self._each(lambda one: one.state(trim))}

    async def snapshot(self, owner: str | None, steps: int = 0, ended: int = 0) -> dict[str, Any]:
        """Return the state of the first replica whose engine runs, and its number, for the page.  EngineDeadError if
        none runs."""
        for one in self.replicas:
            if one.healthy()[0]:
                found = await one.snapshot(owner, steps, ended)
                return found | {"replica": one.number, "replicas": len(self.replicas)}
        raise EngineDeadError(self.healthy()[1])

    def tables(self) -> dict[str, int]:
        found = merged([one.tables() for one in self.replicas])
        found["read"] = len(self._read)
        return found | {"unplaced": len(self._unplaced)}

    async def reset_prefix_cache(self) -> bool:
        answers = await self._each(lambda one: one.reset_prefix_cache())
        for one, done in zip(self.replicas, answers, strict=True):
            if done:
                self.routing.emptied(one.number)
        return all(answers)

    async def load_adapter(self, adapter: LoRARequest) -> None:
        """Load an adapter in all replicas.  A replica that does not answer loads it with its first request.

        If a replica refuses it, all replicas unload it, and the error of that replica is raised.  EngineDeadError if no
        replica answers."""
        loads = (one.load_adapter(adapter) for one in self.replicas if one.accepts)
        ended = await asyncio.gather(*loads, return_exceptions=True)
        wrong = [e for e in ended if isinstance(e, BaseException) and not isinstance(e, EngineDeadError)]
        if wrong:
            await self._each(lambda one: one.unload_adapter(adapter.lora_name))
            raise wrong[0]
        if all(isinstance(one, EngineDeadError) for one in ended):
            raise EngineDeadError("no replica could load the adapter")

    async def unload_adapter(self, name: str) -> None:
        await self._each(lambda one: one.unload_adapter(name))

    async def weights(self, do: str, **args: Any) -> dict[str, Any]:
        """Make a change in all replicas at the same time, and return the state of each.

        Replicas that do not take part receive no requests before they have the same weights; "left_out" has the
        reasons.  Changes run one after another.  RequestError names replicas that refused an update which others
        accepted.
        """
        if do == STATS:
            answers = await self._each(lambda one: one.weights(STATS))
            states = {one.number: answer for one, answer in zip(self.replicas, answers, strict=True) if answer}
            if not states:
                raise EngineDeadError(self.healthy()[1] or "no replica answers")
            silent = {one.number: "no answer" for one in self.replicas if one.number not in states}
            return _shown_weights(states, silent | self._weights.left_out())
        change = asyncio.create_task(self._change(do, args))
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)

    async def _change(self, do: str, args: dict[str, Any]) -> dict[str, Any]:
        """Make a change in all replicas, and return the answer of the route.  Afterwards waiting requests are placed
        again."""
        try:
            states, left_out = await self._weights.change(do, args)
        finally:
            self._place_unplaced()  # a replica may serve again
        if do in (UPDATE, SLEEP, WAKE):
            for number in states:
                self.routing.emptied(number)
        return _shown_weights(states, left_out)

    async def prefixes(self) -> dict[str, Any]:
        """Raise RequestError, because each engine would keep its own names."""
        raise RequestError("named prefixes need one engine: each replica has its own tiers; start without --replicas")

    async def save_prefix(self, name: str, ids: list[int], tenant: str, cache_salt: str | None) -> int:
        await self.prefixes()
        return 0

    async def drop_prefix(self, name: str) -> None:
        await self.prefixes()

    async def profile(self, start: bool) -> str:
        """Start or stop a profile of replica 0, as an example of all replicas.  Return what its engine returns."""
        return await self.replicas[0].profile(start)

    def health(self) -> dict[str, Any]:
        serving = sum(one.condition == "serving" for one in self.replicas)
        counts = {"serving": serving, "all": len(self.replicas)}
        restarts = {"restarts": self.restarted} if self.restarted else {}
        return {"replicas": counts, **restarts}

    def healthy(self) -> tuple[bool, str]:
        """Return whether a replica serves, and the reason of the first one if none does."""
        reasons = [one.healthy() for one in self.replicas]
        good = any(healthy and one.accepts for one, (healthy, _) in zip(self.replicas, reasons, strict=True))
        if good:
            return True, ""
        faults = [why for _, why in reasons] + [one.outdated for one in self.replicas]
        return False, next(filter(None, faults), "all replicas are drained")

    @property
    def restarting(self) -> bool:
        """Return whether an engine is being started again, or is drained and can be resumed."""
        return any(one.restarting or one.held for one in self.replicas)

    @restarting.setter
    def restarting(self, value: bool) -> None:
        """Ignore the value that the base class sets, because the value follows from the replicas."""

    @property
    def restarted(self) -> int:
        """Return the number of restarts of all engines."""
        return sum(one.restarted for one in self.replicas)

    @restarted.setter
    def restarted(self, value: int) -> None:
        """Ignore the value that the base class sets, because the value is the sum over the replicas."""

    # ---- operators -----------------------------------------------------------------------------------------------

    def hold(self, number: int, held: bool) -> None:
        """Send no new requests to a replica, or (``held`` false) send them again.

        RequestError for an unknown number, or for the last replica that serves."""
        if not 0 <= number < len(self.replicas):
            most = len(self.replicas) - 1
            raise RequestError(f"replica {number}: expected a number from 0 to {most}", "number")
        if self._updating.locked():
            raise RequestError("an update of the replicas is running; try again later", "number")
        others = [one for one in self.replicas if one.accepts and one.number != number]
        if held and not others:
            raise RequestError(f"replica {number} is the only one that serves; resume another one first", "number")
        outdated = self.replicas[number].outdated
        if outdated and not held:
            text = f"replica {number} has other weights or another state than the others ({outdated})"
            raise RequestError(f"{text}; POST /update_weights with all weights gives it the same ones", "number")
        self.replicas[number].drained = held
        if not held:
            self._place_unplaced()

    async def update(self, loaded: Loaded) -> None:
        """Replace the engines one after the other by engines with another configuration.

        Each replica first ends its requests, while the others serve.  The first error stops the update: the replica
        gets an engine with its old configuration, and the others stay as they are.
        RequestError if another update is running, or if fewer than two replicas serve.  ConfigError if the [server]
        table differs."""
        if self._updating.locked():
            raise RequestError("an update of the replicas is already running; try again later", "update")
        server = loaded.server
        if server != self._loaded.server:
            raise ConfigError("the [server] table differs from the running one; restart the server to change it")
        if sum(one.accepts for one in self.replicas) < 2:
            raise RequestError(
                "an update needs two replicas that serve: one is replaced while others serve; resume drained ones "
                "first",
                "update",
            )
        async with self._updating:
            files = model_files(loaded.engine.model)
            if files != self._files:
                await self._weights.rebase()
            self._files = files
            for one in self.replicas:
                event("a replica is updated", replica=one.number)
                await one.replace(loaded, server.request_timeout)
            self._loaded = loaded
            self._join_info()


def _cut_nothing(stream: Stream, sample: int, stop: str) -> None:
    """Do nothing, since a request that waits for a replica has no text."""


def _shown_weights(states: Mapping[int, Any], left_out: Mapping[int, str]) -> dict[str, Any]:
    """Return the answer of the routes that change weights."""
    shown_states = {str(number): state for number, state in states.items()}
    reasons = {str(number): reason for number, reason in left_out.items()}
    return {"replicas": shown_states, "left_out": reasons} if reasons else {"replicas": shown_states}
