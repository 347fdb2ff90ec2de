"""Small routes of llama.cpp, vLLM and SageMaker, and fields of llama.cpp on routes of vLLM."""

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from scripted import scripted

server = served(engine={"batch_invariant": False, "max_num_seqs": 8})
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}
TIMINGS = {
    "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "predicted_n", "predicted_ms",
    "predicted_per_token_ms", "predicted_per_second",
}  # fmt: skip


def is_timed(timings, prompt, predicted):
    assert set(timings) == TIMINGS and all(value >= 0 for value in timings.values())
    assert timings["prompt_n"] + timings["cache_n"] == prompt and timings["predicted_n"] == predicted
    assert timings["predicted_per_second"] == pytest.approx(1e3 * predicted / timings["predicted_ms"])


@pytest.mark.parametrize(("path", "body", "prompt"), [(CHAT, HI, 20), (COMPLETIONS, {"prompt": "Once upon a time"}, 4)])
def test_timings_are_there_on_request_alone(server, path, body, prompt):
    body = {**body, "temperature": 0, "max_tokens": 4}
    assert "timings" not in server.post(path, body).json()
    assert "timings" not in server.post(path, {**body, "timings_per_token": False}).json()
    answer = server.post(path, {**body, "timings_per_token": True}).json()
    is_timed(answer["timings"], prompt, 4)
    assert "warnings" not in answer
    *plain, _ = server.events(path, body)
    assert all("timings" not in chunk for chunk in plain)
    more = {"timings_per_token": True, "stream_options": {"include_usage": True}}
    *chunks, _ = server.events(path, {**body, **more})
    is_timed(chunks[-1]["timings"], prompt, 4)
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-2:] == [4, 4]


def test_timings_of_several_prompts_count_together(server):
    body = {"prompt": ["Once upon a time", "Once upon a time", "a"], "n": 2, "max_tokens": 3, "timings_per_token": True}
    answer = server.post(COMPLETIONS, {**body, "ignore_eos": True}).json()
    is_timed(answer["timings"], answer["usage"]["prompt_tokens"], 18)


def test_timings_must_be_true_or_false(server):
    answer = server.post(CHAT, {**HI, "timings_per_token": 1})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "timings_per_token"


def test_props_have_what_clients_of_llama_cpp_read(server):
    props = server.client.get("/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 1024 and settings["params"]["n_predict"] == -1 and props["total_slots"] == 8
    assert props["chat_template"] == server.client.get("/tokenizer_info").json()["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False} and props["build_info"].startswith("minivllm ")
    assert props["model_alias"] == props["model_path"] == "pocket"


def test_the_text_of_a_template_is_the_prompt_of_the_chat(server):
    with scripted(server, ["ok"]) as script:
        server.post(CHAT, HI)
    assert server.post("/apply-template", HI).json() == {"prompt": script.prompts[0]}
    tool = {"type": "function", "function": {"name": "weather"}}
    shown = server.post("/apply-template", {**HI, "tools": [tool], "add_generation_prompt": False}).json()["prompt"]
    assert "weather" in shown and not shown.endswith(script.prompts[0][-5:])
    for body, words in (({}, "messages"), ({"messages": []}, "messages"), ({"messages": [{}]}, "messages[0].role")):
        answer = server.post("/apply-template", body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert server.post("/apply-template", {**HI, "model": "x"}).status_code == 404


def test_tokens_in_the_form_of_llama_cpp(server):
    text = "Once upon a time \N{SNOWMAN}"
    of_vllm = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert server.post("/tokenize", {"content": text}).json() == of_vllm
    pieces = server.post("/tokenize", {"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == of_vllm["tokens"]
    raw = b"".join(bytes(one) if isinstance(one, list) else one.encode() for one in (p["piece"] for p in pieces))
    assert raw.decode() == text and any(isinstance(piece["piece"], list) for piece in pieces)
    wrong = {"parse_special": False, "prompt": "a", "with_pieces": 3}
    for name, value in wrong.items():
        answer = server.post("/tokenize", {"content": text, name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] in (name, "content")
    assert server.post("/tokenize", {"content": "a", "parse_special": True, "add_special": True}).status_code == 200
    ids = of_vllm["tokens"]
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": text, "content": text}
    assert server.post("/detokenize", {"tokens": ids, "model": "pocket"}).json() == {"prompt": text}


def test_a_ping_is_a_check_of_health(server):
    health = server.client.get("/health").json()
    assert server.client.get("/ping").json() == server.client.post("/ping").json() == health
    assert server.client.post("/ping", json={}).status_code == 200
    assert server.client.put("/ping", json={}).status_code == 405


def test_invocations_are_chats_or_completions(server):
    chat = server.post("/invocations", {**HI, "temperature": 0}).json()
    assert chat["object"] == "chat.completion" and chat["choices"][0]["message"]["content"] == "2 + 3 = 5"
    text = server.post("/invocations", {"prompt": "a", "max_tokens": 2}).json()
    assert text["object"] == "text_completion" and text["usage"]["completion_tokens"] == 2
    *chunks, done = server.events("/invocations", {**HI, "temperature": 0})
    assert done == "[DONE]" and "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "2 + 3 = 5"
    neither = server.post("/invocations", {"inputs": "a"})
    assert neither.status_code == 400 and "neither messages" in neither.json()["error"]["message"]


def test_the_load_counts_requests_and_the_settings_name_no_path(server):
    assert server.client.get("/load").json() == {"server_load": 0}
    with (
        scripted(server, ["word " * 50], pause=0.05),
        server.client.stream("POST", CHAT, json={**HI, "stream": True}) as a,
    ):
        next(a.iter_lines())
        assert server.client.get("/load").json() == {"server_load": 1}
    info = server.client.get("/server_info").json()
    assert info["vllm_config"]["model_config"] == {"model": "pocket", "max_model_len": 1024, "dtype": "float32"}
    assert info["vllm_config"]["scheduler_config"]["max_num_seqs"] == 8 and "'/" not in str(info)
