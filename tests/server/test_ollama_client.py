"""The package ``ollama`` and the requests of Open WebUI against the server."""

import asyncio
import json
import re
from datetime import datetime

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("ollama")

import ollama
from http_helpers import served
from scripted import scripted

server = served(engine={"batch_invariant": False, "max_num_seqs": 8})
HI = [{"role": "user", "content": "What is 2 + 3?"}]
GREEDY = {"temperature": 0}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


@pytest.fixture
def client(server):
    return ollama.Client(host=server.url, trust_env=False)


def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
      city: its name
    """
    return f"rain in {city}"


def test_chats_and_generation(client):
    whole = client.chat("pocket", HI, options=GREEDY)
    parts = list(client.chat("pocket:latest", HI, options=GREEDY, stream=True, keep_alive="5m"))
    assert "".join(part.message.content for part in parts) == whole.message.content == "2 + 3 = 5"
    assert whole.done_reason == parts[-1].done_reason == "stop" and whole.eval_count == parts[-1].eval_count == 8
    assert client.generate("pocket", "What is 2 + 3?", options=GREEDY).response == "2 + 3 = 5"
    raw = client.generate("pocket", "Once upon a time", raw=True, stream=True, options={**GREEDY, "num_predict": 6})
    assert "".join(part.response for part in raw).startswith(" there was")
    scored = client.chat("pocket", HI, options=GREEDY, logprobs=True, top_logprobs=2)
    assert "".join(one.token for one in scored.logprobs[:-1]) == "2 + 3 = 5"  # the last token ends the answer
    assert len(scored.logprobs) == 8 and len(scored.logprobs[0].top_logprobs) == 2


def test_the_chat_of_tools(client, server):
    with scripted(server, [CALL, CALL, "It rains."]) as script:
        answer = client.chat("pocket", HI, tools=[weather])
        parts = list(client.chat("pocket", HI, tools=[weather], stream=True))
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
        streamed = [one.function.arguments for part in parts for one in part.message.tool_calls or ()]
        assert streamed == [{"city": "Rome"}]
        result = {"role": "tool", "content": weather(**call.function.arguments), "tool_name": "weather"}
        last = client.chat("pocket", [*HI, answer.message, result], tools=[weather])
    assert last.message.content == "It rains." and "rain in Rome" in script.prompts[-1]


def test_forms_and_reasoning(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    answer = client.chat("pocket", HI, format=schema, options=GREEDY)
    assert answer.message.content in ('{"ok":true}', '{"ok":false}')
    for think in (True, False, "high"):
        assert client.chat("pocket", HI, think=think, options=GREEDY).message.content == "2 + 3 = 5"


def test_the_model(client):
    assert client.list().models[0].model == client.ps().models[0].model == "pocket:latest"
    shown = client.show("pocket")
    assert shown.capabilities == ["completion", "tools"] and shown.modelinfo["qwen3.context_length"] == 1024
    assert client.pull("pocket").status == [one.status for one in client.pull("pocket", stream=True)][-1] == "success"


def test_embeddings(client, server):
    both = client.embed("pocket", ["a fox", "an owl"])
    fox = server.post("/v1/embeddings", {"input": "a fox"}).json()["data"][0]["embedding"]
    assert both.model == "pocket" and both.embeddings[0] == pytest.approx(fox, abs=1e-5)
    assert both.prompt_eval_count == 4 and both.total_duration > 0 and len(both.embeddings) == 2
    assert client.embed("pocket", "a fox", dimensions=8).embeddings[0] != fox
    old = client.embeddings("pocket", "a fox").embedding
    length = sum(value * value for value in old) ** 0.5
    assert [value / length for value in old] == pytest.approx(fox, abs=1e-5) and length > 2


def test_errors_have_a_status_and_a_text(client):
    requests = [
        (lambda: client.chat("nope", HI), 404, "model 'nope' not found"),
        (lambda: list(client.chat("nope", HI, stream=True)), 404, "model 'nope' not found"),
        (lambda: client.show("nope"), 404, "model 'nope' not found"),
        (lambda: client.delete("pocket"), 501, "delete is not supported"),
        (lambda: client.create("other", from_="pocket"), 501, "create is not supported"),
        (lambda: client.generate("pocket", "a", suffix="b"), 400, "suffix is not supported"),
    ]
    for request, status, words in requests:
        with pytest.raises(ollama.ResponseError, match=words) as caught:
            request()
        assert caught.value.status_code == status


def test_the_asynchronous_client(server):
    async def main():
        client = ollama.AsyncClient(host=server.url, trust_env=False)
        whole = await client.chat("pocket", HI, options=GREEDY)
        parts = [part async for part in await client.chat("pocket", HI, options=GREEDY, stream=True)]
        return whole.message.content, "".join(part.message.content for part in parts)

    assert asyncio.run(main()) == ("2 + 3 = 5", "2 + 3 = 5")


def test_open_webui_discovers_the_model_and_chats(server):
    user = {f"X-OpenWebUI-User-{name}": name for name in ("Name", "Id", "Email", "Role")}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", **user}

    def get(path):
        return server.client.get(path, headers=headers).json()

    version = get("/api/version")["version"]
    assert tuple(map(int, re.sub(r"^v|-.*", "", version).split("."))) >= (0, 6, 4)
    (model,) = get("/api/tags")["models"]
    expires = {one["name"]: one["expires_at"] for one in get("/api/ps")["models"]}
    assert datetime.fromisoformat(expires[model["name"]]).timestamp() > 4e9
    assert {"name", "model", "size", "digest", "modified_at", "details"} <= set(model)
    body = {"model": model["model"], "messages": HI, "options": GREEDY, "stream": True}
    with server.client.stream("POST", "/api/chat", json=body, headers=headers) as answer:
        *parts, last = map(json.loads, answer.iter_lines())
    assert "".join(part["message"]["content"] for part in parts) == "2 + 3 = 5" and last["done"]
    assert last["eval_duration"] > 0 and last["prompt_eval_duration"] > 0 and last["total_duration"] > 0
    unload = {"model": model["model"], "keep_alive": 0, "prompt": ""}
    assert server.client.post("/api/generate", json=unload, headers=headers).status_code == 200
