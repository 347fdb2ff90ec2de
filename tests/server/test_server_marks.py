"""A parser with tags gets marks for tag tokens.  Text that spells a tag stays text, and no mark reaches a client."""

import json

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from scripted import scripted

from minivllm.runtime.text import detokenize
from minivllm.server.openai import tools
from minivllm.server.openai.calls import Said, Thought

server = served(tool_parser="stand-in")
CHAT = "/v1/chat/completions"
ASK = {
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
TAGS = ("<think>", "</think>", "<other>")


class StandIn:
    """A parser of reasoning between two tags.  It leaves a mark that it does not expect in the text."""

    made = []

    @staticmethod
    def tags():
        return TAGS

    def __init__(self, marks):
        self.made.append(marks)
        self.marks = marks
        self.thinks = False

    def feed(self, text, final):
        found = []
        for char in text:
            if char == self.marks["<think>"]:
                self.thinks = True
            elif self.thinks and char == self.marks["</think>"]:
                self.thinks = False
            else:
                found.append(Thought(char) if self.thinks else Said(char))
        return found


@pytest.fixture(scope="module", autouse=True)
def tagged(server):
    """Register the parser, and add its tags to the tokenizer of the server."""
    from tokenizers import AddedToken

    tokenizer = server.app.service.tokens.tokenizer
    backend = tokenizer.backend
    detokenize._schemes.pop(tokenizer, None)
    for owner in (tokenizer, tokenizer.plugin, tokenizer.plugin._inner):
        for name in ("added_tokens", "special_ids"):
            owner.__dict__.pop(name, None)
    backend.add_special_tokens([AddedToken("</think>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tools.register("stand-in", StandIn)
    yield tokenizer
    del tools.PARSERS["stand-in"]


def message_of(server, script, **more):
    """Return the message of an answer, and the joined deltas of the same answer as a stream."""
    with scripted(server, [script, script]):
        answer = server.post(CHAT, {**ASK, **more})
        assert answer.status_code == 200, answer.text
        events = server.events(CHAT, {**ASK, **more})
    assert "\\udc" not in answer.text.lower() and "\\udc" not in json.dumps(events).lower()
    joined = {}
    for event in events[:-1]:
        for name, text in event["choices"][0]["delta"].items():
            joined[name] = joined.get(name, "") + text
    return answer.json()["choices"][0], joined


def test_tag_tokens_are_marks_and_spelled_tags_are_text(server, tagged):
    begin, end = tagged.token_id("<think>"), tagged.token_id("</think>")
    other = [tagged.token_id(char) for char in "<think>"]  # the tag as ordinary tokens
    assert None not in other
    script = [begin, "I quote ", *other, " é", end, "\n5", end, "!"]
    choice, joined = message_of(server, script, return_token_ids=True)
    message = choice["message"]
    assert message["reasoning"] == joined["reasoning"] == "I quote <think> é"
    assert message["content"] == joined["content"] == "\n5</think>!"
    assert {begin, end} <= set(choice["token_ids"])
    assert StandIn.made[-1] == {"<think>": "\udc80", "</think>": "\udc81"}


@pytest.mark.parametrize("stop", ["</think>", "é</th"])
def test_a_stop_string_finds_a_tag(server, tagged, stop):
    script = [tagged.token_id("<think>"), "a é", tagged.token_id("</think>"), "5"]
    choice, joined = message_of(server, script, stop=[stop])
    assert choice["stop_reason"] == stop and choice["finish_reason"] == "stop"
    want = "a é" if stop == "</think>" else "a "
    assert choice["message"]["reasoning"] == joined["reasoning"] == want
    assert not choice["message"]["content"]


def test_text_that_no_parser_reads_has_no_marks(server, tagged):
    script = [tagged.token_id("<think>"), "a", tagged.token_id("</think>"), "5"]
    choice, joined = message_of(server, script, tool_choice="none")
    assert choice["message"]["content"] == joined["content"] == "<think>a5"
    with scripted(server, [script]):
        answer = server.post("/v1/completions", {"prompt": "x"}).json()
    assert answer["choices"][0]["text"] == "<think>a5"
