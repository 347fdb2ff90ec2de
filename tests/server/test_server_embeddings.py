"""Embeddings, scores and ranks over HTTP: the values of ``LLM.embed``, OpenAI's forms, errors that name the field."""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
import time

import numpy as np
import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from loop_turns import longest_turn

from minivllm import LLM

OPTIONS = {"batch_invariant": False, "dtype": "float32", "num_kvcache_blocks": 512, "max_model_len": 512}
server = served(engine={**OPTIONS, "max_num_seqs": 8})
TEXTS = ["Tell me a story about a fox.", "Tell me a story about an owl.", "What is 1 + 1?"]
EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


@pytest.fixture(scope="module")
def llm():
    with LLM(model="pocket", **OPTIONS, max_num_seqs=8) as made:
        yield made


def own(llm, prompts, **options):
    return np.array([out.outputs.embedding for out in llm.embed(prompts, use_tqdm=False, **options)])


def values(answer):
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [part["index"] for part in data] == list(range(len(data)))
    assert all(part["object"] == "embedding" for part in data)
    return np.array([part["embedding"] for part in data])


def test_embeddings_are_those_of_llm_embed(server, llm):
    answer = server.post(EMBED, {"input": TEXTS, "model": "pocket"})
    assert np.abs(values(answer) - own(llm, TEXTS)).max() < 1e-5
    body = answer.json()
    assert body["object"] == "list" and body["model"] == "pocket" and body["id"].startswith("embd-")
    tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == tokens
    for pooling in ("mean", "cls"):
        found = values(server.post(EMBED, {"input": TEXTS, "pooling": pooling, "dimensions": 32}))
        assert np.abs(found - own(llm, TEXTS, pooling=pooling, dimensions=32)).max() < 1e-5


def counts(server):
    """Return the values of all metrics but the buckets of histograms, with the label of the finish reason."""
    found = {}
    for line in server.client.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if not line.startswith("#") and "le=" not in name:
            reason = re.search('finished_reason="([a-z]*)"', name)
            name = name.partition("{")[0] if reason is None else f"{name.partition('{')[0]} {reason[1]}"
            found[name] = float(value)
    return found


def test_metrics_count_no_token_of_an_embedding(server):
    """Counts of prompts and times to the end include embeddings; counts of generated tokens do not."""

    before = counts(server)
    values(server.post(EMBED, {"input": TEXTS}))
    after = counts(server)
    grown = {name for name, value in after.items() if value > before.get(name, 0)}
    prompts = {"request_prompt_tokens_count", "e2e_request_latency_seconds_count", "request_queue_time_seconds_count"}
    assert {f"vllm:{name}" for name in prompts} <= grown and "vllm:request_success_total stop" in grown
    generated = ("time_to_first_token_seconds", "request_generation_tokens", "request_params_n")
    generated += ("request_params_max_tokens", "request_decode_time_seconds")
    assert not grown & {f"vllm:{name}_count" for name in generated}
    late = server.post(EMBED, {"input": [[5] * 500] * 400, "pooling": "mean", "timeout_s": 1})
    assert late.status_code == 408, "200,000 tokens take more than a second"
    ended = "vllm:request_success_total abort"
    end = time.monotonic() + 20
    while counts(server).get(ended, 0) <= after.get(ended, 0):  # the engine counts them after its current step
        assert time.monotonic() < end, "the aborted texts are not counted"
        time.sleep(0.05)


def test_texts_and_token_ids_and_lists_of_either(server, llm):
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    whole = own(llm, TEXTS)
    for given, expected in ((TEXTS[0], whole[:1]), (ids[0], whole[:1]), (ids, whole), ([TEXTS[0], ids[1]], whole[:2])):
        assert np.abs(values(server.post(EMBED, {"input": given})) - expected).max() < 1e-5
    long = [ids[0] * 50, ids[1]]  # arrives as an array
    found = values(server.post(EMBED, {"input": long}))
    assert np.abs(found - own(llm, long)).max() < 1e-5


def test_base64_has_the_same_values(server):
    as_numbers = values(server.post(EMBED, {"input": TEXTS}))
    data = server.post(EMBED, {"input": TEXTS, "encoding_format": "base64"}).json()["data"]
    decoded = [np.frombuffer(base64.b64decode(part["embedding"]), "<f4") for part in data]
    assert np.abs(np.stack(decoded) - as_numbers).max() < 1e-5


