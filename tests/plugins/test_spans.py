"""OpenTelemetry spans: one for each request with its parts, in the trace of the client, over HTTP too."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from minivllm import LLM, SamplingParams
from minivllm.config import load_config
from minivllm.config.resolve import resolve
from minivllm.errors import PluginError
from minivllm.registry import Catalog

OPTIONS = {"model": "pocket", "max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 128, "device": "cpu"}
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "acme=1"}


def test_without_the_package_the_choice_is_refused_and_the_command_that_helps_is_named(monkeypatch):
    monkeypatch.setattr("minivllm.registration.spec._installed", lambda module: not module.startswith("opentelemetry"))
    config = load_config(keywords={**OPTIONS, "hooks": ["opentelemetry"]}, environ={}).engine
    with pytest.raises(PluginError, match=r"needs opentelemetry.sdk.*minivllm\[otel\]"):
        resolve(config, Catalog.discover())


@pytest.fixture(scope="module")
def memory():
    """(a hook, the spans that it has made), by a provider that keeps them."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, provider


@pytest.fixture(scope="module")
def llm(memory):
    from opentelemetry import trace

    trace.set_tracer_provider(memory[1])
    with LLM(
        **OPTIONS, hooks=[{"name": "opentelemetry", "options": {"exporter": "program", "model_name": "pocket"}}]
    ) as llm:
        yield llm


def spans_of(llm, memory, *params):
    memory[0].clear()
    outs = llm.generate(["Once upon a time"] * len(params), list(params), use_tqdm=False)
    found = memory[0].get_finished_spans()
    wholes = [s for s in found if s.name == "llm_request"]
    return outs, [(w, {s.name: s for s in found if s.parent and s.parent.span_id == w.context.span_id}) for w in wholes]


def test_a_request_is_a_span_whose_parts_follow_one_another_without_a_gap(llm, memory):
    before = time.time_ns()
    params = [SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.5, seed=3) for _ in range(6)]
    outs, traces = spans_of(llm, memory, *params)
    assert len(traces) == 6 and len({w.context.trace_id for w, _ in traces}) == 6
    for whole, parts in traces:
        assert list(parts) == ["queue", "prefill", "decode"] and whole.parent is None
        times = [whole.start_time, *(parts[name].end_time for name in parts)]
        assert times == sorted(times) and times[0] >= before and whole.end_time <= time.time_ns()
        assert [parts[name].start_time for name in parts] == times[:-1] and whole.end_time == times[-1]
        got = dict(whole.attributes)
        assert got["gen_ai.usage.output_tokens"] == 5 and got["gen_ai.request.seed"] == 3
        assert got["gen_ai.usage.input_tokens"] == len(outs[0].prompt_token_ids)
        assert got["gen_ai.response.finish_reasons"] == ("length",) and got["gen_ai.request.model"] == "pocket"
        assert not any("Once" in str(value) for value in got.values())  # no text
    first = min(whole.end_time for whole, _ in traces)
    late = [whole for whole, parts in traces if parts["prefill"].end_time > first]
    assert len(late) == 2  # four slots: two requests waited for their place


def test_a_span_belongs_to_the_trace_of_who_asked(llm, memory):
    params = [SamplingParams(max_tokens=2, trace_headers=headers) for headers in (HEADERS, {"traceparent": "00-xyz"})]
    _, traces = spans_of(llm, memory, *params)
    (inside,) = [w for w, _ in traces if w.parent is not None]
    assert f"{inside.context.trace_id:032x}" == TRACE and f"{inside.parent.span_id:016x}" == CALLER
    assert inside.context.trace_state.get("acme") == "1"
    # the trace of the client is malformed, so the request has its own
    (outside,) = [w for w, _ in traces if w.parent is None]
    assert f"{outside.context.trace_id:032x}" != TRACE


def test_what_ends_early_is_an_error_and_has_the_parts_that_it_came_to(memory):
    from hook_helpers import hooked

    from minivllm.plugins.hooks.options import SpansOptions
    from minivllm.plugins.hooks.spans import Spans
    from minivllm.testing.sim import request

    memory[0].clear()
    engine = hooked(Spans(SpansOptions(), memory[1]))
    request(engine, "a", [1, 2, 3])
    engine.abort("a")
    while engine.busy:
        engine.step()
    engine.stop()
    *parts, whole = memory[0].get_finished_spans()
    assert [p.name for p in parts] == ["queue"] and whole.name == "llm_request"
    assert not whole.status.is_ok and whole.attributes["error.type"] == "abort"


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        got = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.got += [
            ({a.key: a.value.string_value for a in rs.resource.attributes}, span)
            for rs in got.resource_spans
            for scope in rs.scope_spans
            for span in scope.spans
        ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_over_http_the_header_is_honoured_and_a_collector_is_told_before_the_server_ends():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    pytest.importorskip("fastapi")
    from http_helpers import Running

    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.got = []
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    hook = {"name": "opentelemetry", "options": {"endpoint": endpoint, "model_name": "shown"}}
    running = Running(engine={"hooks": [hook]})
    body = {"prompt": "Once", "max_tokens": 3, "ignore_eos": True}
    assert running.post("/v1/completions", body, headers=HEADERS).status_code == 200
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    assert running.post("/v1/chat/completions", chat, headers=HEADERS).status_code == 200
    running.close()
    collector.shutdown()
    ours = [(about, span) for about, span in collector.got if span.trace_id.hex() == TRACE]
    wholes = [span for _, span in ours if span.name == "llm_request"]
    assert len(wholes) == 2 and all(span.parent_span_id.hex() == CALLER for span in wholes)
    assert [span.name for _, span in ours].count("decode") == 2
    assert all(about["service.name"] == "minivllm" for about, _ in ours)
    models = {a.value.string_value for s in wholes for a in s.attributes if a.key == "gen_ai.request.model"}
    assert models == {"shown"}


def test_a_collector_that_is_away_does_not_hold_up_the_end():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    code = """
import time
from hook_helpers import hooked
from minivllm.plugins.hooks.options import SpansOptions
from minivllm.plugins.hooks.spans import Spans
from minivllm.testing.sim import request
engine = hooked(Spans(SpansOptions(endpoint="http://127.0.0.1:9/v1/traces")))
request(engine, "a", [1, 2, 3])
while engine.busy:
    engine.step()
begin = time.monotonic()
engine.stop()
assert time.monotonic() - begin < 6, time.monotonic() - begin
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1] / "helpers",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.returncode == 0, found.stderr
