"""A server of a model by an id of the Hugging Face hub: it is called by that id, wherever its files are."""

from __future__ import annotations

import asyncio

import pytest
from http_helpers import GOLDEN, Running
from hub_helpers import COMMIT, OTHER, put_into_cache
from huggingface_hub import constants

from minivllm.device.loading.hf_config import find_model
from minivllm.frontend.front_door import load
from minivllm.server.link.process_client import ProcessClient

TINY = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64, "max_num_seqs": 4, "max_model_len": 64}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # of the engine's process
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_requests_and_metrics_name_a_model_by_its_id(cache):
    put_into_cache(cache, "some/model", find_model("pocket"))
    server = Running(engine={**TINY, "model": "some/model"})
    try:
        assert [m["id"] for m in server.client.get("/v1/models").json()["data"]] == ["some/model"]
        assert server.client.get("/v1/models/some/model").json()["id"] == "some/model"
        done = server.post("/v1/completions", {**GOLDEN, "model": "some/model"}).json()
        assert done["model"] == "some/model" and done["choices"] == server.golden
        assert server.post("/v1/completions", {**GOLDEN, "model": COMMIT}).status_code == 404
        assert 'model_name="some/model"' in server.client.get("/metrics").text
    finally:
        server.close()


def test_a_client_of_an_engine_in_a_process_reads_the_tokenizer_that_the_engine_found(cache):
    put_into_cache(cache, "some/model", find_model("pocket"))
    words = put_into_cache(
        cache, "some/words", find_model("pocket"), OTHER, refs=("v1",), without=["model.safetensors"]
    )

    async def received():
        options = {**TINY, "model": "some/model", "tokenizer": "some/words", "tokenizer_revision": "v1"}
        client = ProcessClient(load(None, options))
        await client.open()
        try:
            return client.info.model, client.tokenizer._folder
        finally:
            await client.close()

    assert asyncio.run(asyncio.wait_for(received(), 120)) == ("some/model", words)


def test_spans_name_a_model_by_its_id_and_not_by_its_commit(cache):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from hook_helpers import hooked
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from minivllm.plugins.hooks.options import SpansOptions
    from minivllm.plugins.hooks.spans import Spans
    from minivllm.runtime.hooks import EngineView
    from minivllm.testing.sim import request

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = Spans(SpansOptions(), provider)
    engine = hooked(spans)
    for folder, name in (
        (cache / "models--some--model" / "snapshots" / COMMIT, "some/model"),
        (cache / "mine", "mine"),
    ):
        spans.minivllm_engine_started(EngineView(str(folder), "cpu", "float32", 16, (63,), 4, 64, 64, {}))
        exporter.clear()
        request(engine, name, [1, 2, 3])
        while engine.busy:
            engine.step()
        assert {s.attributes["gen_ai.request.model"] for s in exporter.get_finished_spans() if s.parent is None} == {
            name
        }
    engine.stop()
