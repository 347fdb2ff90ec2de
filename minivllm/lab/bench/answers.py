"""Times of requests, and results under the names that ``vllm bench serve`` gives them.

Times are measured by the client.  A piece is a streamed part of an answer.

TTFT    time to the first piece, which may have no text yet
TPOT    mean time per output token after the first piece, of a request
ITL     time between two pieces, which may hold several tokens
E2EL    time to the end of the answer
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from . import Result
from .statistics import NAN, percentile

PERCENTILES = (50, 90, 95, 99)


@dataclass
class TimedAnswer:
    """The answer to a request and its times in seconds.

    ``start`` counts from the start of the run, ``ttft`` and ``latency`` from ``start``.  ``itls`` are the times between
    pieces.  ``late`` is the delay of sending after the request was due.
    """

    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    late: float = 0.0
    error: str = ""
    # ids of the tokens of the answer; empty if the answer came over HTTP
    token_ids: list[int] = field(default_factory=list)

    @property
    def tpot(self) -> float:
        """Return the mean seconds per token after the first piece, NaN for an answer of one token."""
        if self.output_tokens <= 1:
            return NAN
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    def within(self, targets: Mapping[str, float]) -> bool:
        """Return whether the answer met all targets, in milliseconds; one token cannot miss a target for TPOT."""
        times = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.latency}
        if self.error:
            return False
        return not any(1e3 * times[name] > limit for name, limit in targets.items())


def spread(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Return the mean, median, standard deviation and percentiles in milliseconds, under vLLM's names."""
    ms = [1e3 * value for value in seconds]
    found = {f"mean_{name}_ms": statistics.fmean(ms) if ms else NAN}
    found[f"median_{name}_ms"] = percentile(ms, 50)
    found[f"std_{name}_ms"] = statistics.pstdev(ms) if ms else NAN
    for q in PERCENTILES:
        found[f"p{q}_{name}_ms"] = percentile(ms, q)
    return found


def figures(answers: Sequence[TimedAnswer], duration: float, targets: Mapping[str, float] | None = None) -> Result:
    """Return the results of a run that took ``duration`` seconds from the first request to the last answer.

    ``request_goodput`` is the number of answers per second that met all ``targets`` (milliseconds), None without
    targets.
    """
    good = [one for one in answers if not one.error]
    prompt_tokens = sum(one.prompt_tokens for one in good)
    output_tokens = sum(one.output_tokens for one in good)
    goodput = None
    if targets:
        goodput = sum(one.within(targets) for one in answers) / duration
    found: Result = {"duration": duration, "completed": len(good), "failed": len(answers) - len(good)}
    found |= {"total_input_tokens": prompt_tokens, "total_output_tokens": output_tokens}
    found["request_throughput"] = len(good) / duration
    found["request_goodput"] = goodput
    found["output_throughput"] = output_tokens / duration
    found["total_token_throughput"] = (prompt_tokens + output_tokens) / duration
    found |= spread("ttft", [one.ttft for one in good])
    found |= spread("tpot", [one.tpot for one in good if one.output_tokens > 1])
    found |= spread("itl", [gap for one in good for gap in one.itls])
    found |= spread("e2el", [one.latency for one in good])
    by_start = sorted((one.start, one.latency) for one in good)
    early = by_start[: max(1, len(good) // 4)]  # answers at the beginning of the run, when no queue can be long yet
    found["early_e2el_ms"] = percentile([1e3 * latency for _, latency in early], 50)
    found["last_arrival"] = max((one.start - one.late for one in answers), default=0.0)
    found["p99_late_ms"] = percentile([1e3 * one.late for one in answers], 99)
    return found


def details(answers: Sequence[TimedAnswer]) -> Result:
    """Return lists with a value for each request (lengths, times, errors), under vLLM's names (``--save-detailed``)."""
    columns = {
        "input_lens": "prompt_tokens",
        "output_lens": "output_tokens",
        "ttfts": "ttft",
        "itls": "itls",
        "e2els": "latency",
        "start_times": "start",
        "errors": "error",
    }
    return {name: [getattr(one, field_name) for one in answers] for name, field_name in columns.items()}
