"""Prompts of one request share its parameters, which are bounded together and cost the event loop little at once."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("fastapi")

from http_helpers import served

from minivllm.server.link import client as client_module

COMPLETIONS = "/v1/completions"
server = served(max_body_bytes=1 << 20, max_batch=64)

PARAMETERS = {
    "a form": {"structured_outputs": {"choice": [f"choice {i}" for i in range(3000)]}},
    "words": {"bad_words": [f"a word of many letters {i}" for i in range(1000)]},
    "what processors read": {"vllm_xargs": {f"parameter {i}": i for i in range(1500)}},
    "ids": {"allowed_token_ids": [1000 + i % 900 for i in range(9000)]},
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_a_batch_are_bounded_together_since_every_prompt_is_told_them(server, name):
    body = {"prompt": ["a"] * 64, "max_tokens": 1, **PARAMETERS[name]}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 400, answer.text
    assert "for each of 64 prompts; expected at most 1048576 together" in answer.json()["error"]["message"]
    one = server.post(COMPLETIONS, {**body, "prompt": "a"})  # it may be refused, but not for that
    assert "prompts; expected" not in one.text


def test_prompts_of_a_batch_are_told_one_by_one_with_parameters_that_are_written_once(server, monkeypatch):
    """Else a batch with many biases is one turn of the event loop, of seconds."""
    written, turns, sent = [], [0], []
    client = server.app.service.client
    made, send = client_module.params_to_json, client._send
    monkeypatch.setattr(client_module, "params_to_json", lambda params: (written.append(params), made(params))[1])

    def received(kind, *rest):
        if kind == "add":
            sent.append(turns[0])
        return send(kind, *rest)

    monkeypatch.setattr(client, "_send", received)

    async def count():
        while len(sent) < 32:
            turns[0] += 1
            await asyncio.sleep(0)

    counting = asyncio.run_coroutine_threadsafe(count(), server.loop)
    body = {"prompt": ["a"] * 32, "max_tokens": 1, "logit_bias": dict.fromkeys(range(200), 1)}
    answer = server.post(COMPLETIONS, body)
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 32
    counting.result(20)
    assert len(written) == 1
    assert len(set(sent)) == 32, "prompts were told in the same turn of the loop"
