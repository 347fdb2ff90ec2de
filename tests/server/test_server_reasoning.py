"""Options of reasoning become variables of the chat template; reasoning of earlier answers reaches it."""

import pytest

pytest.importorskip("fastapi")

from chat_templates import DEEPSEEK, GPT_OSS, QWEN3
from http_helpers import served
from scripted import scripted

from minivllm.runtime.text.marks import Marks
from minivllm.runtime.text.messages import check_messages, fit
from minivllm.runtime.text.template import ChatTemplate
from minivllm.server.errors import ApiError
from minivllm.server.openai.bodies import ChatBody, read
from minivllm.server.openai.calls import Said, Thought
from minivllm.server.openai.parsers import reasoning_tokens
from minivllm.server.openai.reader import Reader
from minivllm.server.openai.reasoning import shows_reasoning, template_variables, warn_unread
from minivllm.server.openai.tools import Tools

server = served(engine={"chat_template": QWEN3 + "{{ reasoning_effort | default('') }}"})
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
QWEN, GPT, BOTH = ["enable_thinking"], ["reasoning_effort"], ["enable_thinking", "thinking", "reasoning_effort"]


def variables(read_by_template, **body):
    """The variables of the template, and the fields of the warnings."""
    warnings = []
    found = template_variables(read(ChatBody, {**HI, **body}), read_by_template, warnings)
    return found, [warning["field"] for warning in warnings]


