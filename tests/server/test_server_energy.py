"""Joules over HTTP: in the usage of requests that ask for them, in the metrics, and errors without a counter."""

from __future__ import annotations

import re
import threading

import pytest

pytest.importorskip("fastapi")

from energy_helpers import Powercap
from http_helpers import Running

TALE = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 12, "ignore_eos": True}
ASK = {"include_energy": True}
LAST = {"stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def cap(tmp_path_factory):
    with Powercap(tmp_path_factory.mktemp("powercap")) as cap:
        yield cap


@pytest.fixture(scope="module")
def server(cap):
    one = Running(engine={"energy": f"rapl:{cap.folder}"})
    yield one
    one.close()


def counted(server) -> dict[str, float]:
    found = re.findall(
        r'^minivllm:energy_joules_total{.*state="(\w+)"} (\S+)$', server.client.get("/metrics").text, re.M
    )
    return {state: float(value) for state, value in found}


def test_the_usage_of_all_requests_is_what_the_counter_gave_while_busy(server, cap):
    """Whole and as streams, of prompts one and several, of completions and chats, some of them at once."""
    before, found = counted(server), []

    def whole(path: str, body: dict) -> None:
        found.append(server.post(path, {**body, **ASK}).json()["usage"])

    def streamed(path: str, body: dict) -> None:
        *_, last, done = server.events(path, {**body, **ASK, **LAST})
        assert done == "[DONE]" and last["choices"] == []
        found.append(last["usage"])

    asks = [
        (whole, "/v1/completions", TALE),
        (streamed, "/v1/completions", {**TALE, "prompt": ["One day", "The fox"], "n": 2}),
        (whole, "/v1/chat/completions", CHAT),
        (streamed, "/v1/chat/completions", CHAT),
    ]
    threads = [threading.Thread(target=how, args=rest) for how, *rest in asks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = counted(server)
    assert len(found) == len(asks) and all(usage["energy"]["counter"] == "RAPL" for usage in found)
    for usage in found:
        energy, tokens = usage["energy"], usage["completion_tokens"]
        assert energy["joules"] > 0 and energy["joules_per_output_token"] == pytest.approx(energy["joules"] / tokens)
    assert sum(usage["energy"]["joules"] for usage in found) == pytest.approx(after["busy"] - before["busy"], abs=1e-5)
    assert sum(after.values()) <= cap.joules


def test_metrics_tell_idle_joules_apart_and_joules_a_token(server):
    before = counted(server)
    threading.Event().wait(0.1)
    after = counted(server)
    assert after["idle"] > before["idle"] and after["busy"] == before["busy"]
    stats = server.stats()["energy"]
    shown = re.search(r"^minivllm:joules_per_output_token{.*} (\S+)$", server.client.get("/metrics").text, re.M)
    assert float(shown[1]) == stats["joules_per_output_token"] > 0


def test_who_does_not_ask_is_told_nothing_of_it(server):
    assert "energy" not in server.post("/v1/completions", TALE).json()["usage"]
    events = server.events("/v1/completions", {**TALE, **LAST})
    assert "energy" not in events[-2]["usage"]
    every = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last, _ = server.events("/v1/completions", {**TALE, **ASK, **every})
    assert "energy" in last["usage"] and all("energy" not in chunk["usage"] for chunk in chunks)


def test_joules_without_a_usage_to_tell_them_in_and_a_counter_to_read_are_refused(server):
    answer = server.post("/v1/completions", {**TALE, **ASK, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("include_energy: expected stream_options.include_usage with it")
    with_none = Running()
    try:
        for path, body in (("/v1/completions", TALE), ("/v1/chat/completions", CHAT)):
            answer = with_none.post(path, {**body, **ASK})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "include_energy"
            assert "this server does not measure joules; start it with --set energy=on" in answer.text
        assert with_none.post("/v1/completions", {**TALE, "include_energy": False}).status_code == 200
        metrics = with_none.client.get("/metrics").text
        assert not re.search(r"^minivllm:(energy_joules_total|joules_per_output_token){", metrics, re.M)
    finally:
        with_none.close()


def test_a_request_whose_joules_are_not_known_says_null(server, cap):
    """The counter does not change for longer than the server waits."""
    tell, cap.tell = cap.tell, lambda joules: None
    try:
        threading.Event().wait(0.05)
        server.stats()  # read the values that were reported until now
        energy = server.post("/v1/completions", {**TALE, **ASK}).json()["usage"]["energy"]
    finally:
        cap.tell = tell
    assert energy == {"joules": None, "joules_per_output_token": None, "counter": "RAPL"}