def test_raw_values_and_truncation(server, llm):
    raw = values(server.post(EMBED, {"input": TEXTS[0], "normalize": False}))
    assert np.abs(raw - own(llm, TEXTS[0], normalize=False)).max() < 1e-4
    long = "fox " * 1000
    refused = server.post(EMBED, {"input": ["a", long]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
    assert refused.json()["error"]["message"].startswith("input[1]: 1001 tokens; expected at most 512")
    ids = llm.tokenizer.encode(long)
    for most, side, kept in ((5, None, ids[-5:]), (5, "right", ids[:5]), (-1, None, ids[-512:])):
        answer = server.post(EMBED, {"input": long, "truncate_prompt_tokens": most, "truncation_side": side})
        assert np.abs(values(answer) - own(llm, kept)).max() < 1e-5, (most, side)
        assert answer.json()["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize(
    "path, body, param, text",
    [
        (EMBED, {}, "input", "input is missing"),
        (EMBED, {"input": []}, "input", "input: the list is empty"),
        (EMBED, {"input": ""}, "input", "input: empty"),
        (EMBED, {"input": ["a", []]}, "input", "input[1]: empty"),
        (EMBED, {"input": ["a", 5]}, "input", "input[1]: expected text or a list of token ids"),
        (EMBED, {"input": {"a": 1}}, "input", "input: expected text, token ids"),
        (EMBED, {"input": ["a", [-1]]}, "input", "input[1]: token id -1 is out of range"),
        (EMBED, {"input": [10**30]}, "input", "out of range; expected 0 to 2047"),
        (EMBED, {"input": [[1, "a"]]}, "input", "input[0]: expected text or a list of token ids"),
        (EMBED, {"input": [True]}, "input", "input[0]: expected text or a list of token ids"),
        (EMBED, {"input": "a", "dimensions": 257}, "dimensions", "expected 1 to 256"),
        (EMBED, {"input": "a", "dimensions": "4"}, "dimensions", "dimensions"),
        (EMBED, {"input": "a", "encoding_format": "bytes"}, "encoding_format", "expected float or base64"),
        (EMBED, {"input": "a", "pooling": "max"}, "pooling", "expected auto, mean, last, cls"),
        (EMBED, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "expected -1"),
        (EMBED, {"input": "a", "truncation_side": "top"}, "truncation_side", "expected left or right"),
        (EMBED, {"input": "a", "timeout_s": 0}, "timeout_s", "expected a positive number"),
        (EMBED, {"input": "a", "dimension": 4}, "dimension", "Did you mean 'dimensions'?"),
        (EMBED, {"input": ["a"] * 2049}, "input", "2049 texts; expected at most 2048"),
        (EMBED, {"input": "a " * 10**6}, "input", "8192 are the most that the context can hold"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1", "text_1 has 2 texts and text_2 1"),
        (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2", "text_2[1]: empty"),
        (SCORE, {"text_1": "a", "text_2": ["b", "fox " * 900]}, "text_2", "text_2[1]: 901 tokens"),
        (SCORE, {"text_1": "a"}, "text_2", "text_2 is missing"),
        (RERANK, {"query": "a", "documents": ["b", {"txt": "c"}]}, "documents", "documents[1]: expected text"),
        (RERANK, {"query": "", "documents": ["b"]}, "query", "query: expected text"),
        (RERANK, {"query": "a", "documents": "b"}, "documents", "documents: expected a list"),
        (RERANK, {"query": "a", "documents": []}, "documents", "documents: the list is empty"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "expected a whole number >= 0"),
        (RERANK, {"query": "a", "documents": ["b", "fox " * 900]}, "documents", "documents[1]: 901 tokens"),
    ],
)
def test_errors_name_the_field(server, path, body, param, text):
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and text in error["message"], error
    assert len(error["message"]) < 400


def test_an_unknown_model_is_not_found(server):
    assert server.post(EMBED, {"input": "a", "model": "other"}).status_code == 404


def test_fields_without_effect_are_warned_of(server):
    answer = server.post(EMBED, {"input": "a", "frequency": 1, "user": "me", "logprobs": 3})
    assert answer.headers["x-warnings"] == "frequency,logprobs"
    assert [warning["field"] for warning in answer.json()["warnings"]] == ["frequency", "logprobs"]


def test_scores(server, llm):
    vectors = own(llm, TEXTS)
    answer = server.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert np.abs(np.array([part["score"] for part in found["data"]]) - vectors @ vectors[0]).max() < 1e-5
    assert [part["object"] for part in found["data"]] == ["score"] * 3
    pairs = server.post(SCORE, {"text_1": TEXTS, "text_2": TEXTS[::-1]}).json()["data"]
    expected = (vectors * vectors[::-1]).sum(axis=1)
    assert np.abs(np.array([part["score"] for part in pairs]) - expected).max() < 1e-5


@pytest.mark.parametrize("path", ["/rerank", RERANK, "/v2/rerank"])
def test_documents_are_ranked_by_their_similarity(server, llm, path):
    documents = [TEXTS[2], {"text": TEXTS[1]}, TEXTS[0]]
    vectors = own(llm, [TEXTS[2], TEXTS[1], TEXTS[0]])
    scores = vectors @ own(llm, TEXTS[0])[0]
    order = sorted(range(3), key=lambda index: -scores[index])
    body = server.post(path, {"query": TEXTS[0], "documents": documents}).json()
    assert [result["index"] for result in body["results"]] == order and order[0] == 2
    found = [result["relevance_score"] for result in body["results"]]
    assert np.abs(np.array(found) - scores[order]).max() < 1e-5
    assert [result["document"]["text"] for result in body["results"]] == [TEXTS[2 - index] for index in order]
    assert body["usage"]["total_tokens"] > 0
    two = {"query": TEXTS[0], "documents": documents, "top_n": 2, "return_documents": False}
    short = server.post(path, two).json()["results"]
    assert [set(result) for result in short] == [{"index", "relevance_score"}] * 2


def test_many_texts_beside_answers(server, llm):
    """A request of 300 texts holds 256 prompts; requests of the same client run beside it."""
    texts = [f"The fox number {i} runs." for i in range(300)]
    found = []

    def ask():
        found.append(server.post(EMBED, {"input": texts, "encoding_format": "base64"}))

    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(3):
        answer = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 4, "temperature": 0})
        assert answer.status_code == 200
    thread.join(60)
    data = found[0].json()["data"]
    decoded = np.stack([np.frombuffer(base64.b64decode(part["embedding"]), "<f4") for part in data])
    assert np.abs(decoded - own(llm, texts)).max() < 1e-5


def test_a_client_that_leaves_ends_its_requests(server):
    texts = [f"leave {i} " * 50 for i in range(2000)]
    few = server.post(EMBED, {"input": texts[:20]})
    assert few.status_code == 200, few.text
    whole, before = 100 * few.json()["usage"]["total_tokens"], server.stats()["prompt_tokens"]
    body = json.dumps({"model": "pocket", "input": texts}).encode()
    head = f"POST {EMBED} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    with socket.create_connection((server.host, server.port)) as client:
        client.sendall(head.encode() + body)
        end = time.monotonic() + 30
        while server.stats()["prompt_tokens"] == before:
            assert time.monotonic() < end, "no text was computed"
            time.sleep(0.005)
    server.at_rest()
    assert server.stats()["prompt_tokens"] - before < whole // 2


def test_openai_client(server):
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    found = client.embeddings.create(model="pocket", input=TEXTS)
    plain = values(server.post(EMBED, {"input": TEXTS}))
    assert np.abs(np.array([part.embedding for part in found.data]) - plain).max() < 1e-5
    assert found.usage.total_tokens > 0
    ids = client.embeddings.create(model="pocket", input=[[1, 2, 3], [4, 5]], encoding_format="float", dimensions=4)
    assert [len(part.embedding) for part in ids.data] == [4, 4]
    with pytest.raises(openai.BadRequestError, match="input: the list is empty"):
        client.embeddings.create(model="pocket", input=[])


@pytest.fixture
def turns(server):
    """CPU seconds of the longest turn of the server's loop, as a list of one."""
    with longest_turn(server) as longest:
        yield longest


BATCHES = {
    "1,000 lists of 5 ids": (EMBED, {"input": [list(range(5))] * 1000, "encoding_format": "base64"}, 200),
    "5,000 ids in a small body": (EMBED, {"input": [[7] * 500] * 10, "dimensions": 2}, 200),
    "2,048 texts": (EMBED, {"input": [f"text {i}" for i in range(2048)]}, 200),
    "8 MiB of ids": (EMBED, {"input": [5] * 2_700_000}, 400),
    "8 MiB of lists": (EMBED, {"input": [[5]] * 19_000}, 400),
    "8 MiB of objects": (EMBED, {"input": [{}] * 2_600_000}, 400),
    "8 MiB of text": (EMBED, {"input": "a " * 4_000_000}, 400),
    "8 MiB of documents": (RERANK, {"query": "a", "documents": ["a"] * 2_000_000}, 400),
    "8 MiB of ids to score": (SCORE, {"text_1": [5] * 2_700_000, "text_2": "a"}, 400),
    "ids that fit no integer": (EMBED, {"input": [10**400] * 3}, 400),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_no_turn_of_the_loop_takes_long(server, turns, name):
    path, body, status = BATCHES[name]
    answer = server.post(path, body, timeout=180)
    assert answer.status_code == status, answer.text[:300]
    assert 0 < turns[0] < 0.05, f"{turns[0]:.3f} s"
    if status == 200:
        assert len(answer.json()["data"]) == len(body["input"])
