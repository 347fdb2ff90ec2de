"""Prometheus metrics: vLLM's names where they exist, so that its dashboards work, and ours by seam.

What happens here is counted as it happens; what the engine knows is asked of it when somebody looks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .link.client import EngineInfo, Stream

TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
# engine's name of a running total -> ours
TOTALS = {
    "preemptions": ("vllm:num_preemptions", "sequences that had to give back their blocks"),
    "prefix_queries": ("vllm:prefix_cache_queries", "prompt tokens that were looked up in the prefix cache"),
    "prefix_hits": ("vllm:prefix_cache_hits", "prompt tokens that were found in the prefix cache"),
    "evictions": ("minivllm:evictions", "cached blocks that had to go"),
    "overshoot_tokens": ("minivllm:overshoot_tokens", "tokens computed behind the end of an answer"),
    "drafted": ("vllm:spec_decode_num_draft_tokens", "tokens that were drafted (speculative decoding)"),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "and those that were right"),
    "steps": ("minivllm:steps", "steps of the engine"),
}  # fmt: skip


PARTS = {
    "queue": "from arrival to a place in the batch", "prefill": "from there to the first token",
    "decode": "from the first token to the end", "inference": "from a place in the batch to the end",
}  # fmt: skip


class Gaps(Collector):
    """``vllm:inter_token_latency_seconds``: one observation a token but the first, cheap enough for every token."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels, self.counts, self.sum = labels, [0] * (len(EACH) + 1), 0.0

    def add(self, seconds: float, count: int) -> None:
        self.counts[bisect_left(EACH, seconds)] += count
        self.sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        whole, buckets = 0, []
        for edge, count in zip((*map(str, map(float, EACH)), "+Inf"), self.counts, strict=True):
            whole += count
            buckets.append((edge, whole))
        text = "from a token to the next of the same answer"
        made = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=tuple(self.labels))
        made.add_metric(list(self.labels.values()), buckets, self.sum)
        yield made


