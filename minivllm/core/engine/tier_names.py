"""Prefixes with a name: a tier (such as a disk) keeps their KV pages until the name is dropped, also over restarts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.errors import RequestError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from .blocks import Salt
    from .tier_index import TierIndex
    from .tier_loads import Named

    Place = tuple[int, int, Named]  # (KV group, number of the block on the device, key of its page)

LONGEST = 60  # largest number of bytes of a name in UTF-8
WAIT = 60.0  # seconds that storing the pages of a prefix may take


class NameOwner(Protocol):
    """The attributes of ``Tiers`` that are needed to store prefixes under names."""

    tiers: list[TierIndex]
    named: list[dict[int, Named]]
    cache: Any
    storing: dict[int, Any]

    def keys_of(
        self, tokens: np.ndarray, salt: Salt, keys: list[bytes], blocks: int
    ) -> list[bytes]: ...

    @staticmethod
    def page_key(digest: bytes, group: int) -> bytes: ...

    def pages_of(self, n: int, m: int) -> list[tuple[int, int]]: ...

    def order(self, tier: int, group: int, block: int, named: Named) -> bool: ...

    def new_ticket(self) -> int: ...

    def turn(self, call: Callable[..., Any], idle: bool) -> list[Any]: ...


class NamedPrefixes:
    """The named prefixes of an engine.  They are stored in the first tier that can keep names."""

    def __init__(self, owner: NameOwner, opened: Sequence[Mapping[str, Any]]) -> None:
        """Read the names that the tier has stored before, and protect their pages from eviction.  ``opened`` has the
        facts that each rank (worker process) returned when it opened its tiers."""
        self.owner = owner
        keeping = [i for i, facts in enumerate(opened[0]["tiers"]) if facts["keeps_names"]]
        self.tier = keeping[0] if keeping else -1
        self.keys: dict[str, list[bytes]] = {}
        # [tier, id, name, keys or None] of names to store or to remove with the next call of the
        # workers
        self.marks: list[list[Any]] = []
        # id of an order to store or remove a name -> for each rank that has answered, whether it is done
        self.marking: dict[int, list[bool]] = {}
        self.ranks = len(opened)
        found = opened[0]["tiers"][self.tier]["names"] if keeping else {}
        for name, keys in found.items():
            self._pin(name, [bytes.fromhex(key) for key in keys])

    @property
    def index(self) -> TierIndex:
        """Return the ``TierIndex`` (the pages by key, and the evictor) of the tier that stores named prefixes.

        RequestError if no tier can store them."""
        if self.tier < 0:
            raise RequestError("no storage tier can keep named prefixes; add disk to kvstore")
        return self.owner.tiers[self.tier]

    def _pin(self, name: str, keys: list[bytes]) -> None:
        self.keys[name] = keys
        self.index.pin(keys)

    def tokens(self) -> dict[str, int]:
        """Return the stored names, each with the number of tokens of its prefix."""
        block = self.owner.cache.block
        return {name: block * sum(key[-1] == 0 for key in keys) for name, keys in self.keys.items()}

    def save(self, name: str, tokens: np.ndarray, salt: Salt, call: Callable[..., Any]) -> int:
        """Store the KV pages of the prompt ``tokens`` under a name, and return the number of stored tokens.  The prompt
        must have been computed, and no step may be in flight.

        RequestError if the name is malformed, or if no page can be stored."""
        index = self.index
        if not name or len(name.encode()) > LONGEST:
            raise RequestError(
                f"name={shown(name)}: expected 1 to {LONGEST} bytes of UTF-8", "name"
            )
        blocks = len(tokens) // self.owner.cache.block
        keys = self.owner.keys_of(tokens, salt, [], blocks)
        where: dict[bytes, Place] = {}
        for g, of_group in enumerate(self.owner.named):
            where |= {named.key: (g, block, named) for block, named in of_group.items()}
        wanted = self._longest(keys, {*where, *index.stored})
        if not wanted:
            least = self.owner.cache.block
            raise RequestError(
                f"no block of the {len(tokens)} tokens is cached; expected a prompt of at least {least + 1} tokens, "
                "and more with recurrent states",
                "prompt",
            )
        before = self.keys.pop(name, None)
        self._pin(name, wanted)
        try:
            self._store([where[key] for key in wanted if key not in index.size], call)
            self._mark(name, wanted, call)
        except RequestError:
            index.unpin(self.keys.pop(name))
            if before is not None:
                self.keys[name] = before
            raise
        if before is not None:
            index.unpin(before)
        return self.tokens()[name]

    def _longest(self, keys: list[bytes], there: set[bytes]) -> list[bytes]:
        """Return the pages of the longest prefix whose pages are all in ``there``."""
        for m in range(len(keys), 0, -1):
            pages = [self.owner.page_key(keys[i], g) for g, i in self.owner.pages_of(0, m)]
            if there.issuperset(pages):
                return pages
        return []

    def _store(self, places: list[Place], call: Callable[..., Any]) -> None:
        """Store blocks in the tier, and wait until this is done.  RequestError if there is no room for one of them."""
        end = time.monotonic() + WAIT
        todo = list(places)
        while todo or self.owner.storing:
            while todo and self.owner.order(self.tier, *todo[0]):
                todo.pop(0)
            if (todo and not self.owner.storing) or time.monotonic() > end:
                raise RequestError(
                    "the tier has no room for the blocks; raise its option bytes, or drop other names"
                )
            self.owner.turn(call, True)
            time.sleep(1e-3)
        if any(named.key not in self.index.stored for *_, named in places):
            raise RequestError("a block could not be stored: the disk is full or fails")

    def _mark(self, name: str, keys: list[bytes] | None, call: Callable[..., Any]) -> None:
        """Write a name with the keys of its pages to the storage, or remove the name if ``keys`` is None.  RequestError
        if that fails."""
        ticket = self.owner.new_ticket()
        answers = self.marking[ticket] = []
        listed = None if keys is None else [key.hex() for key in keys]
        self.marks.append([self.tier, ticket, name, listed])
        end = time.monotonic() + WAIT
        while len(answers) < self.ranks and time.monotonic() < end:
            self.owner.turn(call, True)
            time.sleep(1e-3)
        if len(answers) < self.ranks or not all(answers):
            raise RequestError(
                f"the name {shown(name)} could not be written: the disk is full or fails"
            )
        del self.marking[ticket]

    def marked(self, ticket: int, kept: bool) -> None:
        """Store the answer of one rank to an order to write or remove a name."""
        self.marking[ticket].append(kept)

    def drop(self, name: str, call: Callable[..., Any]) -> None:
        """Remove a name; its pages may be evicted then.  RequestError if there is no such name."""
        index = self.index
        if name not in self.keys:
            known = ", ".join(map(shown, self.keys)) or "none"
            raise RequestError(f"no prefix is called {shown(name)}; there are: {known}", "name")
        index.unpin(self.keys.pop(name))
        self._mark(name, None, call)