CASES = [
    (QWEN, {}, None, []),
    (QWEN, {"reasoning_effort": "none"}, {"enable_thinking": False}, []),
    (QWEN, {"reasoning_effort": "high"}, {"enable_thinking": True}, ["reasoning_effort"]),
    (QWEN, {"enable_thinking": True}, {"enable_thinking": True}, []),
    (QWEN, {"think": False}, {"enable_thinking": False}, []),
    (QWEN, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}, []),
    (QWEN, {"reasoning": {"enabled": False}}, {"enable_thinking": False}, []),
    (GPT, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}, []),
    (GPT, {"reasoning": {"effort": "xhigh"}}, {"reasoning_effort": "xhigh"}, []),
    (GPT, {"think": "medium"}, {"reasoning_effort": "medium"}, []),
    (GPT, {"think": False}, {"reasoning_effort": "none"}, []),
    (GPT, {"think": True}, None, ["think"]),
    (BOTH, {"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}, []),
    (BOTH, {"thinking": True}, {"enable_thinking": True, "thinking": True}, []),
    ([], {"reasoning_effort": "none"}, None, ["reasoning_effort"]),
    ([], {"think": "low", "enable_thinking": True}, None, ["enable_thinking", "think"]),
]


@pytest.mark.parametrize("template,body,want,warned", CASES)
def test_options_become_the_variables_that_the_template_reads(template, body, want, warned):
    assert variables(template, **body) == (want, warned)


def test_variables_of_the_client_take_precedence():
    own = {"enable_thinking": True, "x": 1}
    assert variables(QWEN, reasoning_effort="none", chat_template_kwargs=own) == (own, [])
    both = {"reasoning_effort": "low", "x": 1}
    assert variables(GPT, reasoning_effort="low", chat_template_kwargs={"x": 1}) == (both, [])
    assert variables(GPT, reasoning_effort="low", chat_template_kwargs=[1]) == ([1], [])  # refused later


WRONG = [
    ({"reasoning_effort": "most"}, "reasoning_effort='most': expected none, minimal, low, medium, high, xhigh"),
    ({"reasoning_effort": 3}, "reasoning_effort=3: expected none"),
    ({"reasoning": {"effort": ["low"]}}, "reasoning.effort=.*: expected none"),
    ({"reasoning": "low"}, "reasoning='low': expected an object with effort, enabled"),
    ({"reasoning": {"enabled": 1}}, "reasoning.enabled=1: expected true or false"),
    ({"thinking": {"type": "on"}}, "thinking.type='on': expected enabled, adaptive, disabled"),
    ({"thinking": {"type": []}}, r"thinking.type=\[\]: expected enabled"),
    ({"thinking": "yes"}, "thinking='yes': expected true, false or an object with type"),
    ({"think": "most"}, "think='most': expected none"),
    ({"think": 1}, "think=1: expected true or false"),
    ({"think": {"a": 1}}, r"think=\{'a': 1\}: expected true or false"),
    ({"reasoning_effort": "none", "think": True}, "think and reasoning_effort contradict each other"),
    ({"reasoning_effort": "low", "think": "high"}, "reasoning_effort and think contradict each other"),
]


@pytest.mark.parametrize("body,text", WRONG)
def test_wrong_options_are_refused(body, text):
    with pytest.raises(ApiError, match=text):
        variables(BOTH, **body)


def test_unread_keys_are_warned_of():
    warnings = []
    body = read(ChatBody, {**HI, "reasoning": {"effort": "low", "summary": "auto", "x": None}, "thinking": {"y": 1}})
    warn_unread(body, warnings)
    assert [warning["field"] for warning in warnings] == ["reasoning.summary", "thinking.y"]


def test_the_reasoning_can_be_left_out():
    class Parser:
        def feed(self, text, final):
            return [Thought("hm"), Said("yes")]

    for body, shown in (({}, True), ({"include_reasoning": False}, False), ({"reasoning": {"exclude": True}}, False)):
        assert shows_reasoning(read(ChatBody, {**HI, **body})) is shown
        reader = Reader(Tools([], "auto"), Parser, shows_reasoning=shown)
        delta = reader.deltas("x", "stop")
        thought = {"reasoning": "hm", "reasoning_content": "hm"} if shown else {}
        assert delta == thought | {"content": "yes"}
        assert ("reasoning" in reader.message()) is shown


@pytest.mark.parametrize(
    "body,text",
    [
        ({"reasoning": {"exclude": 1}}, "reasoning.exclude=1: expected true or false"),
        ({"reasoning": {"exclude": True}, "include_reasoning": True}, "contradict each other"),
        ({"reasoning": {"exclude": False}, "include_reasoning": False}, "contradict each other"),
    ],
)
def test_showing_and_hiding_the_reasoning_contradict_each_other(body, text):
    with pytest.raises(ApiError, match=text):
        shows_reasoning(read(ChatBody, {**HI, **body}))
    assert shows_reasoning(read(ChatBody, {**HI, "reasoning": {"exclude": False}, "include_reasoning": True}))


@pytest.mark.parametrize("opened,ids,count", [
    (False, [1, 2, 5, 3, 9, 9, 2, 5, 5, 3, 9], 7),  # the tags count
    (True, [5, 5, 3, 9, 2, 5, 3, 9], 6),
    (False, [9, 2, 5, 5], 2),  # without an end, by the share of the text
    (False, [9, 3, 9], 0),
])  # fmt: skip
def test_the_tokens_of_all_blocks_of_reasoning_count(opened, ids, count):
    marks = Marks({2: "a", 3: "b"}, {"<think>": "a", "</think>": "b"})
    assert reasoning_tokens(ids, marks, ("<think>", "</think>"), 0.5, opened) == count


def test_the_prompt_has_the_options(server):
    closed = "<think>\n\n</think>"
    for body, end in (
        ({}, "assistant\n"),
        ({"reasoning_effort": "none"}, f"assistant\n{closed}\n\nnone"),
        ({"reasoning_effort": "high"}, "assistant\nhigh"),
        ({"think": False}, f"assistant\n{closed}\n\nnone"),
        ({"think": False, "chat_template_kwargs": {"enable_thinking": True}}, "assistant\nnone"),
    ):
        with scripted(server, ["yes"]) as script:
            answer = server.post(CHAT, {**HI, **body})
        assert answer.status_code == 200, answer.text
        assert script.prompts[0].endswith(end), body
        assert "warnings" not in answer.json()
    assert server.post(CHAT, {**HI, "reasoning_effort": "most"}).json()["error"]["param"] == "reasoning_effort"
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "reasoning_effort": "low"}).json()
    assert [warning["field"] for warning in answer["warnings"]] == ["reasoning_effort"]


# ---- a budget of reasoning -------------------------------------------------------------------------------------------

