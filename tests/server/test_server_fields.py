"""Fields of requests that rank, score or search give the same results over HTTP as an LLM in this process."""

import json
import logging

import pytest

pytest.importorskip("fastapi")

from http_helpers import served

from minivllm import LLM, SamplingParams

TALE = {"prompt": "Once upon a time", "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
server = served(engine={"strategies": ["single", "parallel", "beam", "guidance"]})


def ids(server, **more):
    answer = server.post("/v1/completions", {**TALE, **more})
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def total(choice):
    return sum(choice["logprobs"]["token_logprobs"])


def test_best_of_gives_the_likeliest_samples_and_counts_the_tokens_of_all(server):
    ask = {**TALE, "seed": 5, "logprobs": 0}
    every = server.post("/v1/completions", {**ask, "n": 6}).json()["choices"]
    got = server.post("/v1/completions", {**ask, "n": 2, "best_of": 6}).json()
    want = sorted(every, key=total, reverse=True)[:2]
    assert [c["token_ids"] for c in got["choices"]] == [c["token_ids"] for c in want]
    assert [c["index"] for c in got["choices"]] == [0, 1]
    assert got["usage"]["completion_tokens"] == 6 * 5
    one = ids(server, seed=5, best_of=6)
    assert one == [want[0]["token_ids"]]
    stopped = server.post("/v1/completions", {**ask, "n": 1, "best_of": 4, "stop": " "}).json()["choices"][0]
    assert stopped["finish_reason"] in ("stop", "length") and " " not in stopped["text"]


def test_beams_over_http_are_those_of_the_engine_and_are_asked_for_by_either_name(server):
    beams = ids(server, n=3, beam_width=3, temperature=0)
    assert len({tuple(one) for one in beams}) == 3
    assert ids(server, n=3, use_beam_search=True, temperature=0) == beams
    assert ids(server, n=1, beam_width=3, temperature=0) == beams[:1]
    assert ids(server, n=3, use_beam_search=False, temperature=0) != beams
    events = server.events("/v1/completions", {**TALE, "n": 3, "beam_width": 3, "temperature": 0})
    found = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert sorted(found.values()) == sorted(beams)


def test_guidance_over_http_is_that_of_the_engine_with_a_text_or_with_token_ids(server):
    away = " there was a king"
    ask = {"temperature": 0, "guidance_scale": 2.5}
    got = ids(server, **ask, negative_prompt=away)
    with LLM("pocket", dtype="float32", strategies=["guidance"], batch_invariant=True) as llm:
        params = SamplingParams.make(max_tokens=5, ignore_eos=True, **ask, negative_prompt=away)
        assert got == [llm.generate(TALE["prompt"], params, use_tqdm=False)[0].tokens]
        tokens = llm.tokenizer.encode(away)
    assert ids(server, **ask, negative_prompt_token_ids=tokens) == got
    assert got not in (ids(server, **ask), ids(server, temperature=0))
    events = server.events("/v1/completions", {**TALE, **ask, "negative_prompt": away})
    assert [t for e in events[:-1] for c in e["choices"] for t in c["token_ids"]] == got[0]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"guidance_scale": 2, "beam_width": 2}, "beam_width"),
        ({"guidance_scale": -1}, "guidance_scale"),
        ({"guidance_scale": 2, "negative_prompt": 7}, "negative_prompt"),
        ({"guidance_scale": 2, "negative_prompt_token_ids": [10**7]}, "negative_prompt_token_ids"),
        ({"guidance_scale": 2, "negative_prompt": "a" * 40_000}, "negative_prompt"),
        ({"negative_prompt": "no"}, "negative_prompt"),
    ],
)
def test_guidance_that_cannot_be_given_is_refused_with_its_field(server, more, param):
    answer = server.post("/v1/completions", {**TALE, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_scores_of_the_prompt_come_beside_the_answer_and_are_those_of_echo(server):
    ask = {**TALE, "temperature": 0, "logprobs": 2}
    echoed = server.post("/v1/completions", {**ask, "echo": True}).json()["choices"][0]["logprobs"]
    choice = server.post("/v1/completions", {**ask, "prompt_logprobs": 2}).json()["choices"][0]
    prompt, scores = choice["prompt_token_ids"], choice["prompt_logprobs"]
    assert len(scores) == len(prompt) and scores[0] is None
    for at, (token, row) in enumerate(zip(prompt, scores, strict=True)):
        if row is not None:
            assert row[str(token)]["logprob"] == pytest.approx(echoed["token_logprobs"][at], abs=1e-5)
            assert row[str(token)]["decoded_token"] and row[str(token)]["rank"] >= 1 and 2 <= len(row) <= 3
    body = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 2, "prompt_logprobs": 0}
    chat = server.post("/v1/chat/completions", {**body, "return_token_ids": True}).json()
    assert len(chat["prompt_logprobs"]) == len(chat["prompt_token_ids"])
    assert "prompt_logprobs" not in server.post("/v1/completions", TALE).json()["choices"][0]


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("completions", {"n": 2, "best_of": 3, "stream": True}, "best_of"),
        ("completions", {"prompt": ["a"] * 64, "best_of": 32}, "best_of"),
        ("completions", {"best_of": 2, "beam_width": 2}, "best_of"),
        ("completions", {"beam_width": 2, "stop": "x"}, "stop"),
        ("completions", {"use_beam_search": "yes"}, "use_beam_search"),
        ("completions", {"beam_width": 2, "early_stopping": "yes"}, "early_stopping"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 5}, "max_completion_tokens"),
        ("chat/completions", {"return_token_offsets": True}, "return_token_offsets"),
        ("chat/completions", {"best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_name_of_its_field(server, path, more, param):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    answer = server.post(f"/v1/{path}", {**(chat if "chat" in path else TALE), **more})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def metrics(server):
    lines = server.client.get("/metrics").text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] not in "#")}


