"""Facts about the session of a request: a client sends them, and schedulers and evictors read them.

A session is a sequence of requests that repeat each other's text, such as the turns of an agent or of a chat.  No fact
changes a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from minivllm.errors import RequestError, shown
from minivllm.registration.parameters import check_mapping, is_whole

NAME = "session"
# Kinds of the spans (parts) of a prompt. The number of a kind is its index + 1, and 0 means no
# span.
SPAN_KINDS = ("system", "tool", "thought", "user", "other")
MOST_SPANS = 4096
LONGEST = 256  # largest number of characters of a name
INT32 = 2**31 - 1


def _check(ok: bool, name: str, value: Any, expected: str) -> None:
    """Raise RequestError for a field unless ``ok``.  ``expected`` describes the accepted values."""
    if not ok:
        raise RequestError(f"{NAME}.{name}={shown(value)}: expected {expected}", NAME)


def _span(value: Any) -> tuple[str, int]:
    """Return a span as (kind, tokens).  RequestError unless it is that pair, or a mapping with these two keys."""
    pair: Any = value
    if isinstance(value, Mapping):
        pair = (value.get("kind"), value.get("tokens")) if set(value) == {"kind", "tokens"} else ()
    ok = isinstance(pair, (list, tuple)) and len(pair) == 2
    ok = ok and pair[0] in SPAN_KINDS and is_whole(pair[1]) and 1 <= pair[1] <= INT32
    kinds = ", ".join(SPAN_KINDS)
    _check(
        ok,
        "spans",
        value,
        f'{{"kind": ..., "tokens": ...}} with one of {kinds} and 1 or more tokens',
    )
    return pair[0], int(pair[1])


@dataclass(frozen=True)
class Session:
    """Facts about the session of a request.

    ``id`` names the session.  Only requests with the same tenant and ``cache_salt`` share sessions.  ``turn`` names
    this request, and ``parent`` is the ``turn`` of the request that caused it, in this session or in another one.
    ``spans`` are the parts of the prompt in order, from its first token on, each as (kind, tokens) or a mapping with
    these keys; tokens behind them have no kind.  ``next_s`` is the expected time in seconds from the end of this
    request to the next request of the session.  ``deadline_s`` is the time in seconds from the arrival by which the
    answer should be complete.  ``budget`` is the number of tokens that the next request of the session may compute
    before its first token is late.  None means unknown.
    """

    id: str
    turn: str | None = None
    parent: str | None = None
    spans: Sequence[Any] = ()
    next_s: float | None = None
    deadline_s: float | None = None
    budget: int | None = None

    @classmethod
    def of(cls, value: Any) -> Session | None:
        """Return ``value`` as a Session: a Session, a mapping of its fields, or None.  RequestError for others."""
        if value is None or isinstance(value, cls):
            return value
        check_mapping(NAME, value, "Session or a mapping with an id", [f.name for f in fields(cls)])
        if "id" not in value:
            raise RequestError(f"{NAME}: the id is missing; expected a name of the session", NAME)
        return cls(**value)

    def __post_init__(self) -> None:
        """Check the fields, and convert the spans to pairs.  RequestError names the wrong field."""
        for name in ("id", "turn", "parent"):
            text = getattr(self, name)
            ok = isinstance(text, str) and 1 <= len(text) <= LONGEST and text.isprintable()
            optional = text is None and name != "id"
            _check(ok or optional, name, text, f"1 to {LONGEST} printable characters")
        for name in ("next_s", "deadline_s"):
            seconds = getattr(self, name)
            ok = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
            ok = ok and 0 < seconds <= 1e9
            _check(
                ok or seconds is None, name, seconds, "a positive number of seconds, at most 1e9"
            )
        budget = self.budget
        ok = budget is None or (is_whole(budget) and 0 <= budget <= INT32)
        _check(ok, "budget", budget, "a whole number of tokens >= 0")
        ok = isinstance(self.spans, (list, tuple)) and len(self.spans) <= MOST_SPANS
        _check(ok, "spans", self.spans, f"a list of at most {MOST_SPANS} spans")
        object.__setattr__(self, "spans", tuple(map(_span, self.spans)))

    def kinds(self, tokens: int, block: int) -> np.ndarray:
        """Return the kind of the first token of each block of ``block`` tokens of a prompt, as numbers i8 [blocks].

        ``tokens`` is the length of the prompt."""
        ends = np.cumsum([length for _, length in self.spans])
        numbers = [SPAN_KINDS.index(kind) + 1 for kind, _ in self.spans]
        starts = np.arange(0, tokens, block)
        return np.array([*numbers, 0], np.int8)[np.searchsorted(ends, starts, side="right")]


@dataclass(frozen=True)
class SessionTurn:
    """The facts about a request of a session, as evictors and schedulers receive them.

    Names are replaced by numbers: positive 63-bit digests of the tenant, the salt and the client's name, so that equal
    names of two tenants differ. 0 means that the client has given no name."""

    session: int
    turn: int = 0
    parent: int = 0
    tokens: int = 0  # length of the sequence: the prompt and the tokens generated so far
    # expected seconds from the end of the request to the next one; inf means unknown
    next_s: float = np.inf
    deadline: float = np.inf  # time on the engine's clock by which the answer should be complete
    budget: int = -1  # tokens that the next request may compute before it is late; -1 means unknown
