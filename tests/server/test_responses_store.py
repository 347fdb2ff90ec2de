"""Stored responses: continued conversations, references, deletion, limits, keys, files and the background."""

import json
import os
import time

import pytest

pytest.importorskip("fastapi")

from http_helpers import Running, served
from scripted import scripted

from minivllm.errors import ConfigError
from minivllm.server.response_store import KeyResponses, ResponseStore, StoredResponse

server = served(["sk-1", "sk-2"], max_responses=6, max_responses_bytes=200_000, max_body_bytes=60_000)
OTHER = {"Authorization": "Bearer sk-2"}


def ask(server, status=200, **body):
    answer = server.post("/v1/responses", {"input": "hi", **body})
    assert answer.status_code == status, answer.text
    return answer.json() if status == 200 else answer.json()["error"]


def get(server, path, status=200, **more):
    answer = server.client.get(f"/v1/responses/{path}", **more)
    assert answer.status_code == status, answer.text
    return answer.json()


def text(response):
    return response["output"][0]["content"][0]["text"]


def until(server, ident, *statuses):
    """A response once it has one of the statuses."""
    for _ in range(200):
        found = get(server, ident)
        if found["status"] in statuses:
            return found
        time.sleep(0.05)
    raise AssertionError(found)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_is_what_the_client_got(server, stream):
    with scripted(server, ["answer"]):
        if stream:
            with server.client.stream("POST", "/v1/responses", json={"input": "hi", "stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
            made = json.loads(lines[-1].removeprefix("data: "))["response"]
        else:
            made = ask(server)
    assert get(server, made["id"]) == made and made["store"] is True
    gone = server.client.delete(f"/v1/responses/{made['id']}")
    assert gone.json() == {"id": made["id"], "object": "response", "deleted": True}
    assert get(server, made["id"], 404)["error"]["message"] == f"Response with id '{made['id']}' not found."
    assert server.client.delete(f"/v1/responses/{made['id']}").status_code == 404


def test_previous_response_id_continues_the_conversation_without_its_instructions(server):
    with scripted(server, ["one", "two", "three"]) as script:
        first = ask(server, input="first question", instructions="Old rules.")
        second = ask(server, input="second question", previous_response_id=first["id"])
        third = ask(server, input="third question", previous_response_id=second["id"], instructions="New rules.")
    assert third["previous_response_id"] == second["id"]
    prompt = script.prompts[2]
    order = ["New rules.", "first question", "one", "second question", "two", "third question"]
    places = [prompt.index(words) for words in order]
    assert places == sorted(places) and "Old rules." not in prompt
    listed = get(server, f"{third['id']}/input_items", params={"order": "asc"})
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert texts == ["first question", "one", "second question", "two", "third question"]


def test_input_items_are_pages(server):
    items = [{"role": "user", "content": f"number {i}"} for i in range(5)]
    made = ask(server, input=items, max_output_tokens=2)
    path = f"{made['id']}/input_items"
    newest = get(server, path, params={"limit": 2})
    assert [item["content"][0]["text"] for item in newest["data"]] == ["number 4", "number 3"]
    assert newest["object"] == "list" and newest["has_more"] is True
    assert newest["first_id"] == newest["data"][0]["id"] and newest["last_id"] == newest["data"][1]["id"]
    rest = get(server, path, params={"after": newest["last_id"]})
    assert [item["content"][0]["text"] for item in rest["data"]] == ["number 2", "number 1", "number 0"]
    assert rest["has_more"] is False
    for params in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "msg_1"}):
        assert get(server, path, 400, params=params)["error"]["param"] == next(iter(params))


def test_references_name_items_of_stored_responses(server):
    with scripted(server, ["one", "two"]) as script:
        first = ask(server, input=[{"role": "user", "content": "first question"}])
        requested = get(server, f"{first['id']}/input_items")["data"][0]["id"]
        reported = first["output"][0]["id"]
        items = [{"type": "item_reference", "id": requested}, {"id": reported}, {"role": "user", "content": "and?"}]
        ask(server, input=items)
    assert "first question" in script.prompts[1] and "one" in script.prompts[1]
    for ident in ("msg_1", reported + "0", "resp_x", "../../etc/passwd"):
        error = ask(server, 404, input=[{"type": "item_reference", "id": ident}])
        assert error["param"] == "input[0]" and "not found" in error["message"]


