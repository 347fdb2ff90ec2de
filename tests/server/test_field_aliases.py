"""Fields of other servers.  They are translated if they mean the same, and have no effect otherwise; the answer has a
warning.

``python tests/server/test_field_aliases.py`` prints the table of docs/api.md.
"""

import json
import re
import sys
from pathlib import Path

# as pytest does, for ``python tests/server/test_field_aliases.py``
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import pytest

pytest.importorskip("fastapi")

from http_helpers import served

from minivllm.core import declared_params
from minivllm.core.interfaces.params import SamplingParams
from minivllm.server.errors import ApiError
from minivllm.server.openai import field_table, fields
from minivllm.server.openai.bodies import ChatBody, CompletionBody, read

server = served(engine={"batch_invariant": False, "max_num_seqs": 8})
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALE = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "return_token_ids": True}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def translated(**values):
    return fields.translate(values, CompletionBody.model_fields)


# field of another server, its value, its meaning in this server's names
SAME = [
    ("max_completion_tokens", 7, {"max_tokens": 7}),
    ("max_new_tokens", 7, {"max_tokens": 7}),
    ("max_output_tokens", 7, {"max_tokens": 7}),
    ("max_tokens_to_sample", 7, {"max_tokens": 7}),
    ("n_predict", 7, {"max_tokens": 7}),
    ("num_predict", 7, {"max_tokens": 7}),
    ("min_new_tokens", 3, {"min_tokens": 3}),
    ("min_new_tokens", 0, {}),
    ("repeat_penalty", 1.3, {"repetition_penalty": 1.3}),
    ("repeat_penalty", 1.0, {}),
    ("rep_pen", 1, {}),
    ("stop_sequences", ["a"], {"stop": ["a"]}),
    ("stop_sequence", "a", {"stop": "a"}),
    ("stop_strings", [], {}),
    ("stop_words", ["a", "b"], {"stop": ["a", "b"]}),
    ("random_seed", 5, {"seed": 5}),
    ("random_seed", 0, {"seed": 0}),
    ("sampler_seed", 5, {"seed": 5}),
    ("sampler_seed", -1, {}),
    ("num_return_sequences", 2, {"n": 2}),
    ("num_beams", 4, {"beam_width": 4}),
    ("num_beams", 1, {}),
    ("bad_words_ids", [[5]], {"bad_words": [[5]]}),
    ("do_sample", False, {"temperature": 0.0}),
    ("do_sample", True, {}),
    ("typical", 0.5, {"typical_p": 0.5}),
    ("typical", 1, {}),
    ("thinking_budget", 9, {"thinking_token_budget": 9}),
    ("thinking_budget", -1, {}),
    ("reasoning_budget", 0, {"thinking_token_budget": 0}),
    ("truncate", 9, {"truncate_prompt_tokens": 9}),
    ("truncate", True, {"truncate_prompt_tokens": -1}),
    ("truncate", False, {}),
    ("truncation", "auto", {"truncate_prompt_tokens": -1}),
    ("truncation", "disabled", {}),
    ("no_stop_trim", True, {"include_stop_str_in_output": True}),
    ("return_full_text", True, {"echo": True}),
    ("guided_json", {"type": "null"}, {"structured_outputs": {"json": {"type": "null"}}}),
    ("guided_regex", "a", {"structured_outputs": {"regex": "a"}}),
    ("guided_choice", ["a"], {"structured_outputs": {"choice": ["a"]}}),
    ("guided_grammar", "start: /a/", {"structured_outputs": {"grammar": "start: /a/"}}),
    ("guided_json_object", True, {"structured_outputs": {"json_object": True}}),
    ("guided_json_object", False, {}),
    ("json_schema", "{}", {"structured_outputs": {"json": "{}"}}),
    ("regex", "a", {"structured_outputs": {"regex": "a"}}),
    ("regex", "", {}),
    ("ebnf", 'root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ("grammar", 'root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ("grammar", "", {}),
    ("grammar", {"type": "json", "value": {"type": "null"}}, {"structured_outputs": {"json": {"type": "null"}}}),
    ("grammar", {"type": "regex", "value": "a"}, {"structured_outputs": {"regex": "a"}}),
    ("grammar_string", 'root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ("format", "json", {"structured_outputs": {"json_object": True}}),
    ("format", "", {}),
    ("format", {"type": "null"}, {"structured_outputs": {"json": {"type": "null"}}}),
    ("mirostat", 2, {"mirostat_tau": 5.0}),
    ("mirostat", 0, {}),
    ("mirostat_mode", 2, {"mirostat_tau": 5.0}),
]


@pytest.mark.parametrize(("name", "value", "want"), SAME, ids=[f"{one[0]}-{n}" for n, one in enumerate(SAME)])
def test_a_field_that_means_the_same_is_ours_and_a_neutral_value_is_none(name, value, want):
    for given in (value, None):
        made = translated(**{name: given})
        assert made.values == (want if given is not None else {}) and not made.warnings
    outer = translated(options={name: value})
    assert outer.values == want and not outer.warnings


def test_a_pattern_of_whitespace_goes_with_a_form_of_json():
    form = {"json": {}, "whitespace_pattern": " "}
    made = translated(guided_json={}, guided_whitespace_pattern=" ")
    assert made.values == {"structured_outputs": form} and not made.warnings
    for more, want in (({}, None), ({"regex": "a"}, {"regex": "a"})):
        made = translated(guided_whitespace_pattern=" ", **more)
        assert made.values == {"structured_outputs": want}
        assert [warning["field"] for warning in made.warnings] == ["guided_whitespace_pattern"]


def test_every_alias_is_tried_and_its_target_is_there():
    aliases = {name: row for name, row in field_table.OTHER.items() if row.use == field_table.ALIAS}
    assert {one[0] for one in SAME} | {"guided_whitespace_pattern"} == set(aliases)
    ours = {*CompletionBody.model_fields, *SamplingParams().__dict__, *declared_params.builtin()}
    assert {row.to.partition(".")[0] for row in aliases.values()} <= ours


# fields of a chat that have no effect in a completion
OF_CHAT = {"reasoning_effort", "enable_thinking", "thinking", "think", "reasoning", "include_reasoning"}


def test_no_name_has_two_treatments_in_one_body():
    other = [row.name for row in field_table.TABLE if row.use != field_table.DECLARED]
    assert len(other) == len(set(other))
    of_both = {*CompletionBody.model_fields, *ChatBody.model_fields} - {"echo", "max_completion_tokens", *OF_CHAT}
    assert not of_both & {*field_table.names_of(field_table.ALIAS), *field_table.names_of(field_table.IGNORED)}
    for model, route in ((ChatBody, field_table.CHAT), (CompletionBody, field_table.COMPLETION)):
        declared = [row for row in field_table.TABLE if route in row.routes]
        assert [row.name for row in declared] == list(model.model_fields)


def test_every_field_without_effect_is_told_unless_it_asks_for_nothing(server):
    """One request with all of them: none is refused, none is passed over."""
    ignored = [row for row in field_table.TABLE if row.use == field_table.IGNORED]
    names = sorted(row.name for row in ignored if row.name not in OF_CHAT)
    asks = [(CHAT, HI, names[start : start + 30]) for start in range(0, len(names), 30)]
    asks.append(("/v1/completions", {"prompt": "a", "max_tokens": 1}, sorted(OF_CHAT)))
    for path, ask, some in asks:
        answer = server.post(path, {**ask, **dict.fromkeys(some, 0.37)})
        assert answer.status_code == 200, answer.text
        received = answer.json()["warnings"]
        assert sorted(w["field"] for w in received) == some == sorted(answer.headers["x-warnings"].split(","))
        assert all(w["message"].startswith(f"{w['field']} has no effect here: ") for w in received)
    for row in ignored:
        for value in (None, *row.neutral):
            made = translated(**{row.name: value})
            assert made.values == {} and made.warnings == [], row.name
    assert translated(top_a=False).warnings  # which is no 0


def test_a_stream_tells_it_in_its_first_chunk_and_in_a_header(server):
    for path, body in ((CHAT, HI), (COMPLETIONS, TALE)):
        with server.client.stream("POST", path, json={**body, "stream": True, "top_a": 0.5, "a b": 1}) as answer:
            assert answer.headers["x-warnings"] == "top_a,a%20b"
            chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
        assert [w["field"] for w in chunks[0]["warnings"]] == ["top_a", "a b"]
        assert not any("warnings" in chunk for chunk in chunks[1:])
        assert "x-warnings" not in server.post(path, body).headers


def test_openais_client_reads_answers_with_warnings(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        ask = {"model": "pocket", **HI, "extra_body": {"top_a": 0.5, "repeat_penalty": 1.1}}
        whole = client.chat.completions.with_raw_response.create(**ask)
        assert whole.headers["x-warnings"] == "top_a" and whole.parse().warnings[0]["field"] == "top_a"
        assert whole.parse().choices[0].message.role == "assistant"
        chunks = list(client.chat.completions.create(**ask, stream=True))
        assert chunks[0].warnings[0]["field"] == "top_a" and chunks[-1].choices[0].finish_reason


CONTRADICTIONS = [
    ({"max_tokens": 5, "max_new_tokens": 6}, "max_tokens", "max_new_tokens"),
    ({"n_predict": 5, "num_predict": 6}, "n_predict", "num_predict"),
    ({"n_predict": -1, "max_tokens": 6}, "n_predict", "max_tokens"),
    ({"temperature": 0, "do_sample": True}, "do_sample=true", "temperature=0"),
    ({"stop": ["a"], "stop_sequences": ["b"]}, "stop", "stop_sequences"),
    ({"seed": 1, "options": {"seed": 2}}, "options.seed=2", "seed=1"),
    ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty", "repeat_penalty"),
    (
        {
            "guided_regex": "a",
            "guided_json": {},
        },
        "guided_regex",
        "guided_json",
    ),
    ({"regex": "a", "structured_outputs": {"regex": "a"}}, "regex", "structured_outputs"),
    ({"regex": "a", "guided_regex": "b"}, "regex", "guided_regex"),
]


@pytest.mark.parametrize(("body", "one", "other"), CONTRADICTIONS)
def test_a_contradiction_is_refused_with_both_names(server, body, one, other):
    answer = server.post(COMPLETIONS, {"prompt": "a", **body})
    assert answer.status_code == 400, answer.text
    assert one in answer.json()["error"]["message"] and other in answer.json()["error"]["message"]


def test_a_form_of_another_server_beside_openais_is_refused_by_its_own_name(server):
    body = {"prompt": "a", "regex": "a", "response_format": {"type": "json_object"}}
    error = server.post(COMPLETIONS, body).json()["error"]
    assert error["code"] == 400 and "response_format" in error["message"] and "sent as regex" in error["message"]


def test_a_websocket_takes_and_tells_the_same(server):
    websockets = pytest.importorskip("websockets.sync.client")
    with websockets.connect(server.url.replace("http", "ws") + "/v1/ws", proxy=None) as socket:
        body = {"prompt": "a", "max_new_tokens": 3, "ignore_eos": True, "top_a": 0.5, "stream": False}
        for ident, more, code in (("a", {}, None), ("b", {"max_tokens": 4}, 400)):
            socket.send(json.dumps({"type": "completions", "id": ident, "body": {**body, **more}}))
            message = json.loads(socket.recv(timeout=20))
            assert message.get("error", {}).get("code") == code
            if code is None:
                assert message["data"]["usage"]["completion_tokens"] == 3
                assert [warning["field"] for warning in message["data"]["warnings"]] == ["top_a"]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1])
def test_without_a_draw_the_temperature_has_no_effect_and_the_answer_says_so(temperature):
    """As transformers, which clients that send both come from."""
    made = translated(temperature=temperature, do_sample=False)
    assert made.values["temperature"] == 0 and [one["field"] for one in made.warnings] == ["temperature"]


def test_the_same_said_twice_is_no_contradiction(server):
    for body in (
        {"max_tokens": 5, "max_new_tokens": 5, "num_predict": 5},
        {"stop": "a", "stop_sequences": ["a"]},
        {"temperature": 0, "do_sample": False},
        {"options": {"seed": 1}, "seed": 1},
        {"max_new_tokens": None},
        {"repeat_penalty": 1, "repetition_penalty": 1.2},
    ):
        translated(**body)
    body = {**HI, "max_completion_tokens": 2, "max_new_tokens": 2}
    assert server.post(CHAT, body).status_code == 200
    answer = server.post(CHAT, {**body, "max_tokens": None, "max_new_tokens": 3})
    assert answer.status_code == 400 and "max_new_tokens" in answer.text and "max_completion_tokens" in answer.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repeat_penalty", 0),
        ("repeat_penalty", "x"),
        ("max_new_tokens", 0),
        ("num_predict", 1.5),
        ("truncate", -7),
        ("truncation", "left"),
        ("num_return_sequences", 0),
        ("num_beams", 1000),
        ("do_sample", "yes"),
        ("mirostat", 3),
        ("format", "yaml"),
        ("grammar", {"type": "xml"}),
        ("grammar", {"type": "json_schema", "value": [1]}),
        ("grammar", {"type": ["json"], "value": {}}),
        ("random_seed", 2**64),
        ("stop_sequences", 5),
        ("options", 5),
        ("regex", 5),
    ],
)
def test_a_value_that_means_nothing_is_refused_under_the_name_it_came_by(server, name, value):
    answer = server.post(COMPLETIONS, {"prompt": "a", name: value})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name and name in answer.json()["error"]["message"], answer.text