class Metrics:
    """One per server: its registry is its own."""

    def __init__(self, model: str, info: EngineInfo) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._labels = {"model_name": model, "engine": "0"}
        names = tuple(self._labels)
        self._seen: dict[str, float] = {}

        def counter(name: str, text: str, *more: str) -> Any:
            made = Counter(name, text, (*names, *more), registry=self.registry)
            return made if more else made.labels(**self._labels)

        def gauge(name: str, text: str, *more: str) -> Any:
            made = Gauge(name, text, (*names, *more), registry=self.registry)
            return made if more else made.labels(**self._labels)

        def histogram(name: str, text: str, buckets: Any) -> Any:
            return Histogram(name, text, names, buckets=buckets, registry=self.registry).labels(**self._labels)

        self.running = gauge("vllm:num_requests_running", "sequences that run")
        self.waiting = gauge("vllm:num_requests_waiting", "sequences that wait")
        self.cache = gauge("vllm:kv_cache_usage_perc", "share of the KV cache in use, 0 to 1")
        self.prompt = counter("vllm:prompt_tokens", "tokens of prompts")
        self.cached = counter("vllm:prompt_tokens_cached", "of those, found in the prefix cache")
        self.generation = counter("vllm:generation_tokens", "tokens of answers")
        self.success = counter("vllm:request_success", "requests that ended", "finished_reason")
        self.refused = counter("vllm:admission_rejections", "requests refused at the door", "reason")
        self.first = histogram("vllm:time_to_first_token_seconds", "from arrival to the first token", FIRST)
        self.each = histogram(
            "vllm:request_time_per_output_token_seconds", "after the first, the mean of a request", EACH
        )
        self.whole = histogram("vllm:e2e_request_latency_seconds", "from arrival to the end", WHOLE)
        self.prompts = histogram("vllm:request_prompt_tokens", "of a request", SIZES)
        self.generations = histogram("vllm:request_generation_tokens", "of a request", SIZES)
        self.n = histogram("vllm:request_params_n", "answers asked for", (1, 2, 5, 10, 20, 50, 100))
        self.most = histogram("vllm:request_params_max_tokens", "tokens asked for", SIZES)
        self.times = {part: histogram(f"vllm:request_{part}_time_seconds", text, WHOLE) for part, text in PARTS.items()}
        self.gaps = Gaps(self._labels)
        self.registry.register(self.gaps)
        self.answers = counter("minivllm:http_responses", "HTTP answers", "route", "status")
        self.restarts = counter("minivllm:engine_restarts", "times that an engine which had ended was started again")
        self.parts = gauge("minivllm:step_part_seconds", "median host time of a part of a step", "part")
        self.seams = gauge("minivllm:seam_seconds", "mean host time of a plug-in a step", "seam", "plugin")
        self.figures = gauge("minivllm:plugin_figure", "what a plug-in counts", "seam", "figure")
        self.joules = counter("minivllm:energy_joules", "of the counter that is read, while the engine", "state")
        self.each_token = Gauge(
            "minivllm:joules_per_output_token", "busy joules a token", names, registry=self.registry
        )
        self._totals = {key: counter(*about) for key, about in TOTALS.items()}
        self._plugins = dict(info.selections)
        selected = Gauge("minivllm:plugin_info", "what was chosen", (*names, "seam", "plugin"), registry=self.registry)
        for seam, plugin in self._plugins.items():
            for one in plugin if isinstance(plugin, list) else [plugin]:
                selected.labels(**self._labels, seam=seam, plugin=str(one)).set(1)
        size = Gauge("vllm:cache_config_info", "the KV cache", (*names, "kv_tokens"), registry=self.registry)
        size.labels(**self._labels, kv_tokens=str(info.kv_tokens)).set(1)

    def http(self, route: Any, status: int) -> None:
        """An answer; ``route`` is the router's, so that paths which nobody serves do not become labels."""
        path = getattr(route, "path", "other")
        self.answers.labels(**self._labels, route=path, status=str(status)).inc()
        if status in (429, 503):
            self.refused.labels(**self._labels, reason="queue_full" if status == 429 else "unavailable").inc()

    def finished(self, stream: Stream) -> None:
        """A request that has left, whole or not."""
        about, tokens = stream.metrics, stream.completion_tokens
        reasons = [text.finish_reason or "abort" for text in stream.texts]
        reason = next((r for r in ("error", "abort", "length") if r in reasons), "stop")
        self.success.labels(**self._labels, finished_reason=reason).inc()
        self.prompt.inc(stream.prompt_tokens)
        self.cached.inc(stream.cached_tokens)
        self.generation.inc(tokens)
        self.prompts.observe(stream.prompt_tokens)
        self.generations.observe(tokens)
        self.n.observe(stream.params.n)
        if stream.params.max_tokens is not None:
            self.most.observe(stream.params.max_tokens)
        for part, seconds in times_of(stream).items():
            if part in self.times:
                self.times[part].observe(seconds)
        if about.first_token_time is not None:
            self.first.observe(max(about.first_token_time - about.arrival_time, 0))
            if about.finished_time is not None:
                after = max(about.finished_time - about.first_token_time, 0)
                self.whole.observe(max(about.finished_time - about.arrival_time, 0))
                if tokens > stream.params.n:
                    self.each.observe(after / (tokens / stream.params.n - 1))

    def text(self, stats: Mapping[str, Any], restarts: int = 0) -> bytes:
        """Return all of it, with what the engine says of itself and how often it was started again."""
        self.restarts.inc(max(restarts - self._seen.get("restarts", 0), 0))
        self._seen["restarts"] = restarts
        if stats:
            self.running.set(stats["running"])
            self.waiting.set(stats["waiting"])
            total = max(stats["blocks_total"], 1)
            self.cache.set((total - stats["blocks_free"] - stats["blocks_cached"]) / total)
            guessed = stats.get("speculation", {})
            totals = {**stats, "drafted": guessed.get("proposed", 0), "accepted": guessed.get("accepted", 0)}
            for key, total_counter in self._totals.items():
                total_counter.inc(max(totals.get(key, 0) - self._seen.get(key, 0), 0))
                self._seen[key] = totals.get(key, 0)
            self._count_joules(stats.get("energy"))
            for part in ("plan", "submit", "wait", "publish"):
                self.parts.labels(**self._labels, part=part).set(stats[f"{part}_ms"] / 1e3)
            for seam, ms in stats["seam_ms"].items():
                name, _, plugin = seam.partition(":")
                found = self._plugins.get(name, "")
                chosen = plugin or (",".join(map(str, found)) if isinstance(found, list) else str(found))
                self.seams.labels(**self._labels, seam=name, plugin=chosen).set(ms / 1e3)
            self.figures.clear()  # one that a plug-in gives no longer is not shown with its last number
            for seam, figures in stats.get("figures", {}).items():
                for name, number in figures.items():
                    self.figures.labels(**self._labels, seam=seam, figure=name).set(number)
        return generate_latest(self.registry)

    def _count_joules(self, energy: Mapping[str, Any] | None) -> None:
        """Nothing is shown where no counter is read."""
        for state in ("busy", "idle") if energy else ():
            found, key = energy[f"{state}_joules"], f"joules:{state}"  # type: ignore[index]
            self.joules.labels(**self._labels, state=state).inc(max(found - self._seen.get(key, 0), 0))
            self._seen[key] = found
        if energy and energy["joules_per_output_token"] is not None:
            self.each_token.labels(**self._labels).set(energy["joules_per_output_token"])


def times_of(stream: Stream) -> dict[str, float]:
    """Seconds of the parts of a request, as far as it came."""
    about = stream.metrics
    arrival, entered, first, end = (
        about.arrival_time,
        about.scheduled_time,
        about.first_token_time,
        about.finished_time,
    )
    spans = {
        "queue": (arrival, entered),
        "prefill": (entered, first),
        "decode": (first, end),
        "inference": (entered, end),
        "ttft": (arrival, first),
    }
    return {part: max(b - a, 0.0) for part, (a, b) in spans.items() if a is not None and b is not None}