def test_a_field_of_chats_has_no_effect_on_a_completion_and_that_is_said(server):
    for value in ("a", 1, [1], {}):
        answer = server.post("/v1/completions", {**TALE, "max_tokens": 3, "parallel_tool_calls": value})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert [w["field"] for w in answer.json()["warnings"]] == ["parallel_tool_calls"]


def test_each_gap_between_tokens_and_each_part_of_a_request_is_counted_once(server):
    labels, before = '{engine="0",model_name="pocket"}', metrics(server)
    server.post("/v1/completions", {**TALE, "n": 3})  # nobody watches: its tokens come together
    server.events("/v1/completions", {**TALE, "n": 2})
    after = metrics(server)

    def more(name):
        return after[f"vllm:{name}{labels}"] - before[f"vllm:{name}{labels}"]

    assert more("inter_token_latency_seconds_count") == 5 * (TALE["max_tokens"] - 1)
    every = sum(more(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert every == pytest.approx(more("e2e_request_latency_seconds_sum"), rel=1e-6)
    assert more("request_inference_time_seconds_count") == 2 and more("request_params_max_tokens_sum") == 10
    inside = 'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="pocket"}'
    assert after[inside] == after[f"vllm:inter_token_latency_seconds_count{labels}"]
    assert 0 < more("inter_token_latency_seconds_sum") < 60


def test_a_request_is_one_line_of_the_log_with_its_counts_and_times_and_no_text(server, caplog):
    websockets = pytest.importorskip("websockets.sync.client")
    caplog.set_level(logging.INFO, "minivllm.server")
    server.post("/v1/completions", {**TALE, "n": 2}, headers={"x-request-id": "mine-1"})
    with websockets.connect(server.url.replace("http", "ws") + "/v1/ws", proxy=None) as socket:
        for ident, more in (("a", {"stream": False}), ("b", {"temperature": 9})):
            socket.send(json.dumps({"type": "completions", "id": ident, "body": {**TALE, **more}}))
            socket.recv(timeout=20)
    server.at_rest()
    rows = {
        r.event["client_id"]: r.event for r in caplog.records if r.getMessage() == "request" and "client_id" in r.event
    }
    assert set(rows) == {"mine-1", "a", "b"}
    assert [rows[name]["status"] for name in ("mine-1", "a", "b")] == [200, 200, 400]
    for name, tokens in (("mine-1", 10), ("a", 5)):
        assert rows[name]["completion_tokens"] == tokens and rows[name]["finished"] == ["length"]
        assert 0 <= rows[name]["queue_ms"] <= rows[name]["ttft_ms"] <= rows[name]["ms"]
    assert not any("Once upon" in json.dumps(row) for row in rows.values())
    assert len({row["request_id"] for row in rows.values()}) == 3


def test_drafts_are_counted_once_however_often_somebody_looks(server):
    received, shown = server.app.service.metrics, server.stats()
    for proposed, accepted in ((7, 3), (7, 3), (12, 4)):
        text = received.text({**shown, "speculation": {"proposed": proposed, "accepted": accepted}}).decode()
        for what, count in (("draft", proposed), ("accepted", accepted)):
            assert f'vllm:spec_decode_num_{what}_tokens_total{{engine="0",model_name="pocket"}} {count}.0\n' in text
