"""The keys of a policy: numbers that mean the same however large they become."""

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

LATE = (0.0, 1e3, 7e4, 2.0e6, 2.2e6, 1e7)  # seconds, past the ends of float16 and of int32 in milliseconds
MILLION, AT_ONCE = 10**6, 1 << 10  # tokens of a request, and how many of them come at once
CROWDS, LONG_CROWDS = 80, 1 << 14  # how many times: past 16 bits of requests, in the long profile past 24
GAP = 1e-3  # seconds between two requests


def _close(at: float, by: float = 0.0, number: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of two requests, the second of which comes ``by`` seconds later."""
    one = lambda t, n: {"arrival": t, "ttft_due": t + 1.0, "id": n}  # noqa: E731
    return one(at, number), one(at + by, number + (not by))


CLOSE = (  # (what differs, pairs of a young engine, pairs of an old one)
    (f"{GAP:g} s apart", [_close(t, GAP) for t in (0.3, 1.7, 2.25)], [_close(t, GAP) for t in (7e4, 2.2e6, 1e7)]),
    ("with numbers one apart", [_close(5.0, number=n) for n in (1, 6, 11)],
     [_close(5.0, number=n) for n in (2**11, 2**15 - 1, 2**24, 2**31 - 1, 2**32)]),
)  # fmt: skip


class PolicyKeys:
    """The tests of ``key``."""

    if TYPE_CHECKING:
        build: Any
        context: Any
        claims: Any
        for_all: Any
        long: bool
        need: Any

    @since(1, 0)
    def test_key_gives_a_number_for_each_of_several_sequences(self) -> None:
        """f64 [n]: also at the edges of what a request may ask for."""

        @self.for_all(100, st.integers(1, 6), st.integers(0, 2**32))
        def keys(n: int, seed: int) -> None:
            rng = np.random.default_rng(seed)
            pick = lambda t, *values: rng.choice(np.array(values, t), n)  # noqa: E731
            prompt, out = pick(np.int32, 1, 7, 10**6), pick(np.int32, 1, 64, 10**6)
            arrival = pick(np.float64, 0.0, 12.5, 1e7)
            view = arrivals(
                arrival,
                prompt=prompt,
                known=prompt,
                predicted_out=out,
                max_out=out,
                priority=pick(np.int32, -9, 0, 9),
                tenant=pick(np.int32, 0, 1, 70000),
                ttft_due=arrival + pick(np.float64, 1e-3, np.inf),
                preempted=pick(np.int32, 0, 1, 8),
            )
            check_key(self.build(*self.context()).key(frozen(view)), frozen(view))

    @since(1, 0)
    @pytest.mark.parametrize("due", [1.0, np.inf], ids=["due", "without_a_target"])
    def test_keys_hold_however_long_the_engine_has_run(self, due: float) -> None:
        """``starvation_free``: of two requests that are alike the later one has no smaller key, at no time of the
        clock, and every key is finite; the clock may have run for months."""
        self.need("starvation_free")
        found = []
        for at in LATE:
            view = frozen(arrivals(np.array([at]), ttft_due=np.array([at + due])))
            found += check_key(self.build(*self.context()).key(view), view)
        shown = ", ".join(f"{key:g} at {at:g} s" for at, key in zip(LATE, found, strict=True))
        assert np.isfinite(found).all(), f"key() gave {shown}: want finite numbers"
        assert found == sorted(found), f"key() gave {shown}: those that come later overtake the others"

    @since(1, 0)
    def test_keys_stay_apart_however_large_the_numbers_are(self) -> None:
        """f64 [n]: of two requests that get different keys when the engine is young, alike but for a millisecond, or
        for their number, the keys differ when it has run for months, and after millions of tokens of one tenant.
        (Float32 tells 10**7 s and a little more from each other by seconds, and counts tokens up to 2**24.)"""
        for what, young, old in CLOSE:
            made = lambda *requests: [self._keys(self.build(*self.context()), r)[0] for r in requests]  # noqa: E731
            early = [made(*pair) for pair in young]
            if all(a != b for a, b in early):
                for pair in old:
                    a, b = made(*pair)
                    assert a != b, f"{what}: key() gave {a!r} for both of {pair}, and {early[0]} for {young[0]}"
        self._after_much_work()

    @since(1, 0)
    def test_a_key_does_not_depend_on_who_comes_with_it_nor_on_bits(self) -> None:
        """Keys of several calls are compared with each other, so that one is no share of the largest beside it; and a
        product of two columns, which are i32, is that of whole numbers of 64 bits."""
        plain = {"prompt": 7, "known": 7, "max_out": 7, "predicted_out": 7, "priority": 0, "tenant": 0}
        large = {**dict.fromkeys(("prompt", "known"), MILLION), "max_out": MILLION // 2, "predicted_out": MILLION // 2}
        for one in (plain, {**plain, **large}):
            alone = self._keys_of(one)[0]
            for other in ({**plain, **large, "priority": -9, "tenant": 5}, {**plain, "prompt": 1, "priority": 9}):
                got = self._keys_of(one, other)[0]
                assert got == alone, f"key() gave {alone} to {one}, and {got} where {other} comes with it"
            wide = self._keys_of(one, dtype=np.int64)[0]
            assert wide == alone, f"key() gave {alone} to {one}, and {wide} if its columns are i64: i32 overflows"

    def _keys_of(self, *requests: Mapping[str, Any], dtype: Any = np.int32) -> list[float]:
        """The keys that a new policy gives to requests that come at once."""
        n = len(requests)
        columns = {name: np.array([r[name] for r in requests], dtype) for name in requests[0]}
        view = arrivals(np.arange(n, dtype=np.float64), **columns)
        return check_key(self.build(*self.context()).key(frozen(view)), view)

    def _after_much_work(self) -> None:
        """What counts the work of a tenant goes on counting."""
        policy = self.build(*self.context())
        first = self._keys(policy, {}, {})
        many, n = np.full(AT_ONCE, MILLION, np.int32), LONG_CROWDS if self.long else CROWDS
        crowd = arrivals(np.zeros(AT_ONCE), prompt=many, known=many, max_out=many, predicted_out=many)
        between = []
        for _ in range(n):
            policy.key(frozen(crowd))
            between += self._keys(policy, {})
        last = self._keys(policy, {}, {})
        said = f"key() gave {first} to two requests that are alike, and {last} to two more after {n * AT_ONCE:,} others"
        assert first[0] == first[1] or last[0] != last[1], f"{said}: what it counts with has too few bits"
        risen = between == sorted(between) and last[0] >= first[0]
        assert risen or not self.claims("starvation_free"), f"{said}, and less between: what it counts with wraps"

    def _keys(self, policy: SchedulerPolicy, *requests: Mapping[str, Any]) -> list[float]:
        """The keys of new requests with these columns, which come one after the other."""
        found = []
        for columns in requests:
            given = {name: np.array([value], DTYPES.get(name, np.int32)) for name, value in columns.items()}
            view = arrivals(given.pop("arrival", np.zeros(1)), **given)
            found += check_key(policy.key(frozen(view)), view)
        return found
