"""Find a smaller case with the same fault.

Requests are dropped, and then features of engines and requests are replaced by plain values, as long as the case fails.
A fault on a GPU is often a race, so each candidate is tried several times.
"""

from __future__ import annotations

import pprint
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from .asks import width
from .cases import KINDS, Ask, Case
from .configs import PLAIN
from .pool import Pool

NEEDED = ("seed", "max_tokens")
WILD = KINDS[:5]  # one race may appear as any of these kinds
SHORTER = (1, 2, 4, 8, 16)


@dataclass
class Shrinker:
    """A search for a smaller case.  ``times`` is the number of tries of a candidate; one fault is enough."""

    case: Case
    folder: Path
    processes: int
    times: int
    silence: float
    until: float
    ignored: list[str] = field(default_factory=list)  # kinds that are no failure
    tried: int = 0
    reported: dict[str, Any] = field(default_factory=dict)
    pool: Pool | None = None

    def fails(self, case: Case) -> bool:
        """Return whether one of several tries has a fault.  Workers are kept for the next candidate."""
        found: list[Any] = []
        if self.pool is None:
            self.pool = Pool(min(self.processes, self.times), self.folder, self.silence, self.until)

        def done(_: Case, result: dict[str, Any]) -> bool:
            self.tried += 1
            found.extend(fault for fault in result["faults"] if self.counts(fault[0]))
            return bool(found)

        self.pool.run(iter([case] * self.times), done, keep=True)
        if found:
            self.reported = {"kind": found[0][0], "message": found[0][1]}
        return bool(found)

    def counts(self, kind: str) -> bool:
        """Return whether a fault counts, which must have the kind of the first, or both may be faults of the device."""
        if not self.reported:
            return kind not in self.ignored
        return kind == self.reported["kind"] or (kind in WILD and self.reported["kind"] in WILD)

    def run(self) -> Case | None:
        """Return the smallest case found in time, None if the whole case does not fail."""
        best = self.case
        try:
            if not any(self.fails(best) for _ in range(3)):
                return None
            print(f"it fails: {self.reported['kind']}: {self.reported['message'][:200]}", flush=True)
            for candidates in (fewer, fewer_engines, plainer_engines, plainer_asks, fewer):
                best = self._smaller(best, candidates)
        finally:
            if self.pool is not None:
                self.pool.close()
        return best

    def _smaller(self, best: Case, candidates: Callable[[Case], Iterator[Case]]) -> Case:
        """Apply candidates that still fail, in rounds over all candidates until a round changes nothing."""
        changed = True
        while changed:
            changed, at = False, 0
            while time.monotonic() < self.until:
                smaller = next(islice(candidates(best), at, None), None)
                if smaller is None:
                    break
                if smaller != best and self.fails(smaller):
                    best, changed = smaller, True  # the next candidate now has the same index
                    print(
                        f"{len(best.asks)} requests, {len(best.engines)} engines, {self.reported['kind']}", flush=True
                    )
                else:
                    at += 1
            else:
                return best
        return best

    def program(self, case: Case) -> str:
        """Return the case as a Python program that runs it."""
        what = pprint.pformat(case, width=118, compact=True)
        return f"""# {self.reported["kind"]}: {self.reported["message"][:200]}
# in tests/, with the package on the path:
import tempfile
from pathlib import Path

from fuzz import models
from fuzz.cases import Ask, Case
from fuzz.worker import Player

case = {what}
folder = Path(tempfile.mkdtemp())
models.make(folder)
player = Player(folder)
for _ in range({max(self.times, 1)}):
    print(player.play(case)["faults"])
"""


def keep(case: Case, which: list[int]) -> Case:
    """Return the case with these requests only.  Next turns of removed requests become first turns."""
    at = {old: new for new, old in enumerate(which)}
    asks = [replace(case.asks[i], after=at.get(case.asks[i].after)) for i in which]  # type: ignore[arg-type]
    return replace(case, asks=asks)


def fewer(case: Case) -> Iterator[Case]:
    """Yield the case without half of the requests, a quarter, and so on."""
    n = len(case.asks)
    size = n // 2
    while size >= 1:
        for start in range(0, n, size):
            left = [i for i in range(n) if not start <= i < start + size]
            if left:
                yield keep(case, left)
        size //= 2


def fewer_engines(case: Case) -> Iterator[Case]:
    """Yield the case without one of several engines and its requests."""
    for gone in range(len(case.engines) if len(case.engines) > 1 else 0):
        left = [i for i, a in enumerate(case.asks) if a.engine != gone]
        if left:
            small = keep(case, left)
            asks = [replace(a, engine=a.engine - (a.engine > gone)) for a in small.asks]
            yield replace(small, engines=[e for i, e in enumerate(case.engines) if i != gone], asks=asks)


def plainer_engines(case: Case) -> Iterator[Case]:
    """Yield the case with one option at its plain value, or driven plainly."""
    if case.resets or case.walk:
        yield replace(case, resets=[], walk=False)
    if case.changes or case.mixed:
        yield replace(case, changes=0, mixed=[])
    if case.weights:
        yield replace(case, weights=[])
    if case.late:
        yield replace(case, late=0.0)
    if case.drive != "generate":
        calm = [replace(a, leave=None, delay=0) for a in case.asks]
        yield replace(case, drive="generate", asks=calm)
        yield replace(case, asks=calm)
    if any(a.wave for a in case.asks):
        yield replace(case, asks=[replace(a, wave=0, after=None) for a in case.asks], resets=[], mixed=[])
    for i, options in enumerate(case.engines):
        widest = max((width(a.params) for a in case.asks if a.engine == i), default=1)
        for name, value in PLAIN.items():
            fits = name != "max_num_seqs" or widest <= value
            if options[name] != value and fits:
                engines = [{**e, name: value} if j == i else e for j, e in enumerate(case.engines)]
                yield replace(case, engines=engines)


def plainer_asks(case: Case) -> Iterator[Case]:
    """Yield the case with a request that has fewer parameters, is shorter, or has a shorter prompt."""
    for i, ask in enumerate(case.asks):

        def put(new: Ask, i: int = i) -> Case:
            return replace(case, asks=[new if j == i else a for j, a in enumerate(case.asks)])

        for name in ask.params:
            if name not in NEEDED:
                yield put(replace(ask, params={k: v for k, v in ask.params.items() if k != name}))
        for n in SHORTER:
            if ask.params.get("min_tokens", 0) <= n < ask.params["max_tokens"]:
                yield put(replace(ask, params={**ask.params, "max_tokens": n}))
        for n in (*SHORTER, len(ask.prompt) // 2):
            if 0 < n < len(ask.prompt):
                yield put(replace(ask, prompt=ask.prompt[:n]))
