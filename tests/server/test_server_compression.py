"""KV compression over HTTP: a budget in the body of each protocol, and budgets that are refused."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from http_helpers import Running, served

server = served(engine={"compressor": "keydiff", "compress_every": 4})
PROMPT = "Once upon a time there was a fox who lived in a wood by the river. "
CHAT = [{"role": "user", "content": PROMPT}]
BODIES = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 12},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 12},
    "/v1/messages": {"messages": CHAT, "max_tokens": 12},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 12},
}


def compressions(server):
    return server.do(server.app.service.client.stats)["compression"]["compressions"]


@pytest.mark.parametrize("path", BODIES)
def test_a_budget_in_the_body_compresses_the_request(server, path):
    before = compressions(server)
    plain = server.client.post(f"{server.url}{path}", json={**BODIES[path], "temperature": 0})
    assert plain.status_code == 200 and compressions(server) == before
    answer = server.client.post(f"{server.url}{path}", json={**BODIES[path], "temperature": 0, "kv_budget": 0.5})
    assert answer.status_code == 200, answer.text
    assert compressions(server) > before


@pytest.mark.parametrize("budget", [1.5, -1, "x", True])
def test_a_budget_that_is_no_number_of_tokens_is_status_400(server, budget):
    body = {**BODIES["/v1/completions"], "kv_budget": budget}
    answer = server.client.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_budget", answer.text


def test_kept_tokens_are_refused_as_a_tap_over_http_and_the_server_continues():
    running = Running(["user", "other"], {"model": "pocket", "compressor": "keydiff"}, admin=True)
    key = {"Authorization": f"Bearer {running.app.admin_token}"}
    body = {**BODIES["/v1/completions"], "kv_budget": 0.5}
    others = [{"point": "layers.0.residual", "read": "last"}]
    for taps in (
        [{"point": "compression.kept", "read": "mean"}],
        [{"point": "compression.kept", "read": "last"}, *others],
    ):
        answer = running.client.post("/v1/completions", json={**body, "taps": taps}, headers=key)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "taps", answer.text
    answer = running.client.post("/v1/completions", json={**body, "taps": others}, headers=key)
    assert answer.status_code == 200 and len(answer.json()["choices"][0]["taps"]) == 1
    running.at_rest()
    running.close()
