"""Taps on the host: read and change values at tap points (named places in the model).

This module checks a request's taps, selects the tap points that each row of a step reads, and stores the values.

    step              1             2           3 (preempted)   4               5
    computed          p p p p       p p g       .               p p p p p p     g g
    read              0 1 2 3       4 5 6                       (none again)    7 8

A sequence reads each position once, in order (``TapValues.upto``).  A position that is computed again is not read
again, and a request that reads uses the prefix cache only for positions that it has read.  A branch's values begin
where it forked; the first sequence has the values before that position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minivllm.core.interfaces.plan import StepPlan
from minivllm.core.interfaces.taps import KEPT, LOGITS, Tap, by_point, read_only
from minivllm.errors import RequestError, shown, suggest

from .kept_sets import KeptReader, check_kept
from .request import FINISHED
from .routes import RequestRoutes, check_routes
from .tap_values import Growing, RequestTaps, TapValues

if TYPE_CHECKING:
    from minivllm.core.interfaces.executor import Capacity, Executor, Wiring

    from .request import Request, Seq
    from .slots import Slots

NO_ROUTES = np.empty(0, np.int32)
# largest number of each dtype; other dtypes have the range of float32
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}


class TapLimits(NamedTuple):
    """Limits of taps: ``widths`` has the width of each tap point, and ``most`` is the number of bytes that a request
    may read."""

    widths: tuple[int, ...] = ()
    most: int = 0
    kept: KeptReader | None = None  # stores which tokens compressions keep

    @classmethod
    def of(cls, capacity: Capacity, wiring: Wiring) -> TapLimits:
        widths = tuple((capacity.taps or {}).values())
        return cls(widths, wiring.max_tap_bytes, KeptReader(wiring, capacity))

    @property
    def too_many(self) -> str:
        """Return the error message for a request that reads more than ``most`` bytes."""
        return (
            f"taps: the values that are read take more than {self.most} bytes; read fewer points, "
            "give a shorter prompt or fewer max_tokens, or raise the engine's max_tap_bytes"
        )


NO_LIMITS = TapLimits()


def check_taps(request: Request, wiring: Wiring, capacity: Capacity, executor: Executor) -> None:
    """Check the taps of a request (named tensors of the model that it reads or changes) and set ``request.tapped``.

    RequestError for an unknown point, a vector of the wrong size or range, values that cannot be read, or more values
    than a request may read."""
    check_kept(request, wiring, capacity)
    taps = [tap for tap in request.taps if tap.point != KEPT]
    routes = check_routes(request.params.routes, request.end, capacity, wiring.parts["model"].name)
    if not taps and routes is None:
        return
    points = capacity.taps
    if points is None:
        who = f"the executor {type(executor).__name__}"
        raise RequestError(f"taps: {who} does not support taps; use another executor", "taps")
    if not points:
        name = wiring.parts["model"].name
        raise RequestError(f"taps: the model {name} has no tap points; leave taps out", "taps")
    numbers = {name: i for i, name in enumerate(points)}
    read: dict[int, tuple[str, int]] = {}
    steering: dict[int, np.ndarray] = {}
    for tap in taps:
        if tap.point not in numbers:
            what = f"taps: the model has no point {shown(tap.point)}; expected one of those that LLM.tap_points() lists"
            raise RequestError(f"{what}.{suggest(tap.point, points)}", "taps")
        number = numbers[tap.point]
        if tap.read:
            read[number] = tap.point, points[tap.point]
        if tap.add is not None:
            before = steering.get(number, np.float32(0))
            with np.errstate(over="ignore", invalid="ignore"):  # refused below
                steering[number] = before + _fitting(tap, points[tap.point])
    limit = LARGEST.get(wiring.dtype, np.inf)
    for number, vector in steering.items():
        if not np.isfinite(vector).all() or np.abs(vector).max() > limit:
            name = list(points)[number]
            raise RequestError(
                f"taps: the vector added at {name} has values out of the range of {wiring.dtype}"
                "; use smaller numbers or a smaller scale",
                "taps",
            )
    if routes is not None:
        _add_routes(routes, points, read, steering)
    if read and request.beams is not None:
        name = "taps" if routes is None or not routes.reads else "routes"
        raise RequestError(
            f"{name}: values cannot be read in a request with a beam search"
            "; use read=False, or leave out beam_width",
            name,
        )
    request.tapped = RequestTaps(
        dict(sorted(read.items())), dict(sorted(steering.items())), numbers[LOGITS], routes
    )
    # The logits of all prompt tokens are only computed if their log-probabilities are requested.
    scores = request.params.prompt_logprobs is not None
    row = 4 * sum(width for name, width in read.values() if name != LOGITS or scores)
    limits = TapLimits.of(capacity, wiring)
    # the values of the prompt are returned with each of the n outputs
    if row * len(request.prompt) * max(request.params.n, 1) > limits.most:
        raise RequestError(limits.too_many, "taps")


def _add_routes(
    routes: RequestRoutes,
    points: Mapping[str, int],
    read: dict[int, tuple[str, int]],
    steering: dict[int, np.ndarray],
) -> None:
    """Add the tap points at which a request reads expert ids or prunes experts to ``read`` and ``steering``."""
    names = list(points)
    for layer in routes.layers if routes.reads else ():
        read[layer.ids] = names[layer.ids], layer.chosen
    for number, vector in routes.pruned.items():
        steering[number] = steering.get(number, np.float32(0)) + vector


def _fitting(tap: Tap, width: int) -> np.ndarray:
    if tap.point == LOGITS:
        raise RequestError(
            "taps: a tap of the model's own logits cannot add a vector"
            "; use it with read=True only, and change logits with logit_bias or a processor",
            "taps",
        )
    if read_only(tap.point):
        raise RequestError(
            f"taps: nothing is added to {tap.point}, which are numbers of experts"
            "; use only read=True, or a tap of the router's logits",
            "taps",
        )
    if len(tap.add) != width:
        raise RequestError(
            f"taps: a vector of {len(tap.add)} numbers for {tap.point}"
            f"; expected {width}, the width of that point",
            "taps",
        )
    return tap.vector


# ---- a step ----------------------------------------------------------------------------------------------------------


def most_cached(seq: Seq, most: int) -> int:
    """Return how many of the first ``most`` tokens may come from the prefix cache.  Tokens are computed if the request
    needs their log-probabilities, tap values or hidden states, which a cached token does not have."""
    request = seq.request
    if request.prompt_topk >= 0:
        return 1
    if (
        request.keep or request.observed
        # The row is compressed at the end of its prompt, and the compression reads the last queries of
        # the prompt.
    ):
        most = min(most, max(1, len(request.prompt) - request.observed + 1))
    if seq.compressions:  # a compression may read the query of the token before it
        most = min(most, *seq.compressions)
    if request.pooling is not None:
        return request.pooling.most_cached(most)
    if request.tapped is not None and request.tapped.read:
        return min(most, 1 + (0 if seq.tap_values is None else seq.tap_values.upto))
    return most


def tap_rows(
    s: Slots, slots: np.ndarray, computed: np.ndarray, q_len: np.ndarray, draws: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns ``taps``, ``steered``, ``given`` and ``routes`` of plan.StepPlan.

    ``slots`` are the slots of the step's rows, and ``draws`` bool marks the rows that draw a token.  The positions that
    the step computes count as read afterwards."""
    # number of a tap point -> (row, first token to read)
    found: dict[int, list[tuple[int, int]]] = {}
    steered: set[int] = set()
    given = list[tuple[int, int]]()
    routes = list[np.ndarray]()
    rows = np.flatnonzero(s.tapped[slots])
    mine = slots[rows]
    scores = (s.prompt_topk[mine] >= 0) & (computed[rows] < s.prompt[mine] - 1)
    of_rows = (rows, mine, computed[rows], q_len[rows], draws[rows], scores)
    for row, slot, at, n, drawn, scored in zip(*(x.tolist() for x in of_rows), strict=True):
        seq = s.at(slot)
        taps = seq.request.tapped
        assert taps is not None
        steered.update(taps.steering)
        if taps.given is not None and at < len(taps.given):
            routes.append(taps.given[at : at + n])
            given.append((row, len(routes[-1])))
        if not taps.read:
            continue
        if seq.tap_values is None:
            seq.tap_values = TapValues(at, at, seq.request.end - at)
        first = max(seq.tap_values.upto - at, 0)
        if first >= n:  # all these positions were read before a preemption
            continue
        seq.tap_values.upto = at + n
        for number in taps.read:
            if number != taps.logits or scored:
                found.setdefault(number, []).append((row, first))
            elif drawn:
                found.setdefault(number, []).append((row, n - 1))
    lines = [(number, *line) for number in sorted(found) for line in found[number]]
    return {
        "taps": np.array(lines, np.int32).reshape(-1, 3),
        "steered": np.array(sorted(steered), np.int32),
        "given": np.array(given, np.int32).reshape(-1, 2),
        "routes": np.concatenate([part.ravel() for part in routes]) if routes else NO_ROUTES,
    }