TAGS = {"start": [50], "end": [100, 101]}


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "reasoning_budget"])
def test_a_budget_ends_the_reasoning(server, name):
    ask = {"prompt": [10, 50, 12], "max_tokens": 9, "seed": 3, "return_token_ids": True, "thinking_tags": TAGS}
    ids = server.post("/v1/completions", {**ask, name: 4}).json()["choices"][0]["token_ids"]
    free = server.post("/v1/completions", {**ask, name: -1}).json()["choices"][0]["token_ids"]
    assert ids[:4] == free[:4] and ids[4:6] == TAGS["end"] != free[4:6] and len(ids) == 9


@pytest.mark.parametrize("budget", [{"reasoning": {"max_tokens": 2}}, {"thinking": {"budget_tokens": 2}}])
def test_a_chat_has_a_budget_and_a_form_behind_it(server, budget):
    pytest.importorskip("llguidance")
    tags = {"start": "assistant\n", "end": TAGS["end"]}  # the template opens the reasoning
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    ask = {**HI, "chat_template_kwargs": {}, "max_tokens": 20, "return_token_ids": True, "thinking_tags": tags}
    choice = server.post(CHAT, {**ask, **form, **budget}).json()["choices"][0]
    assert choice["token_ids"][2:4] == TAGS["end"] and choice["finish_reason"] == "stop"
    assert choice["message"]["content"].endswith(("yes", "no")) and len(choice["message"]["content"]) > 3


BUDGETS = [
    ({"thinking_token_budget": 3}, "thinking_token_budget", "has no tags of reasoning, such as <think> and </think>"),
    ({"thinking_budget": -2}, "thinking_budget", "expected a whole number from 0, or -1"),
    ({"thinking_tags": {"start": [1]}}, "thinking_tags", "has no tags of reasoning"),
    ({"thinking_tags": {"start": [1], "end": [99999]}, "thinking_token_budget": 1}, "thinking_tags", "vocabulary of"),
    ({"thinking_token_budget": 3, "thinking": {"budget_tokens": 4}}, "thinking.budget_tokens", "contradict each other"),
]


@pytest.mark.parametrize("body,param,text", BUDGETS)
def test_wrong_budgets_are_refused(server, body, param, text):
    answer = server.post(CHAT, {**HI, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param and text in answer.json()["error"]["message"]


# ---- reasoning of earlier answers ------------------------------------------------------------------------------------

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def prompt(source, *more):
    """The text that a template makes of a conversation."""
    template = ChatTemplate(source)
    chat = fit(check_messages([{"role": "user", "content": "q"}, *more]), template.facts)
    return template.render({"messages": chat, "add_generation_prompt": True, "bos_token": ""})


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_of_a_call_reaches_the_template(name):
    answer = {"role": "assistant", "content": "I look.", name: "hmm", "tool_calls": [CALL]}
    result = {"role": "tool", "tool_call_id": "c", "content": "5"}
    assert "<think>\nhmm\n</think>\n\nI look.\n<tool_call>" in prompt(QWEN3, answer, result)
    # gpt-oss refuses two texts with a call, so the text for the user becomes the end of the reasoning
    analysis = "<|start|>assistant<|channel|>analysis<|message|>"
    assert f"{analysis}hmm\n\nI look.<|end|>" in prompt(GPT_OSS, answer, result)
    for content in ("", None):
        silent = {**answer, "content": content}
        assert f"{analysis}hmm<|end|>" in prompt(GPT_OSS, silent, result)
        assert "hmm" in prompt(QWEN3, silent, result)
    assert "hmm" not in prompt(DEEPSEEK, answer, result)  # it never shows earlier reasoning
    parts = {**answer, "content": [{"type": "text", "text": "I"}, {"type": "text", "text": "look."}]}
    assert f"{analysis}hmm\n\nI\nlook.<|end|>" in prompt(GPT_OSS, parts, result)


def test_reasoning_of_an_answer_is_omitted_as_the_template_does():
    answer = {"role": "assistant", "content": "5", "reasoning": "hmm"}
    again = {"role": "user", "content": "why"}
    for source in (QWEN3, DEEPSEEK, GPT_OSS):
        text = prompt(source, answer, again)
        assert "5" in text and "hmm" not in text
