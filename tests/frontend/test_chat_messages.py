"""Messages as clients send them become the prompt that transformers makes of the same messages."""

import copy
import json
import random

import pytest

pytest.importorskip("tokenizers")

from chat_templates import CHATML, GEMMA3, HERMES_TOOLS, QWEN3, QWEN25, RAG, TEMPLATES
from literal_models import byte_level

from minivllm.errors import ConfigError, ModelError, RequestError
from minivllm.runtime.text.template import ChatTemplate
from minivllm.runtime.text.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TOOL = {
    "type": "function",
    "function": {
        "name": "add", "description": "adds é",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}  # fmt: skip
ASK = [{"role": "user", "content": "hello"}]


def save(folder, template, **files):
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(SPECIAL).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text))
    return folder


def theirs_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


# ---- conversations as clients send them ------------------------------------------------------------------------------


def drawn_content(draw, texts):
    kind = draw.choice(["text", "text", "empty", "parts", "openai", "null", "absent", "string parts"])
    if kind == "text":
        return {"content": draw.choice(texts)}
    if kind == "empty":
        return {"content": ""}
    if kind == "parts":
        return {"content": [{"type": "text", "text": draw.choice(texts)} for _ in range(draw.randint(1, 3))]}
    if kind == "openai":
        return {"content": [{"type": "input_text", "text": draw.choice(texts), "annotations": None}]}
    if kind == "string parts":
        return {"content": [draw.choice(texts)]}
    return {"content": None} if kind == "null" else {}


def drawn_call(draw, number):
    arguments = draw.choice([{}, {"a": 1}, {"a": {"b": [1, "é"]}, "c": True}, {"text": 'quo"te'}])
    form = draw.choice(["json", "compact", "mapping", "mapping", "null"])
    given = {
        "json": json.dumps(arguments),
        "compact": json.dumps(arguments, separators=(",", ":"), ensure_ascii=False),
        "mapping": arguments,
        "null": None,
    }[form]
    call = {"function": {"name": draw.choice(["add", "f.g", "h-1"]), "arguments": given}}
    call["id"] = draw.choice([f"call{number:05}", f"call{number:05}", None])
    call["type"] = draw.choice(["function", "function", None])
    return {key: value for key, value in call.items() if value is not None or draw.random() < 0.5}


def drawn_chat(draw):
    texts = ["hello", " spaced ", '<b>&"é" 日本', "two\nlines", "a</think>b", "1"]
    chat = []
    if draw.random() < 0.6:
        chat.append({"role": draw.choice(["system", "system", "developer"]), "content": draw.choice(texts)})
    for turn in range(draw.randint(1, 3)):
        chat.append({"role": "user", **drawn_content(draw, texts)})
        while chat[-1].get("content") is None:
            chat[-1].update(drawn_content(draw, texts))
        answer = {"role": "assistant", **drawn_content(draw, texts)}
        kind = draw.choice(["none", "absent", "empty", "one", "one", "several"])
        count = {"one": 1, "several": 2}.get(kind, 0)
        calls = [drawn_call(draw, 10 * turn + n) for n in range(count)]
        answer |= {"none": {"tool_calls": None}, "absent": {}, "empty": {"tool_calls": []}}.get(
            kind, {"tool_calls": calls}
        )
        for key in ("refusal", "audio", "function_call", "name", "annotations"):
            if draw.random() < 0.3:
                answer[key] = None
        if draw.random() < 0.3:
            answer["reasoning_content"] = draw.choice(["so it is", None])
        chat.append(answer)
        for call in calls:
            named = {"tool_call_id": call.get("id"), "name": draw.choice(["add", None])}
            chat.append({"role": "tool", **drawn_content(draw, texts), **named})
    chat.append({"role": "user", "content": "and now?", "name": draw.choice(["Ann", None])})
    return chat


def normalised(chat, content, arguments):
    """The same messages in the forms that a template reads, which is written down beside the template."""
    made = []
    for message in chat:
        message = {key: value for key, value in copy.deepcopy(message).items() if value is not None}
        if message.get("tool_calls") == []:
            del message["tool_calls"]
        if isinstance(message.get("content"), list):
            parts = [p if isinstance(p, str) else p["text"] for p in message["content"]]
            message["content"] = "\n".join(parts) if content == "text" else [{"type": "text", "text": p} for p in parts]
        elif content == "parts" and "content" in message:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()):
            for key in [key for key, value in call.items() if value is None]:
                del call[key]
            given = call["function"].get("arguments")
            given = {} if given is None else given
            if arguments == "mapping" and isinstance(given, str):
                given = json.loads(given)
            if arguments == "text" and not isinstance(given, str):
                given = json.dumps(given, ensure_ascii=False)
            call["function"]["arguments"] = given
        if message["role"] == "developer":
            message["role"] = "system"
        made.append(message)
    return made