def reads_all(s: Slots, at: np.ndarray, taps: np.ndarray) -> bool:
    """Return whether a step reads all tap points of the request of each row.

    ``at`` has the slots of the rows, which compute one token each, and ``taps`` is the column of the plan.  If so, a
    step of the same rows with one more token has the same ``taps``."""
    tapped_rows = [s.at(slot).request.tapped for slot in at[s.tapped[at]].tolist()]
    return len(taps) == sum(len(tapped.read) for tapped in tapped_rows if tapped is not None)


class TapKeeper:
    """Stores the tap values of steps with the sequences of their rows.

    Most decode steps read the same points of the same rows as the previous step, and then have the same ``plan.taps``
    array (see ``steady``).  The memory to which each row of this array is written is then looked up only once."""

    def __init__(self, limits: TapLimits) -> None:
        self.limits = limits
        self.taps = np.empty((0, 3), np.int32)
        # for each row of ``taps``: the sequence, and the bytes that it reads in a step
        self.seqs: list[tuple[Seq, int]] = []
        # for each tap point: its width, and the arrays to which the values of its rows are appended
        self.memory: list[tuple[int, list[Growing]]] = []
        # count of stored steps since the rows of ``taps`` last changed, and the count at which the
        # first of their requests exceeds its byte limit
        self.steps = self.room = 0

    def keep(
        self,
        plan: StepPlan,
        live: bool,
        sequence: Callable[[int], Seq | None],
        values: np.ndarray,
        rejected: np.ndarray | None = None,
    ) -> Iterable[Seq]:
        """Append the tap values of a step, f32 in one flat array, to its sequences.

        Return the sequences whose request now exceeds its byte limit.  ``sequence(row)`` returns the sequence of a plan
        row, also of a row that was preempted in the meantime, or None.  ``live`` means that every row still holds its
        slot.  ``rejected`` bool [R] marks rejected drafts, whose values are dropped; None means no rejected drafts.
        """
        if plan.taps is self.taps and live:
            if not self.memory:
                self._begin(sequence)
            if self.steps < self.room:
                self.steps += 1
                at = 0
                for width, memory in self.memory:
                    end = at + width * len(memory)
                    for part, row in zip(memory, values[at:end].reshape(-1, 1, width), strict=True):
                        part.add(row)
                    at = end
                return ()
        self.end()
        self.taps = plan.taps
        return self._look_up(plan, sequence, values, rejected)

    def end(self) -> None:
        """Add the bytes that repeated steps have read to their requests, and clear the looked-up memory.  It is called
        when a step differs from the last one, or when a sequence ends."""
        for seq, size in self.seqs:
            seq.request.tap_bytes += self.steps * size
        self.seqs = []
        self.memory = []
        self.steps = 0
        self.room = 0

    def _begin(self, sequence: Callable[[int], Seq | None]) -> None:
        """Look up the array to which each row of ``taps`` is appended.  All of them exist, because the step before had
        the same rows."""
        sizes: dict[Request, int] = {}
        for number, rows, _ in by_point(self.taps):
            width = self.limits.widths[number]
            memory = []
            for row in rows.tolist():
                seq = sequence(row)
                assert seq is not None and seq.tap_values is not None
                self.seqs.append((seq, 4 * width))
                sizes[seq.request] = sizes.get(seq.request, 0) + 4 * width
                memory.append(seq.tap_values.parts[number])
            self.memory.append((width, memory))
        self.room = min((self.limits.most - r.tap_bytes) // size for r, size in sizes.items())

    def _look_up(
        self,
        plan: StepPlan,
        sequence: Callable[[int], Seq | None],
        values: np.ndarray,
        rejected: np.ndarray | None,
    ) -> Iterable[Seq]:
        over = {}
        at = 0
        for number, rows, firsts in by_point(plan.taps):
            n = plan.q_len[rows] - firsts
            width = self.limits.widths[number]
            ends = n.cumsum()
            block = values[at : at + int(ends[-1]) * width].reshape(-1, width)
            at += block.size
            of_rows = (rows, firsts, ends - n, ends)
            for row, first, begin, end in zip(*(x.tolist() for x in of_rows), strict=True):
                seq = sequence(row)
                if seq is None or seq.status == FINISHED or seq.tap_values is None:
                    continue
                if rejected is not None and rejected[row]:
                    # a rejected draft: the position is computed again with another token
                    seq.tap_values.upto = min(seq.tap_values.upto, int(plan.computed[row]))
                    continue
                request = seq.request
                part = block[begin:end]
                request.tap_bytes += part.nbytes
                if request.tapped is not None and number == request.tapped.logits:
                    before_last = len(request.prompt) - 1 - int(plan.computed[row]) - first
                    if before_last > 0:
                        seq.tap_values.scored.append(part[:before_last].copy())
                        part = part[before_last:]
                if len(part):
                    seq.tap_values.keep(number, part)
                if request.tap_bytes > self.limits.most:
                    over[seq.id, seq.sample] = seq
        return over.values()
