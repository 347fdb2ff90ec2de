"""One replica: the client of an engine whose requests can move to the engines of other replicas."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from minivllm.core.interfaces.router import ReplicaLoad
from minivllm.errors import EngineDeadError, MinivllmError, ResourceError
from minivllm.server.link.client import EngineInfo, settle
from minivllm.server.link.engine_process import GRACE
from minivllm.server.link.frames import encode
from minivllm.server.link.process_client import ProcessClient
from minivllm.server.link.streams import Stream

from .figures import LifeTotals

if TYPE_CHECKING:
    from minivllm.config import Loaded

# facts that may differ between replicas, for example during an update
MAY_DIFFER = ("kv_tokens", "max_num_seqs", "selections", "weight_bytes", "energy", "block", "sampling", "explained")


@dataclass
class Orphan:
    """A request without a token whose engine has ended: its stream, its owner and its frame.

    ``accepted`` is the future of a caller that waits until an engine has accepted the request, or None.
    """

    stream: Stream
    owner: str
    data: bytes
    accepted: asyncio.Future[None] | None


class Replica(ProcessClient):
    """The client of one engine.

    ``numbers`` yields the numbers of streams of all replicas, and ``read`` is their set of streams that a task waits
    for, so that a stream can move.  ``orphaned(replica, why)`` is called when the engine has ended; it takes the
    requests without a token (``take_untouched``).  ``opened(replica)`` is called when an engine has started, and
    ``verify(replica, description)`` before that; it raises a MinivllmError for an engine that may not serve.
    """

    def __init__(
        self,
        number: int,
        loaded: Loaded,
        environ: Mapping[str, str],
        numbers: Iterator[int],
        read: set[Stream],
        orphaned: Callable[[Replica, str], None],
        opened: Callable[[Replica], None],
        verify: Callable[[Replica, Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        super().__init__(loaded, loaded.server.stuck_after, math.inf, environ)
        self.number = number
        self._name = f"replica {number}: "
        self._numbers: Any = numbers
        self._read = read
        self._orphaned, self._on_opened, self._check = orphaned, opened, verify
        self._sizes: dict[int, int] = {}  # number of a stream -> number of its prompt tokens
        self._tokens = 0  # sum of ``_sizes``
        self.closed = False  # whether the socket of the engine has closed while the reason is still unknown
        self.drained = False  # whether an operator, or an update of the replicas, has drained the replica
        self.outdated = ""  # reason why the weights or their state may differ from other replicas, "" if they are equal
        self.engine_version = 0  # version of the weights in the count of the engine
        self.versions: dict[int, int] = {}  # version of the engine -> version that clients see, if they differ
        self.requests = 0  # requests that were sent to this replica
        self.totals = LifeTotals()

    async def _load_tokenizer(self) -> None:
        """Load no tokenizer, since the replicas share one."""

    async def load_tokenizer(self) -> None:
        """Load the tokenizer of the model, for all replicas."""
        await super()._load_tokenizer()

    # ---- load ----------------------------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Return whether the replica receives no new requests although its engine may run."""
        return self.drained or bool(self.outdated)

    @property
    def runs(self) -> bool:
        """Return whether the engine runs, as far as is known."""
        return not (self._gone or self.closed)

    @property
    def accepts(self) -> bool:
        """Return whether requests may be sent to the replica."""
        return not (self._gone or self.closed or self.held or self._draining)

    @property
    def condition(self) -> str:
        """Return the state of the replica in a word: starting, ended, outdated, draining or serving."""
        if self.restarting:
            return "starting"
        if self._gone:
            return "ended"
        if self.outdated:
            return "outdated"
        return "draining" if self.held or self._draining else "serving"

    def load(self) -> ReplicaLoad:
        """Return the load of the replica."""
        waiting = sum(self._sizes.get(number, 0) for number in self._untouched)
        return ReplicaLoad(self.number, len(self._sizes), self._tokens, waiting)

    @property
    def ids(self) -> Mapping[str, int]:
        """Return the number of the stream of each request id."""
        return self._ids

    def _send(self, kind: str, header: dict[str, Any], columns: Any = None) -> None:
        super()._send(kind, header, columns)
        if kind == "add" and columns is not None:
            self._count(header["number"], len(columns["prompt"]))

    def _count(self, number: int, tokens: int) -> None:
        """Count a request of the replica."""
        self.requests += 1
        self._sizes[number] = tokens
        self._tokens += tokens

    def _forget(self, stream: Stream) -> None:
        self._tokens -= self._sizes.pop(stream.number, 0)
        super()._forget(stream)

    # ---- requests that move --------------------------------------------------------------------------------------

    def take_untouched(self) -> list[Orphan]:
        """Remove the requests without a token, and return them in the order of their arrival."""
        orphans = []
        for number, (owner, data) in sorted(self._untouched.items()):
            stream = self._streams.get(number)
            if stream is not None:
                orphans.append(Orphan(stream, owner, data, self._accepting.pop(number, None)))
                self._forget(stream)
        self._untouched.clear()
        return orphans

    def adopt(self, orphan: Orphan) -> None:
        """Send a request of another replica to this engine.  EngineDeadError if it cannot be sent."""
        self._check_open()
        self._open_writer()
        stream, accepted = orphan.stream, orphan.accepted
        number = stream.number
        assert self._outbox is not None
        self._outbox.put(orphan.owner, number, orphan.data)
        stream.move(self._drop, self._cut)
        stream.moves += 1
        self._streams[number] = stream
        self._ids[stream.request_id] = number
        self._untouched[number] = orphan.owner, orphan.data
        self._count(number, stream.prompt_tokens)
        if accepted is not None and not accepted.done():
            self._accepting[number] = accepted
            accepted.add_done_callback(lambda _: self._accepting.pop(number, None))

    def _refuse(self, number: int, error: Exception) -> None:
        """Pass the engine's refusal to the caller of ``stream``, or to the stream of a request that has moved."""
        stream = self._streams.get(number)
        super()._refuse(number, error)
        if stream is not None and stream.moves and number not in self._accepting and stream.running:
            stream.fail(error)
            self._forget(stream)

    # ---- the engine ----------------------------------------------------------------------------------------------

    def _died(self, why: str) -> None:
        """Pass requests without a token to other replicas, fail the others, and start the engine again."""
        if self.restarting:
            self._fail_questions(why)
            return
        self.totals.ended()
        if self._closing or not self._was_open:
            self._lost(why)
            return
        self._gone = True
        self._why = why
        self._orphaned(self, why)
        super()._died(why)

    async def _cause_of_death(self, why: str, printing: asyncio.Task[None]) -> str:
        self.closed = True  # send no request to the engine while the cause of its end is looked for
        return await super()._cause_of_death(why, printing)

    def _opened(self, description: dict[str, Any]) -> None:
        self.closed = False
        super()._opened(description)
        self._on_opened(self)

    async def _verify(self, description: dict[str, Any]) -> None:
        await self._check(self, description)

    def _fail_questions(self, why: str) -> None:
        """End the questions to an engine that has ended."""
        for waiting in self._questions.values():
            settle(waiting, None, EngineDeadError(why))

    def kill(self) -> None:
        """Kill an engine that does not answer.  It is then started again."""
        self._kill()

    # ---- versions of the weights ---------------------------------------------------------------------------------

    def front_version(self, version: int) -> int:
        """Return the version that clients see for a version of the engine's weights."""
        return self.versions.get(version, version)

    def start_versions(self, version: int) -> None:
        """Set the version of the weights that the engine has now."""
        self.versions = {self.engine_version: version}

    def expect(self, reload: bool, version: int) -> None:
        """Set the version of the weights after the next change.

        ``reload`` means that the engine reads the files of the model, which it does not count before an update."""
        number = self.engine_version
        following = 0 if reload and number == 0 else number + 1
        self.versions = {number: self.front_version(number), following: version}

    async def weights(self, do: str, **args: Any) -> dict[str, Any]:
        state: dict[str, Any] = await self._question("weights", {"do": do, "args": args})
        self.engine_version = state["version"]
        return state | {"version": self.front_version(state["version"])}

    async def stats(self) -> dict[str, Any]:
        stats = await super().stats()
        weights = stats["weights"]
        return stats | {"weights": weights | {"version": self.front_version(weights["version"])}}

    # ---- exchange ------------------------------------------------------------------------------------------------

    async def replace(self, loaded: Loaded, seconds: float) -> None:
        """Replace the engine by an engine with another configuration, after its requests have ended.

        The requests may take ``seconds``.  If the new engine does not start, the old configuration is started again,
        and the error of the new one is raised.
        """
        self.drained = True
        try:
            if not await self._drain(seconds):
                raise ResourceError(
                    f"replica {self.number} still has requests after {seconds:g} s; nothing changed, so try again later"
                )
            if self._restart is not None:
                await asyncio.gather(self._restart, return_exceptions=True)
            old, self._loaded = self._loaded, loaded
            self.restarting = True
            self._gone = True
            self._why = "the replica is being updated"
            try:
                await self._exchange()
            except MinivllmError:
                self._loaded = old
                self._restart = asyncio.create_task(self._start_again("the update failed"))
                raise
        finally:
            self.drained = self._draining = False

    async def _exchange(self) -> None:
        """End the engine, and start one with the present configuration.  If it does not start, it is ended and the
        error raised."""
        self._closing = True
        async with self._ending:
            child = self._child
            if child is not None and child.returncode is None:
                with contextlib.suppress(EngineDeadError):
                    self._post(encode("stop", {}))
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(child.wait(), GRACE)
            await self._clear()
            self._fail_questions(self._why)
            self._closing = False
            self.totals.ended()
            try:
                description = await self._start()
                await self._verify(description)
            except BaseException:
                self._closing = True
                await self._clear()
                self._closing = False
                raise
        self.restarting = False
        self._opened(description)


def difference(description: Mapping[str, Any], expected: EngineInfo) -> str:
    """Return a text with the facts in which an engine differs from another one, or ""."""
    found = []
    for field in fields(EngineInfo):
        value, other = description[field.name], getattr(expected, field.name)
        if field.name not in MAY_DIFFER and value != other:
            found.append(f"{field.name} is {str(value)[:60]}, expected {str(other)[:60]}")
    return "; ".join(found)


def fail(orphan: Orphan, error: Exception) -> None:
    """End a request that no replica can serve."""
    settle(orphan.accepted, None, error)
    orphan.stream.fail(error)
