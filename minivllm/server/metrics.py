"""Metrics of the server in Prometheus' format.

Metrics that vLLM has carry vLLM's names, so that its dashboards work.  Others are named ``minivllm:...``.
Events of the server are counted as they happen.  The engine's figures are read when the metrics are requested.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .link.client import EngineInfo, Stream

TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Upper edges of histogram buckets: seconds to the first token, between tokens, of a whole request; numbers of tokens.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
EACH = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
COUNTS = (1, 2, 5, 10, 20, 50, 100)
# running total in the engine's statistics -> name and description of the counter
TOTALS = {
    "preemptions": ("vllm:num_preemptions", "sequences that lost their KV blocks to others and had to wait again"),
    "prefix_queries": ("vllm:prefix_cache_queries", "prompt tokens that were looked up in the prefix cache"),
    "prefix_hits": ("vllm:prefix_cache_hits", "prompt tokens that were found in the prefix cache"),
    "evictions": ("minivllm:evictions", "cached blocks that were evicted"),
    "overshoot_tokens": ("minivllm:overshoot_tokens", "tokens that were computed after the end of an answer"),
    "drafted": ("vllm:spec_decode_num_draft_tokens", "tokens that were drafted (speculative decoding)"),
    "accepted": ("vllm:spec_decode_num_accepted_tokens", "drafted tokens that were accepted"),
    "steps": ("minivllm:steps", "steps of the engine"),
}  # fmt: skip
PARTS = {
    "queue": "from arrival to a place in the batch", "prefill": "from a place in the batch to the first token",
    "decode": "from the first token to the end", "inference": "from a place in the batch to the end",
}  # fmt: skip
# part of a request's time -> names of its start and end in ``RequestMetrics``
SPANS = {
    "queue": ("arrival_time", "scheduled_time"),
    "prefill": ("scheduled_time", "first_token_time"),
    "decode": ("first_token_time", "finished_time"),
    "inference": ("scheduled_time", "finished_time"),
    "ttft": ("arrival_time", "first_token_time"),
    "whole": ("arrival_time", "finished_time"),
}

# figure of a replica -> description of its gauge or counter
REPLICA = {
    "up": "1 for a replica whose engine runs",
    "requests": "requests of a replica that have not ended",
    "running": "sequences of a replica that run",
    "waiting": "sequences of a replica that wait",
    "kv_cache_usage": "share of a replica's KV cache in use, 0 to 1",
}
REPLICA_TOTALS = {
    "sent": "requests that were sent to a replica",
    "restarts": "restarts of a replica's engine",
    "prompt_tokens": "tokens of prompts of a replica",
    "generated_tokens": "tokens of answers of a replica",
    "prefix_queries": "prompt tokens that were looked up in a replica's prefix cache",
    "prefix_hits": "prompt tokens that were found in a replica's prefix cache",
}
# Counters of a storage tier of the KV cache in ``Engine.stats``, which count pages (KV blocks).
TIER_EVENTS = ("hits", "misses", "stores", "loads", "evictions", "skipped", "late", "lost", "faults")


class Gaps(Collector):
    """The histogram ``vllm:inter_token_latency_seconds``: the time between two tokens of an answer.

    prometheus_client's own histogram is too slow to be updated for every token.
    """

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self.counts = [0] * (len(EACH) + 1)
        self.sum = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Record ``count`` gaps of ``seconds`` each."""
        self.counts[bisect_left(EACH, seconds)] += count
        self.sum += seconds * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        total = 0
        buckets = []
        edges = (*(str(float(edge)) for edge in EACH), "+Inf")
        for edge, count in zip(edges, self.counts, strict=True):
            total += count
            buckets.append((edge, total))
        text = "from a token to the next of the same answer"
        family = HistogramMetricFamily("vllm:inter_token_latency_seconds", text, labels=tuple(self.labels))
        family.add_metric(list(self.labels.values()), buckets, self.sum)
        yield family


