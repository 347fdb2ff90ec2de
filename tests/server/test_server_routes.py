"""The field ``routes``: expert routes over HTTP equal the routes of an LLM, and only operators get them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from http_helpers import Running

from minivllm import LLM, SamplingParams, pocket
from minivllm.core.interfaces.routes import decode_routes, encode_routes
from minivllm.server.link import frames
from minivllm.server.link.routes import ReadRoutes, RouteColumns, read_columns
from minivllm.testing.tiny import tiny_dir

PROMPT = [(7 * i * i + 3 * i + 5) % 61 for i in range(24)]
BODY = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
ENGINE = {"max_model_len": 128, "max_num_seqs": 8, "num_kvcache_blocks": 64}
POCKET = Path(pocket.__file__).parent / "model"
COMMON = {"dtype": "float32", "device": "cpu", "batch_invariant": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tiny_dir(tmp_path_factory.mktemp("experts"), "qwen3_moe", vocab_size=2048)[0]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POCKET / name, made)
    return str(made)


@pytest.fixture(scope="module")
def running(folder):
    made = Running(["user", "other"], {"model": folder, **COMMON, **ENGINE}, admin=True)
    yield made
    made.at_rest()
    made.close()


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **COMMON, **ENGINE) as made:
        yield made


def ask(running, **body):
    key = {"Authorization": f"Bearer {running.app.admin_token}"}
    return running.client.post("/v1/completions", json={**BODY, **body}, headers=key)


def wanted(llm, routes, **params):
    """Return the output of an LLM for the same request."""
    same = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, **params}
    return llm.generate([PROMPT], SamplingParams(**same, routes=routes), False)[0]


def test_routes_over_http_are_those_of_an_llm(running, llm):
    answer = ask(running, routes={"read": True, "counts": True}, return_token_ids=True)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    want = wanted(llm, {"read": True, "counts": True})
    assert choice["token_ids"] == want.tokens
    found = decode_routes(choice["routes"])
    assert found.dtype == np.uint8 and np.array_equal(found, want.routes)
    assert choice["route_counts"] == want.route_counts.tolist()


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_has_its_own_routes(running, llm, stream):
    more = {"n": 2, "temperature": 1, "seed": 3}
    answer = ask(running, routes=True, stream=stream, **more)
    if stream:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        choices = [c for line in lines for c in json.loads(line)["choices"] if "routes" in c]
    else:
        choices = answer.json()["choices"]
    want = wanted(llm, True, **more)
    assert [c["index"] for c in choices] == [0, 1]
    for choice, out in zip(choices, want.outputs, strict=True):
        assert np.array_equal(decode_routes(choice["routes"]), out.routes) and "route_counts" not in choice
    assert not np.array_equal(want.outputs[0].routes, want.outputs[1].routes)


def test_routes_of_an_answer_are_given_to_the_next_request_as_they_are(running, llm):
    given = (wanted(llm, True).routes + 1) % 6
    routes = {"given": encode_routes(given), "read": True}
    (choice,) = ask(running, routes=routes, return_token_ids=True).json()["choices"]
    want = wanted(llm, routes)
    assert choice["token_ids"] == want.tokens != wanted(llm, None).tokens
    assert np.array_equal(decode_routes(choice["routes"]), given)
    (choice,) = ask(running, routes={"pruned": {"1": [0, 1]}}, return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == wanted(llm, {"pruned": {1: [0, 1]}}).tokens and "routes" not in choice


def test_only_operators_get_routes(running):
    answer = running.post("/v1/completions", {**BODY, "routes": True})
    assert answer.status_code == 403 and answer.json()["error"]["param"] == "routes"
    assert running.post("/v1/completions", {**BODY, "routes": None}).status_code == 200


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"routes": {"reads": 1}}, "unknown field 'reads'"),
        ({"routes": [1]}, "routes has the type list"),
        ({"routes": {"pruned": [9]}}, "there is no expert 9"),
        ({"routes": {"pruned": {"9" * 5000: [1]}}}, "expected numbers of experts"),
        ({"routes": {"pruned": {"1": [0], "01": [2]}}}, "expected numbers of experts"),
        ({"routes": {"given": [[[0, 0], [1, 2]]]}}, "expected distinct experts"),
        ({"routes": {"given": {"shape": [1, 2, 2], "dtype": "object", "data": ""}}}, "expected an object with shape"),
    ],
)
def test_wrong_routes_are_refused_by_name(running, body, text):
    answer = ask(running, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "routes", answer.text
    assert text in answer.json()["error"]["message"]


def test_routes_are_the_same_on_both_ends_of_the_link():
    columns, sent = RouteColumns(), {}
    for number, sample, shape, experts in ((7, 0, (3, 2, 2), 6), (7, 1, (1, 2, 2), 6), (9, 0, (4, 1, 8), 300)):
        routes = np.random.default_rng(number + sample).integers(0, experts, shape).astype(np.int16)
        columns.add(number, sample, ReadRoutes(routes, experts))
        sent[number, sample] = routes
    frame = frames.decode(frames.encode("frame", {}, columns.columns())[4:])
    found = {(number, sample): read for number, sample, read in read_columns(frame.columns)}
    assert found.keys() == sent.keys() and found[9, 0].routes.dtype == np.int16 and found[7, 0].routes.dtype == np.uint8
    assert all(np.array_equal(found[key].routes, sent[key]) for key in sent)
    assert list(read_columns({})) == [] and RouteColumns().columns() == {}
