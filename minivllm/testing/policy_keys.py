"""Tests of the sort keys of a scheduling policy, which must stay comparable after months and for large numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import strategies as st

from minivllm.core.engine.admission import DTYPES
from minivllm.core.interfaces.scheduler import SchedulerPolicy

from .base import since
from .policy_watch import arrivals, check_key, frozen

# arrival times in seconds, beyond the ranges of float16 and of int32 milliseconds
LATE = (0.0, 1e3, 7e4, 2.0e6, 2.2e6, 1e7)
MILLION = 10**6  # many tokens of a request
AT_ONCE = 1 << 10  # number of requests that arrive together
# numbers of groups of AT_ONCE requests: more than 2**16 requests, in the long profile 2**24
CROWDS, LONG_CROWDS = 80, 1 << 14
GAP = 1e-3  # time in seconds between the arrivals of two requests
PLAIN = {"prompt": 7, "known": 7, "max_out": 7, "predicted_out": 7, "priority": 0, "tenant": 0}
HALF = MILLION // 2
LARGE = {**PLAIN, "prompt": MILLION, "known": MILLION, "max_out": HALF, "predicted_out": HALF}
Pair = tuple[dict[str, Any], dict[str, Any]]


def _close(at: float, by: float = 0.0, number: int = 0) -> Pair:
    """Return the columns of two requests that arrive at ``at`` seconds, ``by`` seconds apart.

    Their ids differ by one if ``by`` is 0; the first has the id ``number``.
    """
    later = at + by
    second_number = number if by else number + 1
    first = {"arrival": at, "ttft_due": at + 1.0, "id": number}
    second = {"arrival": later, "ttft_due": later + 1.0, "id": second_number}
    return first, second


def _apart(*times: float) -> list[Pair]:
    """Return pairs of requests that arrive ``GAP`` seconds apart at some times."""
    return [_close(at, GAP) for at in times]


def _numbered(*numbers: int) -> list[Pair]:
    """Return pairs of requests that arrive together and whose ids differ by one."""
    return [_close(5.0, number=number) for number in numbers]


LATE_NUMBERS = (2**11, 2**15 - 1, 2**24, 2**31 - 1, 2**32)
CLOSE = (  # (difference of the two requests, pairs in an engine that just started, pairs in one that has run for long)
    (f"{GAP:g} s apart", _apart(0.3, 1.7, 2.25), _apart(7e4, 2.2e6, 1e7)),
    ("with numbers one apart", _numbered(1, 6, 11), _numbered(*LATE_NUMBERS)),
)


class PolicyKeys:
    """The tests of the method ``key``, a base class of ``SchedulerConformance``."""

    if TYPE_CHECKING:
        build: Any
        context: Any
        claims: Any
        for_all: Any
        long: bool
        need: Any

    def _new_policy(self) -> SchedulerPolicy:
        return self.build(*self.context())

    @since(1, 0)
    def test_key_gives_a_number_for_each_of_several_sequences(self) -> None:
        """Check that ``key`` returns f64 [n], also for the smallest and largest values that a request may have."""
        numbers = st.integers(1, 6)
        seeds = st.integers(0, 2**32)

        @self.for_all(100, numbers, seeds)
        def keys(n: int, seed: int) -> None:
            rng = np.random.default_rng(seed)

            def pick(dtype: Any, *values: float) -> np.ndarray:
                choices = np.array(values, dtype)
                return rng.choice(choices, n)

            prompt = pick(np.int32, 1, 7, 10**6)
            out = pick(np.int32, 1, 64, 10**6)
            arrival = pick(np.float64, 0.0, 12.5, 1e7)
            columns = {"prompt": prompt, "known": prompt, "predicted_out": out, "max_out": out}
            columns["priority"] = pick(np.int32, -9, 0, 9)
            columns["tenant"] = pick(np.int32, 0, 1, 70000)
            waiting = pick(np.float64, 1e-3, np.inf)
            columns["ttft_due"] = arrival + waiting
            columns["preempted"] = pick(np.int32, 0, 1, 8)
            view = arrivals(arrival, **columns)
            policy = self._new_policy()
            check_key(policy.key(frozen(view)), frozen(view))

    @since(1, 0)
    @pytest.mark.parametrize("due", [1.0, np.inf], ids=["due", "without_a_target"])
    def test_keys_hold_however_long_the_engine_has_run(self, due: float) -> None:
        """Check keys after the engine has run for months, if the plug-in claims ``starvation_free``.

        Every key is finite, and of two requests that are alike the later one never has the smaller key.
        """
        self.need("starvation_free")
        keys = []
        for at in LATE:
            arrival = np.array([at])
            view = frozen(arrivals(arrival, ttft_due=arrival + due))
            policy = self._new_policy()
            keys += check_key(policy.key(view), view)
        shown = ", ".join(f"{key:g} at {at:g} s" for at, key in zip(LATE, keys, strict=True))
        assert np.isfinite(keys).all(), f"key() returned {shown}: expected finite numbers"
        assert keys == sorted(keys), f"key() returned {shown}: later requests overtake earlier ones"

    @since(1, 0)
    def test_keys_stay_apart_however_large_the_numbers_are(self) -> None:
        """Check two requests that differ only by a millisecond of arrival, or by their ids.

        If their keys differ in an engine that just started, they differ after months of its clock too, and after
        millions of tokens of one tenant.  (Float32 has a resolution of a second at 10**7 s, and counts tokens up to
        2**24.)
        """
        for difference, young, old in CLOSE:
            early = [self._pair(pair) for pair in young]
            if all(a != b for a, b in early):
                for pair in old:
                    a, b = self._pair(pair)
                    assert a != b, (
                        f"{difference}: key() returned {a!r} for both of {pair}, and {early[0]} for {young[0]}"
                    )
        self._after_much_work()

    def _pair(self, requests: Pair) -> list[float]:
        """Return the keys of two requests, each computed by a policy of its own."""
        keys = []
        for request in requests:
            policy = self._new_policy()
            keys += self._keys(policy, request)
        return keys

    @since(1, 0)
    def test_a_key_does_not_depend_on_who_comes_with_it_nor_on_bits(self) -> None:
        """Check that a key does not depend on the other requests of the call.

        Keys of several calls are compared with each other.  A product of two columns, which are int32, must be
        computed in 64 bits.
        """
        others = ({**LARGE, "priority": -9, "tenant": 5}, {**PLAIN, "prompt": 1, "priority": 9})
        for one in (PLAIN, LARGE):
            (alone,) = self._keys_of(one)
            for other in others:
                got = self._keys_of(one, other)[0]
                assert got == alone, f"key() returned {alone} for {one}, and {got} if {other} arrives with it"
            (wide,) = self._keys_of(one, dtype=np.int64)
            assert wide == alone, f"key() returned {alone} for {one}, and {wide} if its columns are i64: i32 overflows"

    def _keys_of(self, *requests: Mapping[str, Any], dtype: Any = np.int32) -> list[float]:
        """Return the keys that a new policy gives to requests that arrive in one call."""
        columns = {}
        for name in requests[0]:
            values = [r[name] for r in requests]
            columns[name] = np.array(values, dtype)
        arrival = np.arange(float(len(requests)))
        view = arrivals(arrival, **columns)
        policy = self._new_policy()
        result = policy.key(frozen(view))
        return check_key(result, view)

    def _after_much_work(self) -> None:
        """Check that a policy's count of a tenant's work neither stops nor wraps around after many requests."""
        policy = self._new_policy()
        first = self._keys(policy, {}, {})
        many = np.full(AT_ONCE, MILLION, np.int32)
        times = LONG_CROWDS if self.long else CROWDS
        counts = dict.fromkeys(("prompt", "known", "max_out", "predicted_out"), many)
        crowd = arrivals(np.zeros(AT_ONCE), **counts)
        between = []
        for _ in range(times):
            policy.key(frozen(crowd))
            between += self._keys(policy, {})
        last = self._keys(policy, {}, {})
        found = (
            f"key() returned {first} for two requests that are alike, and {last} for two more after "
            f"{times * AT_ONCE:,} others"
        )
        alike = first[0] == first[1]
        assert alike or last[0] != last[1], f"{found}: its count has too few bits"
        risen = between == sorted(between) and last[0] >= first[0]
        assert risen or not self.claims("starvation_free"), f"{found}, and less between: its count wraps around"

    def _keys(self, policy: SchedulerPolicy, *requests: Mapping[str, Any]) -> list[float]:
        """Return the keys of new requests with these columns, from one call of ``key`` for each, in this order.

        A request arrives at 0 seconds unless a column sets it.
        """
        keys = []
        for values in requests:
            columns = {}
            for name, value in values.items():
                dtype = DTYPES.get(name, np.int32)
                columns[name] = np.array([value], dtype)
            arrival = columns.pop("arrival", np.zeros(1))
            view = arrivals(arrival, **columns)
            keys += check_key(policy.key(frozen(view)), view)
        return keys
