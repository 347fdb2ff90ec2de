"""Facts of sessions in request bodies: each protocol passes them to the engine, and keys have sessions of their own."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from http_helpers import served

server = served(keys=["one", "two"], engine={"evictor": "agent-ttl", "max_num_seqs": 4})
SAY = [{"role": "user", "content": "Tell me a tale."}]
PROTOCOLS = {
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 2},
    "/v1/chat/completions": {"messages": SAY, "max_tokens": 2},
    "/v1/messages": {"messages": SAY, "max_tokens": 2},
    "/v1/responses": {"input": "Tell me a tale.", "max_output_tokens": 2},
    "/api/chat": {"messages": SAY, "options": {"num_predict": 2}, "stream": False},
    "/api/generate": {"prompt": "Once", "options": {"num_predict": 2}, "stream": False},
}


def ask(server, path, session, key="one"):
    body = {**PROTOCOLS[path], "session": session}
    return server.post(path, body, headers={"Authorization": f"Bearer {key}"})


def sessions(server):
    return server.stats()["figures"]["evictor"]["sessions"]


@pytest.mark.parametrize("path", PROTOCOLS)
def test_every_protocol_passes_the_session_to_the_engine(server, path):
    before = sessions(server)
    answer = ask(server, path, {"id": f"of {path}", "next_s": 60, "spans": [{"kind": "user", "tokens": 3}]})
    assert answer.status_code == 200, answer.text
    assert not answer.json().get("warnings")
    assert sessions(server) == before + 1
    assert ask(server, path, {"id": f"of {path}"}).status_code == 200
    assert sessions(server) == before + 1


@pytest.mark.parametrize("path", PROTOCOLS)
def test_every_protocol_refuses_wrong_facts_with_the_accepted_values(server, path):
    for session, problem in (({"id": "s", "budgt": 1}, "budget"), ("s", "mapping"), ({"id": "s", "next_s": -1}, "sec")):
        answer = ask(server, path, session)
        assert answer.status_code == 400 and problem in answer.text and "session" in answer.text, answer.text


def test_two_keys_with_the_same_session_id_have_two_sessions(server):
    before = sessions(server)
    for key in ("one", "two", "one"):
        assert ask(server, "/v1/completions", {"id": "the same"}, key).status_code == 200
    assert sessions(server) == before + 2