def test_mapped_fields_do_what_ours_do(server):
    def ids(**more):
        answer = server.post(COMPLETIONS, {**TALE, **more})
        assert answer.status_code == 200 and "warnings" not in answer.json(), answer.text
        return answer.json()["choices"][0]["token_ids"]

    plain = ids()
    assert ids(max_tokens=None, max_new_tokens=2) == plain[:2]
    assert ids(temperature=None, do_sample=False) == plain
    assert ids(repeat_penalty=1e6) == ids(repetition_penalty=1e6) and len(set(ids(repeat_penalty=1e6))) == 4
    assert ids(num_beams=3) == ids(beam_width=3)
    assert ids(bad_words_ids=[[plain[0]]])[0] != plain[0]
    assert ids(options={"num_predict": 3}, max_tokens=None) == plain[:3]
    full = server.post(COMPLETIONS, {**TALE, "return_full_text": True}).json()["choices"][0]["text"]
    assert full.startswith(TALE["prompt"])
    long = server.post(COMPLETIONS, {"prompt": [5] * 1000, "n_predict": -1, "ignore_eos": True, "seed": 1}).json()
    assert long["usage"]["total_tokens"] == 1024
    pytest.importorskip("llguidance")
    for form in ({"guided_choice": ["yes", "no"]}, {"regex": "yes|no"}, {"ebnf": 'root ::= "yes" | "no"'}):
        answer = server.post(CHAT, {**HI, "max_tokens": 8, **form})
        assert answer.json()["choices"][0]["message"]["content"] in ("yes", "no"), answer.text
    assert (
        json.loads(
            server.post(CHAT, {**HI, "max_tokens": 9, "format": {"enum": [1]}}).json()["choices"][0]["message"][
                "content"
            ]
        )
        == 1
    )


