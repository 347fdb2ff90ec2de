"""Timings of requests, and their figures under the names that ``vllm bench serve`` gives them.

Times are measured where the request is made.  TTFT: to the first piece, which may have no text yet; TPOT: mean time
between tokens after it, of one request; ITL: time between two pieces, which may bring several tokens; E2EL: to the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .statistics import NAN, percentile

PERCENTILES = (50, 90, 95, 99)
NAMES = ("ttft", "tpot", "itl", "e2el")
TARGETS = ("ttft", "tpot", "e2el")  # what a target may be given for, in milliseconds


@dataclass
class TimedAnswer:
    """Of one request, in seconds: ``start`` since the run's, ``ttft`` and ``latency`` since ``start``, ``itls`` between
    pieces.  ``late``: how much later it was sent than it was due."""

    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    late: float = 0.0
    error: str = ""
    token_ids: list[int] = field(default_factory=list)  # where they are at hand

    @property
    def tpot(self) -> float:
        """NaN of a single token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else NAN

    def within(self, targets: Mapping[str, float]) -> bool:
        """Whether it met targets in milliseconds; a single token has no time per token to miss."""
        own = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.latency}
        return not self.error and not any(1e3 * own[name] > most for name, most in targets.items())


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation and percentiles in milliseconds, under vLLM's names."""
    ms = [1e3 * one for one in seconds]
    found = {
        f"mean_{name}_ms": statistics.fmean(ms) if ms else NAN,
        f"median_{name}_ms": percentile(ms, 50),
        f"std_{name}_ms": statistics.pstdev(ms) if ms else NAN,
    }
    return found | {f"p{q}_{name}_ms": percentile(ms, q) for q in PERCENTILES}


def figures(
    answers: Sequence[TimedAnswer], duration: float, targets: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Of a run that took ``duration`` seconds from the first request to the last answer.  ``request_goodput``: answers
    a second that met all ``targets`` (milliseconds), None without any."""
    good = [one for one in answers if not one.error]
    ins, outs = sum(one.prompt_tokens for one in good), sum(one.output_tokens for one in good)
    met = None if not targets else sum(one.within(targets) for one in answers) / duration
    found: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": ins,
        "total_output_tokens": outs,
        "request_throughput": len(good) / duration,
        "request_goodput": met,
        "output_throughput": outs / duration,
        "total_token_throughput": (ins + outs) / duration,
    }
    found |= spread("ttft", [one.ttft for one in good])
    found |= spread("tpot", [one.tpot for one in good if one.output_tokens > 1])
    found |= spread("itl", [gap for one in good for gap in one.itls])
    found |= spread("e2el", [one.latency for one in good])
    first = sorted((one.start, one.latency) for one in good)[: max(1, len(good) // 4)]
    found["early_e2el_ms"] = percentile([1e3 * seconds for _, seconds in first], 50)  # before a queue can be long
    found["last_arrival"] = max((one.start - one.late for one in answers), default=0.0)
    found["p99_late_ms"] = percentile([1e3 * one.late for one in answers], 99)
    return found


def details(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """One entry a request, under vLLM's names (``--save-detailed``)."""
    return {
        "input_lens": [one.prompt_tokens for one in answers],
        "output_lens": [one.output_tokens for one in answers],
        "ttfts": [one.ttft for one in answers],
        "itls": [one.itls for one in answers],
        "e2els": [one.latency for one in answers],
        "start_times": [one.start for one in answers],
        "errors": [one.error for one in answers],
    }
