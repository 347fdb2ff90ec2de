"""Export an OpenTelemetry span for each request, with spans of its time in the queue, its prefill and its decode.

    llm_request   arrival ─────────────────────────────────────────► end
      queue       arrival ──► a slot
      prefill                 a slot ──► the first token
      decode                             the first token ──────────► end

A request with W3C's ``traceparent`` (``trace_headers``, over HTTP the header) becomes a part of the client's trace.
Attributes have the names of OpenTelemetry's conventions for generative AI.  No attribute contains text of a prompt or
an answer.  The spans of a request are built from its times after its end, so they cost no time in a step.  The SDK
sends them in its own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import minivllm
from minivllm import files
from minivllm.errors import ConfigError
from minivllm.runtime.hooks import EngineView, Hooks, RequestEnd, RequestView, hookimpl

FLUSH = 3.0  # seconds that the engine waits at its end until all spans are sent
# parameter of a request -> attribute of a span
ATTRIBUTES = {
    "max_tokens": "gen_ai.request.max_tokens", "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p", "top_k": "gen_ai.request.top_k", "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty", "presence_penalty": "gen_ai.request.presence_penalty",
    "n": "gen_ai.request.choice.count",
}  # fmt: skip
FAILED = ("error", "abort")


class Spans(Hooks):
    """A span for each request.

    ``provider`` is the program's tracer provider if the option ``exporter`` is "program".  Otherwise the plug-in
    creates a provider, and shuts it down with the engine.
    """

    def __init__(self, options: Any = None, provider: Any = None) -> None:
        super().__init__(options)
        self.provider = provider
        self._own = False
        self._exporting: SpanExporter | None = None
        self._propagator = TraceContextTextMapPropagator()

    @hookimpl
    def minivllm_engine_started(self, engine: EngineView) -> None:
        if self.provider is None:
            self._own = self.options.exporter != "program"
            self.provider = self._make() if self._own else trace.get_tracer_provider()
        self._tracer = self.provider.get_tracer("minivllm", minivllm.__version__)
        self._model = self.options.model_name or _name_of(engine.model)

    def _make(self) -> TracerProvider:
        """Create the tracer provider.  OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES of the environment take
        precedence over the default service name."""
        resource = Resource.create()
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "minivllm"}))
        provider = TracerProvider(resource=resource)
        self._exporting = self._exporter()
        provider.add_span_processor(BatchSpanProcessor(self._exporting))
        return provider

    def _exporter(self) -> SpanExporter:
        if self.options.exporter == "console":
            return ConsoleSpanExporter()
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as exc:
            problem = "hooks opentelemetry: exporter otlp needs opentelemetry-exporter-otlp-proto-http"
            raise ConfigError(f'{problem}, which is not installed. Do: pip install "minivllm[otel]"') from exc
        return OTLPSpanExporter(endpoint=self.options.endpoint)  # None means the environment's endpoint, else localhost

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, end: RequestEnd) -> None:
        # the engine's times are monotonic, but spans have wall-clock times
        epoch = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return int(1e9 * seconds) + epoch

        context = self._propagator.extract(request.params.get("trace_headers") or {})
        attributes = self._attributes(request, end)
        start = at(request.arrival)
        whole = self._tracer.start_span("llm_request", context, SpanKind.SERVER, attributes, start_time=start)
        inside = trace.set_span_in_context(whole, context)
        times = [request.arrival, end.scheduled, end.first_token, end.finished]
        for name, begin, until in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
            if begin is not None:
                part = self._tracer.start_span(name, inside, start_time=at(begin))
                part.end(at(end.finished if until is None else until))
        failed = next((reason for reason in FAILED if reason in end.reasons), None)
        if failed is not None:
            whole.set_attribute("error.type", failed)
            whole.set_status(Status(StatusCode.ERROR, end.error or failed))
        whole.end(at(end.finished))

    def _attributes(self, request: RequestView, end: RequestEnd) -> Mapping[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "minivllm",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": request.id,
            "gen_ai.response.finish_reasons": end.reasons,
            "gen_ai.usage.input_tokens": len(request.prompt),
            "gen_ai.usage.output_tokens": sum(end.tokens),
            "gen_ai.usage.cache_read.input_tokens": end.cached_tokens,
            "minivllm.preemptions": end.preempted,
        }
        if end.first_token is not None:
            found["gen_ai.response.time_to_first_chunk"] = end.first_token - request.arrival
        for parameter, name in ATTRIBUTES.items():
            value = request.params.get(parameter)
            if value is not None:
                found[name] = value
        return found

    @hookimpl
    def minivllm_engine_stopped(self) -> None:
        if self._own and self.provider is not None:  # an unreachable collector must not delay the end
            flush = threading.Thread(target=self.provider.shutdown, name="minivllm-spans", daemon=True)
            flush.start()
            flush.join(FLUSH)
            if flush.is_alive() and self._exporting is not None:  # stops the retries of the exporter
                self._exporting.shutdown()
                flush.join(FLUSH)
        self.provider = None


def _name_of(folder: str) -> str:
    """Return the name of the model in a folder: its id on the Hugging Face hub if it is a snapshot, else the folder's
    name.
    """
    snapshot = files.snapshot_of(folder)  # the last part of such a path is a commit
    if snapshot:
        return snapshot[0]
    return folder.rstrip("/").rpartition("/")[2]
