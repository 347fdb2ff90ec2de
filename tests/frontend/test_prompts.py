"""Prompts and chats of ``LLM``: every key is read or refused."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.errors import RequestError
from minivllm.frontend.prompts import CALL_HINTS, check_call, read_prompt, with_salt

SIZES = {
    "device": "cpu",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
    "num_kvcache_blocks": 64,
}
ONE = SamplingParams(max_tokens=1, temperature=0)
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def llm():
    with LLM(model="pocket", **SIZES) as made:
        yield made


REFUSED = [
    ({"multi_modal_data": {"video": 1}}, "'video' is not read; expected image"),
    ({"multi_modal_data": [1]}, 'expected {"image": ...}'),
    ({"mm_processor_kwargs": {"a": 1}}, "expected images in multi_modal_data"),
    ({"multi_modal_uuids": {"image": "a"}}, "expected images in multi_modal_data"),
    ({"images": ["x"]}, "expected images in multi_modal_data"),
    ({"prompt_embeds": [[1.0]]}, "embeddings are not read"),
    ({"encoder_prompt": "x"}, "models with an encoder"),
    ({"token_type_ids": [0]}, "no model here"),
    ({"messages": [{"role": "user"}]}, "goes to chat"),
    ({"cache_sal": "x"}, "Did you mean 'cache_salt'"),
    ({"promt": "x"}, "Did you mean 'prompt'"),
    ({"temperature": 0}, "unknown key; expected prompt, prompt_token_ids, cache_salt, multi_modal_data"),
    ({"cache_salt": 5}, "expected a string"),
    ({5: "x"}, "unknown key"),
]


@pytest.mark.parametrize(("more", "want"), REFUSED, ids=[str(next(iter(more))) for more, _ in REFUSED])
def test_a_key_of_a_prompt_that_is_not_read_is_refused_by_name(more, want):
    for prompt in ({"prompt_token_ids": [1, 2]}, {}):
        with pytest.raises(RequestError, match=want) as refused:
            read_prompt({**prompt, **more}, None)
        assert refused.value.param == str(next(iter(more)))


def test_a_call_without_a_reader_refuses_images():
    with pytest.raises(RequestError, match="this call reads text only"):
        read_prompt({"prompt_token_ids": [1, 2], "multi_modal_data": {"image": 1}}, None)


def test_keys_that_say_nothing_are_taken_and_token_ids_come_before_text():
    empty = {"multi_modal_data": None, "images": [], "prompt_embeds": None, "cache_salt": None}
    read = read_prompt({"prompt": "a", "prompt_token_ids": [1, 2], **empty}, None)
    assert read.text == "a" and read.ids.tolist() == [1, 2] and read.cache_salt is None
    assert read_prompt({"prompt": np.array([3])}, None).ids.tolist() == [3]
    with pytest.raises(RequestError, match="expected the text of these ids"):
        read_prompt({"prompt": 5, "prompt_token_ids": [1]}, None)


def test_the_salt_of_a_prompt_is_that_of_its_parameters_or_refused():
    assert with_salt(ONE, None) is ONE and with_salt(ONE, "a").cache_salt == "a"
    with pytest.raises(RequestError, match="differs"):
        with_salt(SamplingParams(cache_salt="b"), "a")


def test_prompts_share_a_cached_prefix_only_under_the_same_salt(llm):
    text = "the quick brown fox jumps over the lazy dog and runs away " * 4

    def cached(*salts):
        prompts = [{"prompt": text, "cache_salt": salt} for salt in salts]
        return [out.num_cached_tokens for out in llm.generate(prompts, ONE, use_tqdm=False)]

    assert cached("a") == [0] and cached("a")[0] > 0 and cached("b") == [0] and cached(None) == [0]
    assert cached(None)[0] > 0
    (out,) = llm.generate(text, SamplingParams(max_tokens=1, cache_salt="b"), use_tqdm=False)
    assert out.num_cached_tokens > 0


def test_every_way_into_a_chat_gives_the_same_prompt(llm):
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "add 1"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "add"}}]},
        {"role": "tool", "content": "2", "tool_call_id": "a", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [], "function_call": None, "refusal": None},
        {"role": "user", "content": "and"},
    ]
    more = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    want = llm.tokenizer.chat_prompt(chat, tools=[TOOL], variables={"enable_thinking": False})
    assert "None" not in want.text and "adds" in want.text
    (out,) = llm.chat(chat, ONE, use_tqdm=False, **more)
    (again, other) = llm.chat([chat, chat], ONE, use_tqdm=False, **more)
    last = list(llm.chat_stream(chat, ONE, **more))[-1].output
    assert out.prompt == again.prompt == other.prompt == last.prompt == want.text
    goes_on = llm.chat([*chat, {"role": "assistant", "content": "So"}], ONE, False, continue_final_message=True)[0]
    assert goes_on.prompt.endswith("So")

    async def requested():
        made = AsyncLLM(model="pocket", **SIZES)
        try:
            return [piece async for piece in made.chat(chat, ONE, **more)][-1].output.prompt
        finally:
            made.close()

    assert asyncio.run(requested()) == want.text


@pytest.mark.parametrize(
    ("more", "want"),
    [
        ({"documents": [{"text": "x"}]}, "no place for them"),
        ({"chat_template": "tool_use"}, "expected default, or a Jinja template"),
        ({"tool": [TOOL]}, "Did you mean 'tools'"),
        ({"enable_thinking": False}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "use only one of them"),
        ({"lora_request": "a"}, "expected a LoRARequest"),
    ],
)
def test_what_a_chat_cannot_honour_is_refused(llm, more, want):
    for ask in (llm.chat, llm.chat_stream):
        with pytest.raises(RequestError, match=want):
            ask([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], ONE, **more)


@pytest.mark.parametrize("ids", ["ab", b"ab", {"1": 2}, 7, [1.5]])
def test_token_ids_of_another_type_are_refused(ids):
    with pytest.raises(RequestError):
        read_prompt({"prompt_token_ids": ids}, None)


@pytest.mark.parametrize("name", sorted(CALL_HINTS))
def test_a_keyword_of_vllms_generate_is_refused_with_a_hint_unless_it_is_none(name):
    check_call({name: None}, ("prompts",))
    with pytest.raises(RequestError) as refused:
        check_call({name: 1}, ("prompts",))
    assert CALL_HINTS[name] in str(refused.value)
    with pytest.raises(RequestError, match="Did you mean 'use_tqdm'"):
        check_call({"use_tdqm": None}, ("prompts", "use_tqdm"))
