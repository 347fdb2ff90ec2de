"""A trace from a seed: bursty arrivals, log-normal lengths, a tree of shared beginnings, conversations of many turns.

tree     root ── node ── node ...   system prompts and documents: Zipf decides which child a conversation takes
talk     path in the tree + (question + answer) x turns; the next turn repeats all that was said
time     conversations start in bursts (gaps are gamma-distributed, shape below 1), a user thinks between turns
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from minivllm.errors import ConfigError, shown, suggest

from .presets import PRESETS
from .trace import Trace, build


@dataclass(frozen=True)
class Synthetic:
    """Lengths are tokens, times seconds; a ``spread`` is the standard deviation of the logarithm."""

    requests: int = 5000
    seed: int = 0
    rate: float = 2.0  # conversations a second
    burst: float = 4.0  # squared coefficient of variation of the gaps: 1 is Poisson
    turns: float = 3.0  # of a conversation, on average (geometric)
    think: float = 60.0  # between an answer's request and the next question, median
    think_spread: float = 1.0
    question: int = 200  # median
    answer: int = 200  # median
    spread: float = 0.8
    depth: int = 3  # levels of the tree
    fan: int = 20  # children of a node
    zipf: float = 1.2  # exponent: 0 is uniform
    node: int = 300  # tokens of a node, median
    longest: int = 16384  # a conversation ends before it is longer

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            low: float = 0 if f.name in ("seed", "zipf", "think_spread", "spread", "depth") else 1
            if f.name in ("rate", "burst", "think"):
                low = 1e-6
            if not low <= value < 2**31:
                raise ConfigError(f"synthetic: {f.name}={shown(value)}: want at least {low:g}, and below 2**31")
        if self.requests > 10_000_000 or self.depth * math.log2(self.fan) > 24:
            raise ConfigError("synthetic: at most 10,000,000 requests and a tree (fan ** depth) of 16,777,216 leaves")


def parse(text: str) -> Synthetic:
    """``requests=2000,seed=1``, ``like=chat,rate=5``; ConfigError for what is not there."""
    kinds = {f.name: f.type for f in fields(Synthetic)}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, sign, value = item.partition("=")
        if name == "like":
            if value not in PRESETS:
                near = suggest(value, sorted(PRESETS))
                raise ConfigError(
                    f"synthetic: like={shown(value)}: no such preset.{near} There are: {', '.join(PRESETS)}"
                )
            values = {**PRESETS[value], **values}
            continue
        if name not in kinds:
            raise ConfigError(
                f"synthetic: {shown(name)} is no parameter.{suggest(name, sorted(kinds))} There are: {', '.join(kinds)}"
            )
        try:
            values[name] = int(value) if kinds[name] == "int" else float(value)
        except ValueError:
            sort = "a whole number" if kinds[name] == "int" else "a number"
            raise ConfigError(f"synthetic: {name}={shown(value)}{'' if sign else ' (no =)'}: want {sort}") from None
    return Synthetic(**values)


def generate(s: Synthetic) -> Trace:
    """The same for the same parameters, on any machine with the same numpy."""
    rng = np.random.default_rng(s.seed)
    length = lambda median: max(1, int(median * np.exp(s.spread * rng.standard_normal())))  # noqa: E731
    share = np.arange(1, s.fan + 1) ** -s.zipf
    share /= share.sum()
    nodes: dict[tuple[int, ...], tuple[int, int]] = {}  # path -> (content, tokens)
    content = 0

    def run(tokens: int) -> tuple[int, int]:
        nonlocal content
        content += 1
        return content, tokens

    arrival: list[float] = []
    prompt: list[int] = []
    output: list[int] = []
    answers: list[int] = []
    runs: list[list[tuple[int, int]]] = []
    start, last, talks = 0.0, np.inf, 0
    while start < last:  # every request up to the last one taken has been made by then
        talks += 1
        if talks % 256 == 0 and len(runs) >= s.requests:
            last = float(np.partition(arrival, s.requests - 1)[s.requests - 1])
        start += rng.gamma(1 / s.burst, s.burst / s.rate)
        path = tuple(rng.choice(s.fan, size=s.depth, p=share).tolist())
        said = []
        for level in range(1, s.depth + 1):
            if path[:level] not in nodes:
                nodes[path[:level]] = run(length(s.node))
            said.append(nodes[path[:level]])
        at = start
        for _ in range(int(rng.geometric(1 / s.turns))):
            question, answer = run(length(s.question)), run(length(s.answer))
            said = [*said, question]
            total = sum(n for _, n in said)
            if total + answer[1] > s.longest:
                break
            arrival.append(at)
            prompt.append(total)
            output.append(answer[1])
            answers.append(answer[0])
            runs.append(said)
            said = [*said, answer]
            at += s.think * float(np.exp(s.think_spread * rng.standard_normal()))
        if talks == 1000 and not runs:
            raise ConfigError(f"synthetic: no conversation fits into longest={s.longest}; raise it, or shorten prompts")
    first = np.argsort(np.array(arrival), kind="stable")[: s.requests].tolist()
    take = lambda column: [column[i] for i in first]  # noqa: E731
    name = f"synthetic:requests={s.requests},seed={s.seed}"
    return build(name, take(arrival), take(prompt), take(output), take(answers), take(runs))