def test_an_unknown_previous_response_has_openai_s_code(server):
    for ident in ("resp_unknown", "x", "../" * 20, "resp_" + "a" * 5000):
        error = ask(server, 400, previous_response_id=ident)
        assert error["code"] == "previous_response_not_found" and error["param"] == "previous_response_id"
        assert len(error["message"]) < 700


def test_a_response_belongs_to_its_key(server):
    made = ask(server, max_output_tokens=2)
    assert get(server, made["id"], 404, headers=OTHER)
    assert server.client.delete(f"/v1/responses/{made['id']}", headers=OTHER).status_code == 404
    body = {"input": "hi", "previous_response_id": made["id"]}
    assert server.post("/v1/responses", body, headers=OTHER).json()["error"]["code"] == "previous_response_not_found"
    item = {"type": "item_reference", "id": made["output"][0]["id"]}
    assert server.post("/v1/responses", {"input": [item]}, headers=OTHER).status_code == 404
    assert get(server, made["id"])["id"] == made["id"]


def test_without_store_nothing_is_kept(server):
    made = ask(server, store=False, max_output_tokens=2)
    assert made["store"] is False and get(server, made["id"], 404)


def test_the_oldest_responses_of_a_key_are_dropped(server):
    with scripted(server, ["x"] * 20, context=1 << 18):
        other = server.post("/v1/responses", {"input": "hi"}, headers=OTHER).json()["id"]
        ids = [ask(server)["id"] for _ in range(8)]
        large = [ask(server, input="y" * 45_000)["id"] for _ in range(5)]
    for ident in ids[:2]:
        assert get(server, ident, 404)
    assert get(server, other, headers=OTHER)["id"] == other
    # 6 responses are allowed, but only 4 of 45 kB are within 200 kB
    assert [server.client.get(f"/v1/responses/{ident}").status_code for ident in large] == [404, 200, 200, 200, 200]


def test_a_conversation_is_not_larger_than_a_body_may_be(server):
    with scripted(server, ["x"] * 3, context=1 << 18):
        made = ask(server, input="y" * 40_000)
        error = ask(
            server,
            400,
            input="z" * 10_000,
            previous_response_id=ask(server, input="z" * 19_900, previous_response_id=made["id"])["id"],
        )
    assert "begin another" in error["message"] and error["param"] == "previous_response_id"


def test_a_background_response_is_read_and_cancelled(server):
    with scripted(server, ["one two three four five six"] * 3, pause=0.2) as script:
        made = ask(server, background=True)
        assert made["status"] == "in_progress" and made["background"] is True and made["output"] == []
        (item,) = get(server, f"{made['id']}/input_items")["data"]
        assert item["content"][0]["text"] == "hi"
        cancelled = ask(server, background=True)
        answer = server.client.post(f"/v1/responses/{cancelled['id']}/cancel")
        assert answer.status_code == 200 and answer.json()["status"] == "cancelled"
        again = server.client.post(f"/v1/responses/{cancelled['id']}/cancel")
        assert again.status_code == 200 and again.json() == answer.json()
        assert get(server, cancelled["id"])["status"] == "cancelled"
        done = until(server, made["id"], "completed")
        late = ask(server, background=True, timeout_s=0.5)
        failed = until(server, late["id"], "failed")
        script.texts = ["ok"]
        about = {"a": '"background":true' + "é" * 400}  # a text that looks like the field
        whole = ask(server, previous_response_id=made["id"], metadata=about)
    assert text(done).startswith("one two") and done["usage"]["output_tokens"] > 3
    assert failed["error"]["code"] == "server_error" and "took longer" in failed["error"]["message"]
    refused = server.client.post(f"/v1/responses/{whole['id']}/cancel")
    assert refused.status_code == 400 and "background" in refused.text
    assert server.client.post("/v1/responses/resp_1/cancel").status_code == 404


def test_a_background_response_can_be_deleted_while_it_runs(server):
    with scripted(server, ["one two three four five six"], pause=0.2):
        made = ask(server, background=True)
        assert get(server, made["id"], 404, headers=OTHER)
        assert server.client.delete(f"/v1/responses/{made['id']}").status_code == 200
        assert get(server, made["id"], 404)


