"""The conformance suite of routers, which choose the replica (engine process) that serves a request.

Random requests of sessions with common prefixes are routed while replicas stop and start.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from minivllm.core.interfaces.router import ReplicaLoad, ReplicaRouter, RoutedRequest, RouterContext

from .base import since
from .kept import Lasting
from .spec import SpecConformance

REPLICAS = 4
CTX = RouterContext(REPLICAS, block=16, blocks=512)
MS = 1.0  # allowed time of a choice with the keys of a long prompt, in milliseconds
LONG = 2000  # number of block keys of a long prompt
TRIES = 5  # number of attempts, one of which must be fast enough, because another process may slow down the others
SHARE = 0.5  # least share of new prompts that each idle replica receives, relative to an even division


def request(keys: Sequence[int], session: str = "") -> RoutedRequest:
    """Return a request whose prompt has these block keys (hashes of its full blocks)."""
    return RoutedRequest(CTX.block * len(keys) + 3, session, lambda: keys)


@dataclass
class RouterWorld:
    """Replicas with their running requests, and a router that is called as a server calls it."""

    router: ReplicaRouter
    rng: random.Random
    open: set[int] = field(default_factory=lambda: set(range(REPLICAS)))  # replicas that accept requests
    running: list[tuple[int, RoutedRequest]] = field(default_factory=list)

    def loads(self) -> list[ReplicaLoad]:
        """Return the loads of the replicas that accept requests, in any order."""
        loads = []
        for number in self.open:
            sizes = [one.tokens for at, one in self.running if at == number]
            waiting = sum(sizes[-2:])
            load = ReplicaLoad(number, len(sizes), sum(sizes), waiting)
            loads.append(load)
        self.rng.shuffle(loads)
        return loads

    def route(self, one: RoutedRequest) -> int:
        """Route a request, and check that the chosen replica accepts requests."""
        number = self.router.choose(one, self.loads())
        valid = type(number) is int and number in self.open
        assert valid, f"choose returned {number!r}: expected the number of a replica in loads, one of {self.open}"
        self.router.sent(one, number)
        self.running.append((number, one))
        return number

    def end_some(self) -> None:
        """End some of the running requests."""
        self.rng.shuffle(self.running)
        del self.running[len(self.running) // 2 :]

    def lose(self, number: int) -> None:
        """End a replica."""
        self.open.discard(number)
        self.running = [(at, one) for at, one in self.running if at != number]

    def restart(self, number: int) -> None:
        """Restart replica ``number``, whose cache is empty afterwards."""
        self.router.emptied(number)
        self.open.add(number)


def sessions(rng: random.Random, count: int) -> Iterator[RoutedRequest]:
    """Yield requests of sessions whose prompts grow.

    Some sessions have no name, and some prompts are shorter than a block.
    """
    prompts: dict[str, list[int]] = {}
    for _ in range(count):
        name = f"s{rng.randrange(12)}"
        prompt = prompts.setdefault(name, [7, 8])
        prompt += [rng.getrandbits(60) for _ in range(rng.randrange(4))]
        if rng.random() < 0.1:
            keys = []
        else:
            keys = list(prompt)
        yield request(keys, name if rng.random() < 0.8 else "")


class RouterConformance(Lasting, SpecConformance):
    """The conformance suite of routers.

    A test class needs no methods of its own.  A router that claims ``sticky`` is also tested with sessions.
    """

    kind = "router"

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        return (CTX,)

    def exercise(self, instance: ReplicaRouter) -> Any:
        """Return the replicas that a router chooses for random requests."""
        world = RouterWorld(instance, random.Random(1))
        return [world.route(one) for one in sessions(random.Random(1), 40)]

    def lasting(self) -> ReplicaRouter:
        """Create the instance of the leak test, which routes many requests."""
        return self.build(*self.context())

    def once_more(self, instance: ReplicaRouter, number: int) -> None:
        """Route requests of new prompts and new sessions."""
        rng = random.Random(number)
        world = RouterWorld(instance, rng)
        for turn in range(40):
            prompt = [rng.getrandbits(60) for _ in range(50)]
            world.route(request(prompt, f"{number:06}-{turn:02}"))

    def let_go(self, instance: ReplicaRouter) -> None:
        """Release an instance of the leak test; there is nothing to stop."""

    @since(1, 0)
    def test_a_choice_is_a_replica_that_accepts_requests(self) -> None:
        """Check that only replicas that accept requests are chosen, while replicas stop, drain and start again.

        Sometimes a single replica is left.
        """
        for seed in range(60 if self.long else 10):
            rng = random.Random(seed)
            router = self.build(*self.context())
            world = RouterWorld(router, rng)
            for one in sessions(rng, 200):
                world.route(one)
                if rng.random() < 0.1:
                    world.end_some()
                if rng.random() < 0.1 and len(world.open) > 1:
                    world.lose(rng.choice(sorted(world.open)))
                closed = sorted(set(range(REPLICAS)) - world.open)
                if closed and rng.random() < 0.1:
                    world.restart(rng.choice(closed))

    @since(1, 0)
    def test_new_prompts_of_new_sessions_reach_every_replica(self) -> None:
        """Check that prompts without a common prefix are spread over all replicas while their requests run."""
        rng = random.Random(3)
        router = self.build(*self.context())
        world = RouterWorld(router, rng)
        count = 100
        chosen = Counter(
            world.route(request([rng.getrandbits(60) for _ in range(8)], f"new {number}")) for number in range(count)
        )
        least = SHARE * count / REPLICAS
        few = {number: chosen[number] for number in range(REPLICAS) if chosen[number] < least}
        assert not few, (
            f"{count} new prompts were sent to {dict(chosen)}: expected at least {least:.0f} on each replica"
        )

    @since(1, 0)
    def test_a_replica_that_is_started_again_gets_requests(self) -> None:
        """Check that a replica that starts again and is idle gets a part of the new prompts."""
        rng = random.Random(4)
        router = self.build(*self.context())
        world = RouterWorld(router, rng)
        world.lose(2)
        for number in range(40):
            prompt = [rng.getrandbits(60) for _ in range(8)]
            world.route(request(prompt, f"old {number}"))
        world.restart(2)
        chosen = []
        for n in range(40):
            prompt = [rng.getrandbits(60) for _ in range(8)]
            chosen.append(world.route(request(prompt, f"new {n}")))
        assert 2 in chosen, "a replica that was started again gets no request"

    @since(1, 0)
    def test_a_session_stays_on_its_replica(self) -> None:
        """Check that a router that claims ``sticky`` keeps a session on its replica.

        The session moves only if its replica accepts no requests, and then stays on the new one.
        """
        if not self.claims("sticky"):
            pytest.skip("the router does not claim sticky")
        for seed in range(20 if self.long else 5):
            rng = random.Random(seed)
            router = self.build(*self.context())
            world = RouterWorld(router, rng)
            homes: dict[str, int] = {}
            for one in sessions(rng, 300):
                number = world.route(one)
                home = homes.get(one.session)
                stayed = home is None or number == home or home not in world.open
                assert stayed or not one.session, f"session {one.session} moved from replica {home} to {number}"
                homes[one.session] = number
                if rng.random() < 0.2:
                    world.end_some()
                if rng.random() < 0.03 and len(world.open) > 1:
                    world.lose(rng.choice(sorted(world.open)))
                elif rng.random() < 0.05 and len(world.open) < REPLICAS:
                    world.restart(min(set(range(REPLICAS)) - world.open))

    @since(1, 0)
    def test_a_choice_changes_neither_its_request_nor_the_loads(self) -> None:
        """Check that a choice changes neither the block keys of the request nor the list of loads."""
        router = self.build(*self.context())
        keys = list(range(1, 40))
        loads = []
        for number in (3, 0, 2):
            loads.append(ReplicaLoad(number, 1, 100 * number, 10))
        before = list(loads)
        one = request(keys, "a")
        router.sent(one, router.choose(one, loads))
        assert loads == before, "choose changed the list of loads"
        assert keys == list(range(1, 40)), "the router changed the keys of a request"

    @since(1, 0)
    def test_a_choice_is_fast(self) -> None:
        """Check the time of ``choose`` and ``sent`` for a long prompt, because all requests wait for it."""
        router = self.build(*self.context())
        prompt = list(range(1, LONG + 1))
        loads = [ReplicaLoad(number) for number in range(REPLICAS)]

        def seconds(call: Callable[[RoutedRequest], Any]) -> float:
            times = []
            for turn in range(TRIES):
                keys = [*prompt[: LONG - turn], *range(LONG, LONG + turn)]
                one = request(keys, f"{turn}")
                one.keys  # noqa: B018  (computed by the server)
                begin = time.perf_counter()
                call(one)
                times.append(time.perf_counter() - begin)
            return min(times)

        for name, call in (
            ("choose", lambda one: router.choose(one, loads)),
            ("sent", lambda one: router.sent(one, 1)),
        ):
            ms = 1e3 * seconds(call)
            assert ms < MS, f"{name} takes {ms:.2f} ms for {LONG} keys: expected less than {MS} ms"