@pytest.mark.parametrize(
    ("body", "received"),
    [
        ({"typical_p": 0.5}, ["typical_p"]),
        ({"typical_p": 1.0}, []),
        ({"mirostat_tau": 3.0}, ["mirostat_tau"]),
        ({"mirostat": 2}, ["mirostat", "mirostat_tau"]),
        ({"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1}, []),
        ({"mirostat": 1, "mirostat_tau": 5.0}, ["mirostat"]),
        ({"typical": 0.5}, ["typical", "typical_p"]),
        ({"guidance_scale": 1.5, "negative_prompt": "no"}, ["guidance_scale", "negative_prompt"]),
        ({"guidance_scale": 1, "negative_prompt": ""}, []),
        ({"length_penalty": 2.0}, ["length_penalty"]),
        ({"length_penalty": 1.0}, []),
        ({"early_stopping": True}, ["early_stopping"]),
        ({"length_penalty": 2.0, "beam_width": 2}, []),
        ({"length_penalty": 2.0, "num_beams": 2}, []),
    ],
)
def test_what_the_configured_engine_does_not_read_is_told_and_not_refused(server, body, received):
    """The server has the default sampler, which reads neither parameter."""
    answer = server.post(COMPLETIONS, {**TALE, **body})
    assert answer.status_code == 200, answer.text
    assert [w["field"] for w in answer.json().get("warnings", [])] == received


def test_an_engine_with_the_sampler_is_given_them():
    from minivllm.server.openai.fields import check

    reads = ["mirostat_tau", "mirostat_eta", "typical_p"]
    body = read(CompletionBody, {"prompt": "a", "mirostat": 2, "mirostat_eta": 0.2, "typical": 0.5})
    assert check(body, reads) == ({"mirostat_eta": 0.2, "mirostat_tau": 5.0, "typical_p": 0.5}, [])


def test_unknown_names_are_what_they_were():
    from minivllm.server.openai.fields import check

    with pytest.raises(ApiError, match="Did you mean 'temperature'"):
        check(read(ChatBody, {**HI, "temprature": 1}))
    assert [w["field"] for w in check(read(ChatBody, {**HI, "foo_bar": 1}))[1]] == ["foo_bar"]
    made = translated(options={"foo_bar": 1, "num_gpu": 2})
    assert sorted(w["field"] for w in made.warnings) == ["num_gpu", "options.foo_bar"]


def test_the_page_has_all_aliases_and_names_only_known_fields_without_effect():
    page = PAGE.read_text()
    for line in field_table.documented():
        assert line in page, line
    section = page.partition("Other known fields have no effect")[2].partition("\n\nA parameter that no")[0]
    named = [word for item in section.split("* ")[1:] for word in re.findall(r"`(\w+)`", item.partition("; ")[0])]
    known = {*field_table.names_of(field_table.IGNORED)}
    assert len(named) > 15 and set(named) - known <= {"min_tokens", "max_tokens"}


if __name__ == "__main__":
    print("\n".join(field_table.documented()))