@pytest.mark.parametrize(("body", "param"), [({"store": False}, "store"), ({"stream": True}, "stream")])
def test_a_background_response_is_stored_and_no_stream(server, body, param):
    assert ask(server, 400, background=True, **body)["param"] == param
    assert ask(server, 400, background=True, max_output_tokens=5000)["param"] == "max_output_tokens"


def test_events_of_a_stored_response_are_refused(server):
    made = ask(server, max_output_tokens=2)
    assert get(server, made["id"], 400, params={"stream": "true"})["error"]["param"] == "stream"


def test_responses_outlive_the_server_in_a_folder(tmp_path):
    ask_all = {"input": "first question"}
    first = Running(["sk-1"], responses_dir=str(tmp_path), max_responses=2)
    with scripted(first, ["one", "two", "three"]):
        ids = [first.post("/v1/responses", ask_all).json()["id"] for _ in range(3)]
    first.close()
    files = list(tmp_path.iterdir())
    assert len(files) == 2 and all(os.stat(file).st_mode & 0o077 == 0 for file in files)
    assert all(json.loads(file.read_bytes())["response"]["id"] in ids for file in files)
    assert not any("sk-1" in file.name or ids[2] in file.name for file in files)
    (tmp_path / (files[0].name + ".part")).write_text("cut")
    (tmp_path / "notes.txt").write_text("not a response")
    # the key has another number now
    second = Running(["sk-0", "sk-1"], responses_dir=str(tmp_path), max_responses=2)
    key = {"Authorization": "Bearer sk-1"}
    try:
        assert second.client.get(f"/v1/responses/{ids[2]}").status_code == 404
        assert second.client.get(f"/v1/responses/{ids[0]}", headers=key).status_code == 404
        assert text(second.client.get(f"/v1/responses/{ids[2]}", headers=key).json()) == "three"
        with scripted(second, ["four"]) as script:
            body = {"input": "more", "previous_response_id": ids[2]}
            assert second.post("/v1/responses", body, headers=key).status_code == 200
        assert "first question" in script.prompts[0] and "three" in script.prompts[0]
        assert len([file for file in tmp_path.iterdir() if file.suffix == ".json"]) == 2
        assert second.client.get(f"/v1/responses/{ids[1]}", headers=key).status_code == 404
        for file in tmp_path.glob("*.json"):
            file.write_text("{}")
        assert second.client.get(f"/v1/responses/{ids[2]}", headers=key).status_code == 404
    finally:
        second.close()
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix != ".json") == ["notes.txt"]


def test_the_folder_must_exist(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        ResponseStore(1, 1, str(tmp_path / "missing"))


def test_a_file_is_the_json_of_its_parts():
    stored = StoredResponse("resp_1", b'{"id":"resp_1"}', (b'[{"a":"x\\n"}]', b"[]", b"[1]", b"[2]"))
    assert json.loads(stored.pack()) == {"response": {"id": "resp_1"}, "turns": [[{"a": "x\n"}], [], [1], [2]]}
    assert StoredResponse.unpack("resp_1", stored.pack()) == stored
    for damaged in (b"", b"{}", stored.pack()[:-3], stored.pack() + b"\nx"):
        with pytest.raises(ValueError):
            StoredResponse.unpack("resp_1", damaged)


def test_the_connections_of_a_key_keep_a_bounded_number_of_bytes():
    kept = KeyResponses(100)
    one, other = kept.connection(), kept.connection()
    for size in (60, 30, 30):  # the same response again: the last one counts
        kept.put(one, StoredResponse("a", b"x" * size, ()))
    kept.put(other, StoredResponse("b", b"x" * 70, ()))
    assert kept.get(one, "a").size == 30 and kept.get(other, "b") and not kept.get(other, "a")
    kept.put(one, StoredResponse("c", b"x" * 1, ()))
    assert kept.get(one, "a") is None and kept.get(one, "c") and kept.get(other, "b")
    kept.put(other, StoredResponse("d", b"x" * 101, ()))
    assert kept.get(other, "d") is None and kept.get(one, "c")
    kept.remove(other, "b")
    kept.put(one, StoredResponse("e", b"x" * 99, ()))
    assert kept.get(one, "c") and kept.get(one, "e")