class Metrics:
    """All metrics of one server, in a registry of the server's own."""

    def __init__(self, model: str, info: EngineInfo) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._labels = {"model_name": model, "engine": "0"}
        self._seen: dict[str, float] = {}  # running total -> value at the last reading
        counter = partial(self._metric, Counter)
        gauge = partial(self._metric, Gauge)
        histogram = partial(self._metric, Histogram)
        self.running = gauge("vllm:num_requests_running", "sequences that run")
        self.waiting = gauge("vllm:num_requests_waiting", "sequences that wait")
        self.cache = gauge("vllm:kv_cache_usage_perc", "share of the KV cache in use, 0 to 1")
        self.prompt = counter("vllm:prompt_tokens", "tokens of prompts")
        self.cached = counter("vllm:prompt_tokens_cached", "prompt tokens that were found in the prefix cache")
        self.generation = counter("vllm:generation_tokens", "tokens of answers")
        self.success = counter("vllm:request_success", "requests that ended", "finished_reason")
        self.refused = counter("vllm:admission_rejections", "requests that were refused with 429 or 503", "reason")
        self.first = histogram("vllm:time_to_first_token_seconds", "from arrival to the first token", buckets=FIRST)
        text = "mean time of a request's tokens after the first"
        self.each = histogram("vllm:request_time_per_output_token_seconds", text, buckets=EACH)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "from arrival to the end", buckets=WHOLE)
        self.prompts = histogram("vllm:request_prompt_tokens", "prompt tokens of a request", buckets=SIZES)
        self.generations = histogram("vllm:request_generation_tokens", "output tokens of a request", buckets=SIZES)
        self.n = histogram("vllm:request_params_n", "answers requested (n)", buckets=COUNTS)
        self.most = histogram("vllm:request_params_max_tokens", "tokens requested (max_tokens)", buckets=SIZES)
        self.times = {
            part: histogram(f"vllm:request_{part}_time_seconds", PARTS[part], buckets=WHOLE) for part in PARTS
        }
        self.gaps = Gaps(self._labels)
        self.registry.register(self.gaps)
        self.answers = counter("minivllm:http_responses", "HTTP answers", "route", "status")
        self.restarts = counter("minivllm:engine_restarts", "restarts of an engine that had ended")
        self.parts = gauge("minivllm:step_part_seconds", "median host time of a part of a step", "part")
        self.seams = gauge("minivllm:seam_seconds", "mean host time of a plug-in in a step", "seam", "plugin")
        self.figures = gauge("minivllm:plugin_figure", "a figure that a plug-in reports", "seam", "figure")
        self.joules = counter("minivllm:energy_joules", "energy used while the engine was busy or idle", "state")
        text = "energy of an output token, idle time excluded"
        # no value is shown until the energy is known, instead of 0
        names = tuple(self._labels)
        self.each_token = Gauge("minivllm:joules_per_output_token", text, names, registry=self.registry)
        text = "pages of a tier of the KV cache that were looked for, moved or lost"
        self.tier_pages = counter("minivllm:kv_tier_pages", text, "tier", "event")
        self.tier_bytes = counter("minivllm:kv_tier_moved_bytes", "bytes that a tier moved", "tier", "event")
        self.tier_seconds = counter("minivllm:kv_tier_load_seconds", "time of all loads from a tier", "tier")
        self.tier_used = gauge("minivllm:kv_tier_used_bytes", "bytes of pages in a tier", "tier")
        self.replicas = {key: gauge(f"minivllm:replica_{key}", text, "replica") for key, text in REPLICA.items()}
        self.replica_totals = {
            key: counter(f"minivllm:replica_{key}", text, "replica") for key, text in REPLICA_TOTALS.items()
        }
        self.moved = counter("minivllm:moved_requests", "requests without a token that moved from an ended replica")
        self.router_faults = counter("minivllm:router_faults", "answers of the router that were not valid")
        self._totals = {key: counter(*about) for key, about in TOTALS.items()}
        self._plugins = {seam: _names_of(plugin) for seam, plugin in info.selections.items()}
        selected = gauge("minivllm:plugin_info", "the plug-ins that were chosen", "seam", "plugin")
        for seam, plugins in self._plugins.items():
            for plugin in plugins:
                selected.labels(**self._labels, seam=seam, plugin=plugin).set(1)
        size = gauge("vllm:cache_config_info", "the KV cache", "kv_tokens")
        size.labels(**self._labels, kv_tokens=str(info.kv_tokens)).set(1)

    def _metric(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        """Return a new metric.

        If it has no ``labels``, the labels of the server are already set.
        """
        metric = kind(name, text, (*self._labels, *labels), registry=self.registry, **options)
        return metric if labels else metric.labels(**self._labels)

    def http(self, route: Any, status: int) -> None:
        """Count an HTTP answer.

        ``route`` is the router's route, None for an unknown path.  All unknown paths share one label, since clients
        could otherwise create any number of labels.
        """
        path = getattr(route, "path", "other")
        self.answers.labels(**self._labels, route=path, status=str(status)).inc()
        if status in (429, 503):
            reason = "queue_full" if status == 429 else "unavailable"
            self.refused.labels(**self._labels, reason=reason).inc()

    def finished(self, stream: Stream, generates: bool = True) -> None:
        """Count a request that has ended, completely or not.

        A request for an embedding does not generate tokens, so it has no first token and no number of answers."""
        reasons = [text.finish_reason or "abort" for text in stream.texts]
        reason = next((r for r in ("error", "abort", "length") if r in reasons), "stop")
        self.success.labels(**self._labels, finished_reason=reason).inc()
        self.prompt.inc(stream.prompt_tokens)
        self.cached.inc(stream.cached_tokens)
        self.prompts.observe(stream.prompt_tokens)
        times = times_of(stream)
        if "decode" in times:
            self.whole.observe(times["whole"])
        if generates:
            self._generated(stream, times)
        else:
            times.pop("decode", None)
        for part, histogram in self.times.items():
            if part in times:
                histogram.observe(times[part])

    def _generated(self, stream: Stream, times: Mapping[str, float]) -> None:
        """Count the tokens and answers of a request that generates, and its times in seconds to the first token and
        between tokens."""
        tokens, answers = stream.completion_tokens, stream.params.n
        self.generation.inc(tokens)
        self.generations.observe(tokens)
        self.n.observe(answers)
        if stream.params.max_tokens is not None:
            self.most.observe(stream.params.max_tokens)
        if "ttft" in times:
            self.first.observe(times["ttft"])
        if "decode" in times and tokens > answers:
            self.each.observe(times["decode"] / (tokens / answers - 1))

    def text(self, stats: Mapping[str, Any], restarts: int = 0) -> bytes:
        """Return all metrics in Prometheus' text format.

        ``stats`` are the engine's statistics, empty if the engine does not answer.
        ``restarts`` is the number of times that the engine was restarted.
        """
        self._advance(self.restarts, "restarts", restarts)
        if stats:
            self._read(stats)
        return generate_latest(self.registry)

    def _advance(self, counter: Any, key: str, total: float) -> None:
        """Add the growth of a running total to its counter.  The total of a restarted engine begins at 0 again."""
        counter.inc(max(total - self._seen.get(key, 0), 0))
        self._seen[key] = total

    def _read(self, stats: Mapping[str, Any]) -> None:
        """Update the metrics that come from the engine's statistics."""
        self.running.set(stats["running"])
        self.waiting.set(stats["waiting"])
        blocks = max(stats["blocks_total"], 1)
        used = blocks - stats["blocks_free"] - stats["blocks_cached"]
        self.cache.set(used / blocks)
        drafts = stats.get("speculation", {})
        totals = dict(stats)
        totals["drafted"] = drafts.get("proposed", 0)
        totals["accepted"] = drafts.get("accepted", 0)
        for key, counter in self._totals.items():
            self._advance(counter, key, totals.get(key, 0))
        self._count_joules(stats.get("energy"))
        for replica in stats.get("replicas", ()):
            self._count_replica(replica)
        self._advance(self.moved, "moved", stats.get("moved", 0))
        self._advance(self.router_faults, "router faults", stats.get("router_faults", 0))
        for figures in stats.get("tiers", ()):
            self._count_tier(figures)
        for part in ("plan", "submit", "wait", "publish"):
            self.parts.labels(**self._labels, part=part).set(stats[f"{part}_ms"] / 1e3)
        for key, ms in stats["seam_ms"].items():
            seam, _, plugin = key.partition(":")
            plugin = plugin or ",".join(self._plugins.get(seam, ()))
            self.seams.labels(**self._labels, seam=seam, plugin=plugin).set(ms / 1e3)
        self.figures.clear()  # cleared, because a figure that is no longer reported would keep its last value
        for seam, figures in stats.get("figures", {}).items():
            for name, number in figures.items():
                self.figures.labels(**self._labels, seam=seam, figure=name).set(number)

    def _count_replica(self, stats: Mapping[str, Any]) -> None:
        """Update the metrics of a replica: its requests, whether it is up, the use of its KV cache, and its totals."""
        number = str(stats["replica"])
        values = {name: stats.get(name, 0) for name in ("running", "waiting", "requests")}
        values["up"] = int(stats["state"] in ("serving", "draining"))
        blocks = stats.get("blocks_total", 0)
        values["kv_cache_usage"] = (blocks - stats["blocks_free"] - stats["blocks_cached"]) / blocks if blocks else 0
        for name, gauge in self.replicas.items():
            gauge.labels(**self._labels, replica=number).set(values[name])
        for name, counter in self.replica_totals.items():
            self._advance(counter.labels(**self._labels, replica=number), f"{number} {name}", stats.get(name, 0))

    def _count_tier(self, figures: Mapping[str, Any]) -> None:
        """Update the metrics of a tier of the KV cache: counts and bytes of stored and loaded pages, times, and use."""
        labels = {**self._labels, "tier": figures["name"]}
        for event in TIER_EVENTS:
            counter = self.tier_pages.labels(**labels, event=event)
            self._advance(counter, f"{figures['name']} {event}", figures[event])
        for event in ("store", "load"):
            counter = self.tier_bytes.labels(**labels, event=event)
            self._advance(counter, f"{figures['name']} {event} bytes", figures[f"{event}_bytes"])
        seconds = self.tier_seconds.labels(**labels)
        self._advance(seconds, f"{figures['name']} load seconds", figures["load_seconds"])
        self.tier_used.labels(**labels).set(figures["used"])

    def _count_joules(self, energy: Mapping[str, Any] | None) -> None:
        """Update the metrics of energy.  ``energy`` is None if the engine reads no counter of joules."""
        if not energy:
            return
        for state in ("busy", "idle"):
            counter = self.joules.labels(**self._labels, state=state)
            self._advance(counter, f"joules:{state}", energy[f"{state}_joules"])
        if energy["joules_per_output_token"] is not None:
            self.each_token.labels(**self._labels).set(energy["joules_per_output_token"])


def _names_of(plugin: Any) -> list[str]:
    """Return the names of the chosen plug-ins of one kind, given as one name or as a list of names."""
    return [str(name) for name in plugin] if isinstance(plugin, list) else [str(plugin)]


def times_of(stream: Stream) -> dict[str, float]:
    """Return the seconds of each part of a request (``SPANS``) that has both begun and ended."""
    times = {}
    for part, names in SPANS.items():
        begin, end = (getattr(stream.metrics, name) for name in names)
        if begin is not None and end is not None:
            times[part] = max(end - begin, 0.0)
    return times
