"""Calls of tools in an answer: their arguments as the model wrote them, and the rest of a call that is cut."""

import json

import pytest

pytest.importorskip("fastapi")

from http_helpers import served

from minivllm.plugins.parser.hermes import Hermes as HermesParser
from minivllm.plugins.parser.json import Json as JsonParser
from minivllm.server.openai.calls import Begun, Ended, Forced, NamedCall, Said, ToolCall, Written
from minivllm.server.openai.reader import Reader, end_of_calls
from minivllm.server.openai.tools import Tools

Hermes, Json = HermesParser(), JsonParser()
server = served(engine={"batch_invariant": False, "max_num_seqs": 8})
CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0}


def function(name, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


LONG = function("fill", text={"type": "string", "minLength": 10, "maxLength": 16}, n={"enum": [1, 2]})
ADD = function("add", a={"type": "integer", "minimum": 0, "maximum": 9}, b={"enum": [1, 2]})
PAIR = function("pair", list={"type": "array", "items": {"enum": ["}", "]", '"', "\\"]}, "minItems": 3, "maxItems": 3})
NAMED = {"type": "function", "function": {"name": "fill"}}


def cut(text, size):
    return [text[i : i + size] for i in range(0, len(text), size)] or [""]


def read(choice, pieces, reason, parser=Hermes, **more):
    """(the message, the deltas put together) of an answer that comes in pieces."""
    requested = Tools([], choice, **more)
    streamed, whole = Reader(requested, parser), Reader(requested, parser)
    reported, calls = "", {}
    for number, piece in enumerate(pieces):
        delta = streamed.deltas(piece, reason if number == len(pieces) - 1 else None)
        reported += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            name, arguments = call["function"].get("name"), call["function"]["arguments"]
            assert ("id" in call) == (call["index"] not in calls) == (name is not None)
            before = calls.setdefault(call["index"], [name, ""])
            before[1] += arguments
    whole.deltas("".join(pieces), reason)
    message = whole.message()
    received = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls", ())]
    kept = [[c["function"]["name"], c["function"]["arguments"]] for c in streamed.message().get("tool_calls", ())]
    assert received == kept and whole.reason(reason) == streamed.reason(reason)
    return (message["content"], received, whole.reason(reason)), (reported, [calls[i] for i in sorted(calls)])


WRITTEN = [
    '{"x":[1,"}"]}',
    '{ "a" : 1.0e2,\n "\\u00e9": "é\\ud83d" }',
    "{}",
    '{"q":"\\"}]\\\\"}',
    '{"deep":[[{"a":[]}]]}',
]


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_arguments_are_given_as_they_were_written_however_the_text_is_cut(size):
    want = [["f", text] for text in WRITTEN]
    listed = "[" + ",".join(f'{{"name":"f","arguments":{text}}}' for text in WRITTEN) + "]"
    for parser, choice, text in (
        (None, "required", listed),
        (None, "required", listed.replace('{"name":"f","arguments":', ' { "name" : "f" , "arguments" : ')),
        (Json, "auto", listed),
        (Hermes, "auto", "\n".join(f'<tool_call>\n{{"name": "f", "arguments": {t}}}\n</tool_call>' for t in WRITTEN)),
    ):
        whole, streamed = read(choice, cut(text, size), "stop", parser)
        assert whole == (None, want, "tool_calls") and streamed == ("", want)
    for text in WRITTEN:
        whole, streamed = read("named", cut(text, size), "stop", function="f")
        assert whole == (None, [["f", text]], "stop") and streamed == ("", [["f", text]])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_at_every_place_where_an_answer_may_be_cut_no_part_of_a_call_is_text(size):
    """Whole calls are kept.  A stream also has the received part of the last call."""
    one, two = WRITTEN[0], WRITTEN[3]
    calls = [f'{{"name":"f","arguments":{text}}}' for text in (one, two)]
    tagged = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    for choice, parser, text, ends in (
        ("required", None, "[" + ",".join(calls) + "]", [1 + len(calls[0]), 2 + len(calls[0] + calls[1])]),
        ("auto", Json, "[" + ",".join(calls) + "]", [len(calls[0]), 1 + len(calls[0] + calls[1])]),
        (
            "auto",
            Hermes,
            "".join(tagged),
            [len(tagged[0]) - 14, len("".join(tagged)) - 14],
        ),
        ("named", None, one, [len(one)]),
    ):
        for at in range(1, len(text) + 1):
            whole, streamed = read(choice, cut(text[:at], size), "length", parser, function="f")
            count = sum(at >= end for end in ends)
            tag = parser is Hermes and any(0 < at - begin < len("<tool_call>") for begin in (0, len(tagged[0])))
            assert whole[1:] == ([["f", one], ["f", two]][:count], "length"), text[:at]
            if not tag:  # which may yet be a word like another
                assert not whole[0] and streamed[0] == "", text[:at]
            for name, arguments in streamed[1][count:]:
                assert name == "f" and (two if count else one).startswith(arguments)


# ---- calls that are no others ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_required_call_is_given_once_however_often_the_model_repeats_it(size):
    one, two = ("f", '{"x":[1,"}"]}'), ("f", '{"x":[1,2]}')
    for made in ([one, one], [one, two, one, one], [one, ("g", one[1]), two, two]):
        text = "[" + ",".join(f'{{"name":"{name}","arguments":{arguments}}}' for name, arguments in made) + "]"
        want = [list(call) for call in dict.fromkeys(made)]
        whole, streamed = read("required", cut(text, size), "stop", None)
        assert whole == (None, want, "tool_calls") and streamed == ("", want)
        ended = end_of_calls(Tools([], "required"), None)
        ends = [ended(0, piece) for piece in cut(text, size)]
        first = next(i for i in range(len(made)) if made[i] in made[:i])
        received = "".join(cut(text, size)[: ends.index(True) + 1])
        assert received.count('"name"') >= first + 1 and (size > 7 or received.count('"name"') == first + 1)
        assert not any(ended(1, piece) for piece in cut(text, size)[: ends.index(True)])  # each branch has its own


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_without_parallel_calls_an_answer_is_one_call_at_most(size):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for text, reported in ((f"So: {call}\n{call} and {call}", "So: "), (f"{call}<tool_call>", ""), (call, "")):
        whole, streamed = read("auto", cut(text, size), "stop", parallel=False)
        assert whole == (reported.strip() or None, [["f", '{"a": 1}']], "tool_calls")
        assert streamed == (reported, [["f", '{"a": 1}']])
        ended = end_of_calls(Tools([], "auto", parallel=False), Hermes)
        assert [ended(0, piece) for piece in cut(text, size)].count(True) >= 1
    listed = '[{"name":"f","arguments":{"a":1}},{"name":"g","arguments":{}}]'
    assert read("auto", cut(listed, size), "stop", Json, parallel=False)[0] == (None, [["f", '{"a":1}']], "tool_calls")
    assert end_of_calls(Tools([], "auto"), Hermes) is end_of_calls(Tools([], "none", parallel=False), Hermes) is None
    only = end_of_calls(Tools([], "auto", parallel=False, only=frozenset({"g"})), Hermes)
    assert not only(0, call) and only(0, call.replace('"f"', '"g"'))


def test_a_model_that_must_call_and_repeats_itself_ends_with_its_calls(server):
    pytest.importorskip("llguidance")
    small = function("add", a={"type": "integer", "minimum": 0, "maximum": 9})
    body = {**ASK, "tools": [small], "tool_choice": "required", "max_tokens": 300}
    answer = server.post(CHAT, body).json()
    (choice,) = answer["choices"]
    received = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
    assert choice["finish_reason"] == "tool_calls" and len(set(received)) == len(received)
    assert answer["usage"]["completion_tokens"] < 300
    _, calls, reasons, _ = streamed(server, body)
    assert [tuple(call) for call in calls] == received and reasons == ["tool_calls"]
    several = server.post(CHAT, {**body, "n": 3, "temperature": 1, "seed": 2}).json()["choices"]
    for choice in several:
        received = [c["function"]["arguments"] for c in choice["message"].get("tool_calls", ())]
        assert len(set(received)) == len(received)


def test_text_that_only_looks_like_a_call_is_kept_when_it_is_cut():
    for parser, text in (
        (Json, '{"name": "Anna", "age": 3'),
        (Json, '["a", {"na'),
        (Json, "plain { text"),
        (Json, '{"answer": [1, 2'),
        (Hermes, "a < b"),
        (Hermes, "see <tool_call>no JSON at"),
        (Hermes, '{"name": "f"'),
        (None, '[{"name":'),
    ):
        choice = "none" if parser is None else "auto"
        for size in (1, 100):
            assert read(choice, cut(text, size), "length", parser)[0] == (text, [], "length")
    before = 'I look.<tool_call>\n{"name": "f", "argu'
    assert read("auto", cut(before, 4), "length")[0] == ("I look.", [], "length")


def test_a_parser_without_a_word_on_cuts_is_told_of_the_end_as_before():
    class Own:
        def feed(self, text, final):
            return [Said(f"{text}|{final}")]

    assert read("auto", ["a", "b"], "length", Own)[1][0] == "a|Falseb|True"


def test_pieces_of_forced_calls_name_each_call_once_and_say_when_it_is_whole():
    parser = Forced()
    found = [
        one
        for piece in cut('[{"name":"f","arguments":{"a":1}},{"name":"g","arguments":[', 2)
        for one in parser.feed(piece, False)
    ]
    kinds = [type(one) for one in found if not isinstance(one, Written)]
    assert kinds == [Begun, Ended, Begun] and [one.name for one in found if isinstance(one, Begun)] == ["f", "g"]
    assert Ended() not in NamedCall("f").feed('{"a":', True) and isinstance(NamedCall("f").feed("", True)[0], Begun)
    assert ToolCall("f", "{}").id != ToolCall("f", "{}").id


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def streamed(server, body):
    reported, calls, reasons, pieces = "", {}, [], 0
    for event in server.events(CHAT, body)[:-1]:
        (choice,) = event["choices"]
        reported += choice["delta"].get("content") or ""
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for call in choice["delta"].get("tool_calls", ()):
            pieces += 1
            calls.setdefault(call["index"], [call["function"].get("name"), ""])[1] += call["function"]["arguments"]
    return reported, [calls[i] for i in sorted(calls)], reasons, pieces


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call_that_is_cut_has_no_half_of_it_in_the_message(server, choice):
    pytest.importorskip("llguidance")
    body = {**ASK, "tools": [LONG], "tool_choice": choice, "parallel_tool_calls": False}
    whole = server.post(CHAT, {**body, "max_tokens": 90}).json()
    total = whole["usage"]["completion_tokens"]
    want = whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    reported, calls, _, pieces = streamed(server, {**body, "max_tokens": 90})
    assert (reported, calls) == ("", [["fill", want]]) and pieces > 2 and set(json.loads(want)) == {"text", "n"}
    for most in (1, total // 3, total // 2):
        answer = server.post(CHAT, {**body, "max_tokens": most}).json()["choices"][0]
        assert answer["finish_reason"] == "length"
        assert not answer["message"]["content"] and "tool_calls" not in answer["message"]
        reported, calls, reasons, _ = streamed(server, {**body, "max_tokens": most})
        assert reported == "" and reasons == ["length"]
        assert all(want.startswith(arguments) for _, arguments in calls)


def test_whole_calls_of_a_list_that_is_cut_are_kept(server):
    pytest.importorskip("llguidance")
    body = {**ASK, "tools": [ADD, PAIR], "tool_choice": "required", "temperature": 1.3}
    kept = 0
    for seed in range(12):
        answer = server.post(CHAT, {**body, "seed": seed, "max_tokens": 75}).json()["choices"][0]
        calls = answer["message"].get("tool_calls", [])
        received = [[c["function"]["name"], c["function"]["arguments"]] for c in calls]
        reported, got, reasons, _ = streamed(server, {**body, "seed": seed, "max_tokens": 75})
        assert not answer["message"]["content"] and not reported and reasons == [answer["finish_reason"]]
        assert got[: len(received)] == received and len(got) <= len(received) + 1
        for name, arguments in received:
            assert set(json.loads(arguments)) == ({"a", "b"} if name == "add" else {"list"})
        kept += answer["finish_reason"] == "length" and len(received) > 0
        assert answer["finish_reason"] == "length" or (
            len(got) == len(received) and answer["finish_reason"] == "tool_calls"
        )
    assert kept, "no answer was cut behind a whole call: nothing was tried"


# ---- a part of the tools ---------------------------------------------------------------------------------------------


def only(mode, *names):
    inner = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in names]}
    return {"type": "allowed_tools", "allowed_tools": inner}