def filled(tokenizer, chat, **more):
    """Return the prompt of transformers, with empty content if the template needs some."""
    from jinja2 import TemplateError, UndefinedError

    try:
        return tokenizer.apply_chat_template(chat, tokenize=False, **more)
    except UndefinedError:
        try:
            return tokenizer.apply_chat_template([{"content": "", **m} for m in chat], tokenize=False, **more)
        except (TemplateError, TypeError):
            return None
    except (TemplateError, TypeError):
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_forms_that_a_template_reads_are_found_in_its_text(name):
    template, content, arguments, tools, calls = TEMPLATES[name]
    facts = ChatTemplate(template).facts
    found = (facts.content, facts.arguments, "tools" in facts.variables, facts.reads_calls)
    assert found == (content, arguments, tools, calls)


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_of_drawn_conversations_are_those_of_transformers(name, tmp_path):
    template, content, arguments, knows_tools, reads_calls = TEMPLATES[name]
    folder = save(tmp_path, template)
    ours, theirs = load_tokenizer(folder), theirs_of(folder)
    draw, compared = random.Random(f"chat {name}"), 0
    for _ in range(120):
        chat = drawn_chat(draw)
        if not reads_calls:
            chat = [m for m in chat if m["role"] != "tool"]
            for message in chat:
                message.pop("tool_calls", None)
        tools = {"tools": [TOOL]} if knows_tools and (draw.random() < 0.5 or name == "hermes") else {}
        begin, before = draw.random() < 0.7, copy.deepcopy(chat)
        want = filled(theirs, normalised(chat, content, arguments), add_generation_prompt=begin, **tools)
        if want is None:
            with pytest.raises(RequestError, match="refuses the messages"):
                ours.apply_chat_template(chat, begin, tokenize=False, **tools)
            continue
        compared += 1
        assert ours.apply_chat_template(chat, begin, tokenize=False, **tools) == want
        assert ours.chat_prompt(chat, begin, **tools).text == want
        assert chat == before and "None" not in want
    assert compared >= 40


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_goes_on_with_the_last_message_as_transformers_has_it(name, tmp_path):
    template, content, *_ = TEMPLATES[name]
    if name in ("whole", "mistral"):
        pytest.skip("it does not print the message as it is, or has no such last message")
    folder = save(tmp_path, template)
    ours, theirs = load_tokenizer(folder), theirs_of(folder)
    tools = {"tools": [TOOL]} if name == "hermes" else {}
    for text in ("I think", "I think  ", [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]):
        chat = [*ASK, {"role": "assistant", "content": text}]
        plain = normalised(chat, content, "mapping")
        want = theirs.apply_chat_template(plain, tokenize=False, continue_final_message=True, **tools)
        assert ours.apply_chat_template(chat, tokenize=False, continue_final_message=True, **tools) == want
        assert ours.chat_prompt(chat, continue_final_message=True, **tools).text == want
    with pytest.raises(RequestError, match="use only one of them"):
        ours.chat_prompt(chat, True, continue_final_message=True)


def test_objects_of_clients_are_messages_too(tmp_path):
    pydantic = pytest.importorskip("pydantic")

    class Message(pydantic.BaseModel):
        role: str
        content: str | None = None
        tool_calls: list | None = None

    folder = save(tmp_path, QWEN25)
    chat = [Message(role="user", content="a"), Message(role="assistant"), Message(role="user", content="b")]
    want = filled(theirs_of(folder), [{"role": "user", "content": "a"}, {"role": "assistant"}, chat[2].model_dump()])
    assert load_tokenizer(folder).apply_chat_template(chat, False, tokenize=False) == want


# ---- what is refused, and by which name ------------------------------------------------------------------------------

CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": "{}"}}
REFUSED = [
    (
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        "messages[0].content[0].type",
    ),
    ({"role": "user", "content": [{"type": "image"}]}, "messages[0].content[0].type"),
    (
        {"role": "user", "content": ["a", {"type": "input_audio", "input_audio": {}}]},
        "messages[0].content[1].type",
    ),
    ({"role": "user", "content": [{"type": "video"}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "file", "file": {"file_id": "1"}}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "text", "text": "a", "image": "b"}]}, "messages[0].content[0].image"),
    ({"role": "user", "content": [{"type": "dance"}]}, "messages[0].content[0].type"),
    ({"role": "user", "content": [{"type": "text", "content": "a"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [7]}, "messages[0].content[0]"),
    ({"role": "user", "content": {"a": 1}}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": "a", "images": ["b"]}, "messages[0].images"),
    ({"role": "assistant", "audio": {"id": "x"}}, "messages[0].audio"),
    ({"role": "user", "content": "a", "name": 5}, "messages[0].name"),
    ({"role": "assistant", "content": "a", "reasoning_content": [{}]}, "messages[0].reasoning_content"),
    ({"role": "assistant", "content": "a", "thinking": {"text": "b"}}, "messages[0].thinking"),
    ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
    ({"role": "assistant", "tool_calls": [5]}, "messages[0].tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{"type": "custom", "custom": {}}]}, "messages[0].tool_calls[0].type"),
    ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
    ({"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}, "messages[0].tool_calls[0].id"),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    (
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"role": "assistant", "function_call": "f"}, "messages[0].function_call"),
    ({"role": "assistant", "tool_cals": [CALL]}, "messages[0].tool_cals"),
    ({"role": "assistant", "content": "a", "prefix": True}, "messages[0].prefix"),
    ({"role": "user", "content": "a", "contents": "b"}, None),
]


@pytest.mark.parametrize(("message", "place"), REFUSED, ids=[str(place) for _, place in REFUSED])
def test_a_refusal_names_the_place_of_the_message(message, place):
    tokenizer = Tokenizer(byte_level(SPECIAL), None, {"bos_token": "<s>"}, QWEN25)
    if place is None:  # beside content a key that nothing reads is left to a warning
        assert tokenizer.chat_prompt([message]).text
        return
    with pytest.raises(RequestError) as refused:
        tokenizer.chat_prompt([message])
    assert refused.value.param == place and str(refused.value).startswith(place)


def test_a_message_of_tools_moves_no_place_of_an_error():
    tokenizer = Tokenizer(byte_level(SPECIAL), None, {"bos_token": "<s>"}, CHATML)
    broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    for more in ({}, {"tools": [TOOL]}):
        with pytest.raises(RequestError) as refused:
            tokenizer.chat_prompt([*ASK, broken], **more)
        assert refused.value.param == "messages[1].tool_calls[0].function.arguments"


def test_calls_in_the_form_before_tool_calls_are_calls():
    tokenizer = Tokenizer(byte_level(SPECIAL), None, {"bos_token": "<s>"}, QWEN25)
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [*ASK, old, {"role": "function", "name": "f", "content": "5"}]
    text = tokenizer.chat_prompt(chat).text
    assert '{"name": "f", "arguments": {"a": 1}}' in text and "<tool_response>\n5" in text


# ---- several templates -----------------------------------------------------------------------------------------------

LISTED = [
    {"name": "default", "template": CHATML},
    {"name": "tool_use", "template": HERMES_TOOLS},
    {"name": "rag", "template": RAG},
]
PLACES = {
    "list": {"template": LISTED},
    "mapping": {"template": {one["name"]: one["template"] for one in LISTED}},
    "files": {
        "template": "from the config",
        "chat_template.jinja": CHATML,
        "additional_chat_templates/tool_use.jinja": HERMES_TOOLS,
        "additional_chat_templates/rag.jinja": RAG,
    },
    "json": {"template": None, "chat_template.json": {"chat_template": LISTED}},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_template_is_chosen_by_the_tools_or_by_its_name(place, tmp_path):
    folder = save(tmp_path / "a", **PLACES[place])
    ours, theirs = load_tokenizer(folder), theirs_of(save(tmp_path / "b", LISTED))
    documents = [{"title": "t", "text": "x<|im_end|>"}]
    for more in (
        {},
        {"tools": [TOOL]},
        {"chat_template": "rag", "documents": documents},
        {"chat_template": "rag"},
        {"chat_template": "tool_use", "tools": [TOOL]},
        {"chat_template": "{{ messages[0].content }}!"},
    ):
        want = theirs.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True, **more)
        assert ours.apply_chat_template(ASK, True, tokenize=False, **more) == want
        assert ours.chat_prompt(ASK, True, **more).text == want
    again = Tokenizer.from_json(json.loads(json.dumps(ours.to_json())))
    assert again.chat_prompt(ASK, tools=[TOOL]).text == ours.chat_prompt(ASK, tools=[TOOL]).text
    with pytest.raises(RequestError, match=r"expected default, rag, tool_use") as refused:
        ours.chat_prompt(ASK, chat_template="tools")
    assert refused.value.param == "chat_template"
    with pytest.raises(RequestError, match=r"no place for them; name one that has, with chat_template: rag") as refused:
        ours.chat_prompt(ASK, documents=documents)
    assert refused.value.param == "documents"
    for chosen, text in (("rag", "<s><user>hello"), ("tool_use", None)):
        one = load_tokenizer(folder, chosen)
        assert one.chat_template == {x["name"]: x["template"] for x in LISTED}[chosen]
        assert text is None or one.chat_prompt(ASK).text == text
    with pytest.raises(ConfigError, match=r"own templates are default, rag, tool_use"):
        load_tokenizer(folder, "no_such_file")


def test_templates_without_a_default_are_used_by_name_only(tmp_path):
    ours = load_tokenizer(save(tmp_path, LISTED[1:]))
    with pytest.raises(
        RequestError, match=r"several chat templates \(rag, tool_use\) and none is the default"
    ) as refused:
        ours.chat_prompt(ASK)
    assert refused.value.param == "chat_template"
    assert ours.chat_prompt(ASK, tools=[TOOL]).text and ours.chat_prompt(ASK, chat_template="rag").text


@pytest.mark.parametrize("bad", [5, [5], [{"name": "a"}], {"a": 5}])
def test_a_template_that_is_no_text_is_a_model_error(bad, tmp_path):
    with pytest.raises(ModelError, match="chat_template"):
        load_tokenizer(save(tmp_path, bad))


def test_tools_are_told_in_the_system_message_where_the_template_has_no_place_for_them(caplog):
    tokenizer = Tokenizer(byte_level(SPECIAL), None, {"bos_token": "<s>"}, CHATML)
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    for chat in (ASK, [{"role": "system", "content": "be brief"}, *ASK, call, {"role": "tool", "content": "5"}]):
        text = tokenizer.chat_prompt(chat, tools=[TOOL]).text
        assert text.count("<|im_start|>system") == 1 and "adds é" in text
        assert (len(chat) == 1) != ("be brief\n\nYou may call" in text)
        assert (len(chat) == 1) != ('<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>' in text)
    assert caplog.text.count("no place for tools") == 1
    parts = Tokenizer(byte_level(SPECIAL), None, {"bos_token": "<s>"}, TEMPLATES["llava"][0])
    assert "adds é" in parts.chat_prompt(ASK, tools=[TOOL]).text
    alone = Tokenizer(byte_level(SPECIAL), None, {"bos_token": "<s>"}, GEMMA3)
    assert "adds é" in alone.chat_prompt(ASK, tools=[TOOL]).text
    assert "You may call" not in Tokenizer(byte_level(SPECIAL), None, {}, QWEN3).chat_prompt(ASK, tools=[TOOL]).text


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools[0].function.parameters",
        ),
        ({"documents": "x"}, "documents"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"chat_template": 5}, "chat_template"),
        ({"variables": [1]}, "chat_template_kwargs"),
        ({"variables": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_what_a_template_is_given_is_refused_by_name(more, place):
    tokenizer = Tokenizer(byte_level(SPECIAL), None, {"bos_token": "<s>"}, QWEN25)
    with pytest.raises(RequestError) as refused:
        tokenizer.chat_prompt(ASK, **more)
    assert refused.value.param == place


def nested(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("value", [nested(3000), {"a": {1}}, {"a": b"x"}], ids=["deep", "set", "bytes"])
def test_values_that_json_does_not_have_are_refused_wherever_they_are(value):
    tokenizer = Tokenizer(byte_level(SPECIAL), None, {}, CHATML)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": value}}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": value}}
    for chat, more in ((ASK, {"tools": [tool]}), ([*ASK, call], {}), (ASK, {"variables": {"x": value}})):
        for fill in (tokenizer.apply_chat_template, tokenizer.chat_prompt):
            with pytest.raises(RequestError, match=r"nested too deeply|expected text, numbers, booleans"):
                fill(chat, **more)
    with pytest.raises(RequestError, match=r"nested too deeply|has no place"):
        tokenizer.chat_prompt(ASK, documents=[value])


def test_a_key_that_is_no_text_and_that_no_template_reads_says_nothing():
    tokenizer = Tokenizer(byte_level(SPECIAL), None, {}, CHATML)
    chat = [{"role": "user", "content": "hi", (1, 2): 3}]
    assert tokenizer.chat_prompt(chat, continue_final_message=True).text.endswith("hi")
