"""Generate a trace from a seed: bursty arrivals, log-normal lengths, shared prefixes, conversations of several turns.

tree           root ── node ── node ...   system prompts and documents; a Zipf distribution chooses each child
conversation   path in the tree + (question + answer) x turns; the prompt of a turn repeats all earlier turns
time           conversations start in bursts (gamma-distributed gaps); a user thinks between two turns
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from minivllm.errors import ConfigError, shown, suggest

from .presets import PRESETS
from .trace import Trace, build

Run = tuple[int, int]  # content number, tokens


@dataclass(frozen=True)
class Synthetic:
    """Parameters of the generator.  Lengths are tokens and times are seconds.

    ``spread`` and ``think_spread`` are standard deviations of the logarithm.  Raise ConfigError for a value out of
    range.
    """

    requests: int = 5000
    seed: int = 0
    rate: float = 2.0  # conversations a second
    burst: float = 4.0  # squared coefficient of variation of the gaps between conversations; 1 is a Poisson process
    turns: float = 3.0  # mean number of turns of a conversation (geometric distribution)
    think: float = 60.0  # median time from a request's arrival to the next request of its conversation
    think_spread: float = 1.0
    known: float = 0.5  # share of the variance of this time's logarithm that the client knows (``Trace.next_s``)
    single: float = 0.0  # share of conversations with a single request, whose clients send no session data
    single_question: int = 2000  # median
    question: int = 200  # median
    answer: int = 200  # median
    spread: float = 0.8
    depth: int = 3  # levels of the tree
    fan: int = 20  # number of children of a node
    zipf: float = 1.2  # exponent of the choice among a node's children; 0 chooses all equally often
    node: int = 300  # tokens of a node, median
    longest: int = 16384  # largest number of tokens of a conversation, which ends before it

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            low: float = 1
            if f.name in ("seed", "zipf", "think_spread", "known", "single", "spread", "depth"):
                low = 0
            if f.name in ("rate", "burst", "think"):
                low = 1e-6
            if not low <= value < 2**31:
                raise ConfigError(f"synthetic: {f.name}={shown(value)}: expected at least {low:g}, and below 2**31")
        for name in ("known", "single"):
            share = getattr(self, name)
            if share > 1:
                raise ConfigError(f"synthetic: {name}={shown(share)}: expected a share from 0 to 1")
        if self.requests > 10_000_000 or self.depth * math.log2(self.fan) > 24:
            raise ConfigError(
                "synthetic: expected at most 10,000,000 requests and a tree of at most 16,777,216 leaves (fan ** depth)"
            )


def parse(text: str) -> Synthetic:
    """Parse parameters such as ``requests=2000,seed=1`` or ``like=chat,rate=5``.

    ``like`` names a preset; the text's own values replace the preset's.  Raise ConfigError for an unknown parameter or
    preset, or a value that is no number.
    """
    kinds = {f.name: f.type for f in fields(Synthetic)}
    values: dict[str, Any] = {}
    given: set[str] = set()
    for item in filter(None, text.split(",")):
        name, sign, value = item.partition("=")
        if name in given:
            raise ConfigError(f"synthetic: {shown(name)} is there twice: expected each parameter once")
        given.add(name)
        if name == "like":
            if value not in PRESETS:
                near = suggest(value, sorted(PRESETS))
                raise ConfigError(
                    f"synthetic: like={shown(value)}: no such preset.{near} There are: {', '.join(PRESETS)}"
                )
            values = {**PRESETS[value], **values}
            continue
        if name not in kinds:
            near = suggest(name, sorted(kinds))
            raise ConfigError(f"synthetic: unknown parameter {shown(name)}.{near} There are: {', '.join(kinds)}")
        whole = kinds[name] == "int"
        try:
            values[name] = int(value) if whole else float(value)
        except ValueError:
            expected = "a whole number" if whole else "a number"
            missing = "" if sign else " (no =)"
            raise ConfigError(f"synthetic: {name}={shown(value)}{missing}: expected {expected}") from None
    return Synthetic(**values)


class _Generator:
    """Draws requests one conversation after another, and numbers each new piece of content."""

    def __init__(self, s: Synthetic):
        self.s = s
        self.rng = np.random.default_rng(s.seed)
        weights = np.arange(1, s.fan + 1) ** -s.zipf
        self.child_shares = weights / weights.sum()
        self.nodes: dict[tuple[int, ...], Run] = {}  # path -> run
        self.contents = 0
        # a separate generator, so that ``known`` does not change the requests
        self.guesses = np.random.default_rng((s.seed, 1))
        self.conversations = 0
        # (arrival, prompt tokens, output tokens, content number of the answer, runs of the prompt, number of the
        # conversation, expected seconds to its next request)
        self.requests: list[tuple[float, int, int, int, list[Run], int, float]] = []

    def arrivals(self) -> list[float]:
        """Return the arrivals of all requests."""
        return [arrival for arrival, *_ in self.requests]

    def draw_run(self, median: int) -> Run:
        """Return a run, (number of a new piece of content, random length in tokens); ``median`` is the median of the
        length.
        """
        factor = np.exp(self.s.spread * self.rng.standard_normal())
        self.contents += 1
        return self.contents, max(1, int(median * factor))

    def draw_prefix(self) -> list[Run]:
        """Return the runs (pieces of content) on a random path of the tree, from its root to a leaf."""
        path = tuple(self.rng.choice(self.s.fan, size=self.s.depth, p=self.child_shares).tolist())
        prefix = []
        for level in range(1, self.s.depth + 1):
            node = path[:level]
            if node not in self.nodes:
                self.nodes[node] = self.draw_run(self.s.node)
            prefix.append(self.nodes[node])
        return prefix

    def draw_conversation(self, start: float) -> None:
        """Draw the requests of a conversation that begins at ``start`` seconds."""
        prompt = self.draw_prefix()
        arrival = start
        self.conversations += 1
        turns = int(self.rng.geometric(1 / self.s.turns))
        session = self.conversations
        median = self.s.question
        if self.is_single():
            turns = 1
            session = -1
            median = self.s.single_question
        for _ in range(turns):
            question = self.draw_run(median)
            answer, output = self.draw_run(self.s.answer)
            prompt = [*prompt, question]
            total = sum(tokens for _, tokens in prompt)
            if total + output > self.s.longest:
                return
            deviation = float(self.rng.standard_normal())
            expected = self.pause(self.guess(deviation))
            self.requests.append((arrival, total, output, answer, prompt, session, expected))
            prompt = [*prompt, (answer, output)]
            arrival += self.pause(deviation)

    def is_single(self) -> bool:
        """Draw whether a conversation has one request."""
        share = self.s.single
        return share > 0 and self.guesses.random() < share

    def pause(self, deviation: float) -> float:
        """Return the seconds between two requests of a conversation for a standard normal deviation."""
        factor = np.exp(self.s.think_spread * deviation)
        return self.s.think * float(factor)

    def guess(self, deviation: float) -> float:
        """Draw the deviation that a client expects: the mean of all deviations that agree with the client's part."""
        known = self.s.known
        noise = float(self.guesses.standard_normal())
        spread = math.sqrt(known * (1 - known))
        return known * deviation + spread * noise


def generate(s: Synthetic) -> Trace:
    """Generate the trace of some parameters: the same on every machine with the same version of numpy.

    Raise ConfigError if no conversation fits into ``longest``.
    """
    generator = _Generator(s)
    start = 0.0
    last = np.inf
    conversations = 0
    # A later conversation cannot contain an earlier request, so the first ``requests`` are final once one starts
    # behind the last of them.
    while start < last:
        conversations += 1
        if conversations % 256 == 0 and len(generator.requests) >= s.requests:
            last = float(np.partition(generator.arrivals(), s.requests - 1)[s.requests - 1])
        start += generator.rng.gamma(1 / s.burst, s.burst / s.rate)
        generator.draw_conversation(start)
        if conversations == 1000 and not generator.requests:
            raise ConfigError(f"synthetic: no conversation fits into longest={s.longest}; raise it, or shorten prompts")
    first = np.argsort(generator.arrivals(), kind="stable")[: s.requests].tolist()
    columns = zip(*(generator.requests[i] for i in first), strict=True)
    return build(f"synthetic:requests={s.requests},seed={s.seed}", *columns)