def test_allowed_tools_are_the_only_ones_that_are_shown_and_called(server):
    pytest.importorskip("llguidance")
    body = {**ASK, "tools": [ADD, LONG, PAIR], "max_tokens": 30}
    spread = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "pair"}]}
    for choice in (only("required", "pair"), spread):
        for seed in range(2):
            answer = server.post(CHAT, {**body, "tool_choice": choice, "seed": seed, "temperature": 1}).json()
            calls = answer["choices"][0]["message"].get("tool_calls", [])
            assert {call["function"]["name"] for call in calls} <= {"pair"}
    count = {}
    for name, choice in (("all", "auto"), ("two", only("auto", "add", "pair")), ("one", only("auto", "add"))):
        requested = {**body, "tool_choice": choice, "max_tokens": 1}
        count[name] = server.post(CHAT, requested).json()["usage"]["prompt_tokens"]
    one = server.post(CHAT, {**body, "tools": [ADD], "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    assert count["all"] > count["two"] > count["one"] == one
    hidden = '{"name": "fill", "arguments": {}}'
    message, _ = read("auto", [hidden], "stop", Json, only=frozenset({"add"}))
    assert message[1:] == ([], "stop") and "fill" in message[0]


@pytest.mark.parametrize(
    ("choice", "word"),
    [
        (only("maybe", "add"), "mode"),
        (only("auto"), "tools"),
        (only("auto", "nobody"), "does not have the name of a function"),
        ({"type": "allowed_tools"}, "mode"),
        ({"type": "allowed_tools", "allowed_tools": []}, "mode"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["add"]}},
            "does not have the name of a function",
        ),
    ],
)
def test_an_allowed_part_that_is_malformed_is_refused_by_name(server, choice, word):
    answer = server.post(CHAT, {**ASK, "tools": [ADD], "tool_choice": choice})
    assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["param"] == "tool_choice"
