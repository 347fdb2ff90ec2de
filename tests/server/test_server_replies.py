"""Reasoning and calls in the formats of models, over HTTP: in messages, in streams, and in the usage."""

import json

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from scripted import scripted

from minivllm.config.server import ServerConfig
from minivllm.errors import ConfigError
from minivllm.plugins.parser.qwen3 import Qwen3Parser
from minivllm.runtime.replies import DescribedParser, ReplyContext, detect
from minivllm.server.openai import tools
from minivllm.server.openai.parsers import choose, with_reasoning
from minivllm.server.openai.reader import Reader
from minivllm.server.openai.tools import Tools

server = served(tool_parser="qwen3", engine={"batch_invariant": False, "max_num_seqs": 8})
CHAT = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"s": {"type": "string"}}}},
}
ASK = {"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 200}
CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "a } b"}}\n</tool_call>'
TEXT = f"<think>\nTwo and\nthree.\n</think>\n\nI look.\n{CALL}\n{CALL}"


def streamed(server, body):
    """Return the joined deltas of an answer: reasoning, content, calls, and the finish reason."""
    thought, reported, calls, reason, pieces = "", "", {}, None, 0
    for event in server.events(CHAT, {**body, "stream": True})[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            assert delta.get("reasoning") == delta.get("reasoning_content")
            thought += delta.get("reasoning") or ""
            reported += delta.get("content") or ""
            reason = choice["finish_reason"] or reason
            for call in delta.get("tool_calls", ()):
                pieces += 1
                calls.setdefault(call["index"], [call["function"].get("name"), ""])[1] += call["function"]["arguments"]
    return thought, reported, list(calls.values()), reason, pieces


def answers(server, text, **more):
    """Return the message, its finish reason and the usage of an answer, after a comparison with its stream."""
    with scripted(server, [text, text]):
        answer = server.post(CHAT, {**ASK, **more}).json()
        (choice,) = answer["choices"]
        message = choice["message"]
        thought, reported, calls, reason, _ = streamed(server, {**ASK, **more})
    assert thought == (message.get("reasoning") or "") and message.get("reasoning") == message.get("reasoning_content")
    assert reported.strip() == (message["content"] or "").strip() and reason == choice["finish_reason"]
    received = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    assert calls[: len(received)] == received
    return message, received, choice["finish_reason"], answer["usage"]


def test_reasoning_content_and_calls_are_members_of_a_message(server):
    message, calls, reason, usage = answers(server, TEXT, tools=[TOOL])
    assert message["reasoning"] == "Two and\nthree." and message["content"] == "I look."
    assert calls == [["f", '{"s": "a } b"}']] * 2 and reason == "tool_calls"
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < usage["completion_tokens"]


def test_arguments_are_streamed_as_they_come(server):
    with scripted(server, [TEXT]):
        *_, pieces = streamed(server, {**ASK, "tools": [TOOL]})
    assert pieces > 6


def test_reasoning_is_divided_without_tools_and_calls_are_text_then(server):
    message, calls, reason, _ = answers(server, TEXT)
    assert message["reasoning"] == "Two and\nthree." and message["content"].startswith("I look.\n<tool_call>")
    assert not calls and reason == "stop"
    plain, _, _, usage = answers(server, "Five.")
    assert "reasoning" not in plain and usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_client_may_leave_the_reasoning_out(server):
    message, calls, _, usage = answers(server, TEXT, tools=[TOOL], include_reasoning=False)
    assert "reasoning" not in message and "reasoning_content" not in message
    assert message["content"] == "I look." and len(calls) == 2
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


def test_an_answer_that_is_cut_has_no_part_of_a_call(server):
    seen = set()
    for most in range(2, 60, 3):
        message, calls, reason, _ = answers(server, TEXT, tools=[TOOL], max_tokens=most)
        assert reason == "length" and "tool_call" not in (message["content"] or "")
        assert all(json.loads(arguments) == {"s": "a } b"} for _, arguments in calls)
        seen.add(len(calls))
    assert seen >= {0}


def test_without_parallel_calls_the_answer_ends_behind_the_first(server):
    _, calls, reason, _ = answers(server, TEXT, tools=[TOOL], parallel_tool_calls=False)
    assert len(calls) == 1 and reason == "tool_calls"


def test_reasoning_that_the_prompt_opens_is_reasoning():
    context = ReplyContext(opened=Qwen3Parser().opens("<|im_start|>assistant\n<think>\n"))
    reader = Reader(Tools([], "auto"), Qwen3Parser(), context=context)
    reader.deltas(f"So five.\n</think>\n\nFive.{CALL}", "stop")
    message = reader.message()
    assert message["reasoning"] == "So five." and message["content"] == "Five." and len(message["tool_calls"]) == 1


def test_a_parser_is_chosen_by_name_or_by_what_the_template_prints():
    for name, texts in (
        ("gpt_oss", ["<|start|>", "<|channel|>analysis<|message|>"]),
        ("gemma", ["<|tool_call>call:"]),
        ("deepseek_r1", ["<｜tool▁call▁begin｜>", "\n```json\n"]),
        ("deepseek_v31", ["<｜tool▁call▁begin｜>"]),
        ("glm4", ["<tool_call>", "<arg_key>", "<think>"]),
        ("qwen3_coder", ["<tool_call>\n<function="]),
        ("mistral", ["[TOOL_CALLS]["]),
        ("qwen3", ["<tool_call>", "</think>"]),
        ("hermes", ["\n<tool_call>\n"]),
        ("llama3_json", ["<|python_tag|>"]),
        ("pythonic", ["<|python_start|>"]),
        ("qwen3", ["</think>"]),
        ("hermes", []),
    ):
        chosen, reason = detect(texts)
        assert chosen == name and reason
    assert detect([], r'{"fields": {"tool_calls": {"open_pattern": "<\\|tool_call>call:"}}}')[0] == "gemma"
    assert detect(["<tool_call>"], '{"open": "<function="}')[0] == "qwen3_coder"
    assert choose(ServerConfig(tool_parser="glm4"), None).name == "glm4"
    assert choose(ServerConfig(), None).name == "hermes"
    assert choose(ServerConfig(tool_parser="glm45"), None).parser.tags()[:1] == ("<think>",)
    for option in ("tool_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match="Did you mean 'qwen3'"):
            choose(ServerConfig(**{option: "qwen33"}), None)


def test_reasoning_of_one_format_is_combined_with_calls_of_another():
    both = choose(ServerConfig(tool_parser="hermes", reasoning_parser="deepseek_r1"), None)
    assert isinstance(both.parser, DescribedParser) and both.parser.thinks()
    assert both.parser.format.reasoning == Qwen3Parser.format.reasoning
    assert set(both.parser.tags()) == set(Qwen3Parser.format.tags)
    same = choose(ServerConfig(tool_parser="qwen3_coder", reasoning_parser="qwen3"), None)
    assert type(same.parser).__name__ == "Qwen3Coder"
    with pytest.raises(ConfigError, match="does not fit tool_parser='mistral'"):
        choose(ServerConfig(tool_parser="mistral", reasoning_parser="qwen3"), None)
    assert with_reasoning(same.parser, "a", same.parser, "a") is same.parser


def test_a_registered_parser_class_has_no_reasoning_parser(monkeypatch):
    monkeypatch.setitem(tools.PARSERS, "own", Reader)
    with pytest.raises(ConfigError, match="leave reasoning_parser out"):
        choose(ServerConfig(tool_parser="own", reasoning_parser="qwen3"), None)
    assert choose(ServerConfig(tool_parser="own"), None)
