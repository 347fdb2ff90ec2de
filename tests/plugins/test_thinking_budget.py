"""The budget of reasoning: the tokens before it are the same as without a budget, then the end tag follows."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM, RequestError, SamplingParams
from minivllm.core.interfaces.sampling import SamplingContext
from minivllm.plugins.processor.thinking_budget import ThinkingBudget
from minivllm.runtime.replies.thinking import ThinkingTags
from minivllm.runtime.text.thinking import tags_of, with_thinking_ids
from minivllm.runtime.text.tokenizer import Tokenizer
from minivllm.testing.processor import ProcessorConformance
from minivllm.testing.sampling_rows import SampledSeq

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
EOS = (0, 2)  # of pocket
TAGS = {"start": [50], "end": [100, 101]}


def forced(tags, budget, prompt, output, eos=()):
    """The definition, token by token: the token that must come next, or None."""
    start, end = tuple(tags["start"]), tuple(tags["end"])
    inside = ThinkingTags.of(tags, 1 << 20).opened(prompt, eos)
    spent = 0
    for n in range(1, len(output) + 1):
        spent += inside
        reported = tuple(output[:n])
        if reported[-len(end) :] == end:
            inside = False
        elif reported[-len(start) :] == start:
            inside = True
    if not inside or spent < budget:
        return None
    longest = max(k for k in range(len(end)) if tuple(output[len(output) - k :]) == end[:k] or k == 0)
    return end[longest]


class TestConformance(ProcessorConformance):
    plugin = "thinking_budget"

    def params(self, vocab):
        tags = [{"start": [8], "end": [3]}, {"start": [3], "end": [8, 8, 5]}, {"start": [1, 2], "end": [3, 3]}]
        return [{"thinking_token_budget": n, "thinking_tags": ids} for n in (0, 1, 4) for ids in tags]

    def wrong_params(self, vocab):
        wrong = [{"start": [vocab], "end": [1]}, {"start": [1]}, {"start": [1], "end": []}, {"start": [1], "end": [1]}]
        wrong += [{"start": [1], "end": [2], "x": [3]}, {"start": [True], "end": [2]}, {"start": "a", "end": [2]}]
        return [{"thinking_tags": tags, "thinking_token_budget": 2} for tags in wrong]

    def reference(self, params, logits, prompt, output):
        if params.thinking_token_budget in (None, -1):
            return logits
        eos = self.make(len(logits)).ctx.eos_ids
        token = forced(params.thinking_tags, params.thinking_token_budget, prompt, output, eos)
        if token is None:
            return logits
        left = torch.full_like(logits, -torch.inf)
        left[token] = logits[token]
        return left


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_next_token_is_that_of_the_definition(data):
    suite = ProcessorConformance()
    suite.plugin, suite.vocab = "thinking_budget", 8
    few = st.integers(0, 3)
    tag = st.lists(few, min_size=1, max_size=4)
    tags = {"start": data.draw(tag), "end": data.draw(tag)}
    if tags["start"] == tags["end"]:
        return
    budget = data.draw(st.integers(0, 6))
    prompt, output = data.draw(st.lists(few, min_size=1, max_size=8)), data.draw(st.lists(few, max_size=20))
    logits = torch.randn(8)
    requested = SamplingParams(thinking_token_budget=budget, thinking_tags=tags)
    got = suite.alone(SampledSeq(requested, tuple(prompt), tuple(output), logits))
    token = forced(tags, budget, prompt, output, suite.make(8).ctx.eos_ids)
    want = logits if token is None else torch.where(torch.arange(8) == token, logits, -torch.inf)
    assert torch.equal(got, want)


def test_a_prompt_opens_the_reasoning():
    tags = ThinkingTags.of({"start": [5, 6], "end": [7]}, 10)
    for prompt, opened in (
        ([5, 6], True),
        ([1, 5, 6, 1, 1], True),
        ([5, 6, 1, 7], False),
        ([5, 6, 7, 5, 6], True),
        ([5, 6, 1, 2, 1], False),  # the message has ended
        ([5], False),
        ([5, 1, 6], False),
    ):
        assert tags.opened(np.array(prompt, np.int32), EOS) is opened, prompt


def test_no_limit_binds_nothing():
    processor = ThinkingBudget(None, SamplingContext(200, 24, EOS))
    prompt = np.array([1], np.int32)
    for requested in ({}, {"thinking_token_budget": None}, {"thinking_token_budget": -1, "thinking_tags": TAGS}):
        assert processor.bind_prompt(SamplingParams(**requested), prompt) is None
    with pytest.raises(RequestError, match="start is missing, and this engine has no tokenizer") as e:
        processor.bind_prompt(SamplingParams(thinking_token_budget=1), prompt)
    assert e.value.param == "thinking_tags"
    for wrong in (-2, 1.5, True, 2**31):
        with pytest.raises(RequestError, match=r"thinking_token_budget=.*: expected a whole number from 0, or -1"):
            SamplingParams(thinking_token_budget=wrong)


# ---- the tags of a model ---------------------------------------------------------------------------------------------


def tokenizer_with(*added):
    from tokenizers import AddedToken, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel

    backend = Backend(WordLevel({"analysis": 0, "final": 1, "x": 2, "y": 3, "u": 4}, unk_token="u"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens([AddedToken(text, normalized=False) for text in added])
    return Tokenizer(backend, None, {}, None)


def test_the_tags_of_a_model_are_its_added_tokens():
    def ids(tokenizer, **requested):
        return with_thinking_ids(SamplingParams(**requested), tokenizer).thinking_tags

    qwen = tokenizer_with("<think>", "</think>")
    assert ids(qwen, thinking_token_budget=3) == {"start": [5], "end": [6]}
    assert ids(qwen, thinking_tags={}) == {"start": [5], "end": [6]}
    assert ids(qwen, thinking_token_budget=3, thinking_tags={"end": "x y"}) == {"start": [5], "end": [2, 3]}
    assert ids(qwen, thinking_token_budget=-1) is ids(qwen) is None
    channels = tokenizer_with("<|channel|>", "<|message|>", "<|end|>")
    assert ids(channels, thinking_tags={}) == {"start": [5, 0, 6], "end": [7], "answer": [5, 1, 6]}
    bare = tokenizer_with()
    assert tags_of(bare) is None
    assert ids(bare, thinking_tags={"start": "x", "end": [3]}) == {"start": [2], "end": [3]}
    for name, value in (("thinking_token_budget", 0), ("thinking_tags", {})):
        requested = {name: value}
        with pytest.raises(RequestError, match=f"{name}: the tokenizer of this model has no tags of reasoning") as e:
            ids(bare, **requested)
        assert e.value.param == name
    for wrong in ("", "x " * 17, "x" * 300):
        with pytest.raises(RequestError, match=r"thinking_tags.end=.*: expected a text of 1 to 16 tokens"):
            ids(qwen, thinking_tags={"start": "x", "end": wrong})


# ---- the engine ------------------------------------------------------------------------------------------------------

OPENED = [10, 11, 50, 12]
CLOSED = [10, 11, 12]
SEEDED = {"seed": 3, "temperature": 0.9, "ignore_eos": True}


def generated(llm, prompts, **requested):
    """The token ids of all samples of each prompt."""
    params = SamplingParams(**{**SEEDED, "max_tokens": 24, **requested})
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [[output.token_ids for output in answer.outputs] for answer in answers]


def expected(llm, prompt, budget, tags, **requested):
    """The tokens up to the budget without a budget, the tag, and the tokens that follow them without a budget."""
    (free,) = generated(llm, [prompt], **requested)
    samples = []
    for sample, ids in enumerate(free):
        begun = [*ids[:budget], *tags["end"]]
        more = requested | {"max_tokens": 24 - len(begun), "n": sample + 1}
        (rest,) = generated(llm, [prompt + begun], **more)  # draws depend on position, seed and sample
        samples.append(begun + rest[sample])
    return samples


@pytest.fixture(scope="module")
def llm():
    # in bfloat16 the tokens of a row depend on its batch
    with LLM(model="pocket", dtype="float32", num_kvcache_blocks=128) as llm:
        yield llm


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("n", [1, 2])
def test_the_tokens_up_to_the_budget_are_those_without_one(llm, budget, n):
    want = expected(llm, OPENED, budget, TAGS, n=n)
    requested = {"thinking_token_budget": budget, "thinking_tags": TAGS, "n": n}
    assert generated(llm, [OPENED], **requested) == [want]
    assert generated(llm, [OPENED] * 3, **requested) == [want] * 3  # after a prefix hit, and in a batch
    without = generated(llm, [CLOSED], n=n)
    assert generated(llm, [CLOSED], **requested) == without  # there is no reasoning


def test_reasoning_that_ends_itself_is_left_alone(llm):
    (free,) = generated(llm, [OPENED])[0]
    tags = {"start": [50], "end": [free[5]]}
    first = free.index(free[5])
    requested = {"thinking_tags": tags}
    assert generated(llm, [OPENED], thinking_token_budget=first + 1, **requested) == [[free]]
    assert generated(llm, [OPENED], thinking_token_budget=first, **requested) == [[free]]
    assert generated(llm, [OPENED], thinking_token_budget=first - 1, **requested) != [[free]]
    begins = {"start": [free[2]], "end": [100]}  # the model opens the reasoning itself
    (got,) = generated(llm, [CLOSED[:1] + OPENED[1:]], thinking_token_budget=4, thinking_tags=begins)[0]
    (plain,) = generated(llm, [CLOSED[:1] + OPENED[1:]])[0]
    at = plain.index(free[2]) if free[2] in plain else len(plain)
    assert got[: at + 5] == plain[: at + 5] and (at >= 19 or got[at + 5] == 100)


def test_drafts_preemption_and_run_ahead_change_nothing(llm):
    prompts = [[10 + i, *[11, 12, 13] * (i % 3 + 1), 50, 12] for i in range(8)]
    requested = {"thinking_token_budget": 6, "thinking_tags": TAGS, "max_tokens": 40}
    for temperature in (0, 0.9):
        want = generated(llm, prompts, temperature=temperature, **requested)
        assert all(ids[6:8] == TAGS["end"] for (ids,) in want)
        options = dict(model="pocket", dtype="float32")
        with LLM(drafter="ngram", num_kvcache_blocks=128, **options) as drafting:
            assert generated(drafting, prompts, temperature=temperature, **requested) == want
            assert temperature or drafting.stats()["speculation"]["proposed"] > 0
        with LLM(num_kvcache_blocks=10, run_ahead=2, **options) as small:
            assert generated(small, prompts, temperature=temperature, **requested) == want
            assert small.stats()["preemptions"] > 0


@pytest.mark.parametrize("prompt", [OPENED, CLOSED])
def test_a_form_begins_behind_the_reasoning(llm, prompt):
    pytest.importorskip("llguidance")
    form = {"structured_outputs": {"json": {"enum": ["one", "two"]}, "disable_any_whitespace": True}}
    for more in ({}, {"n": 3}, {"thinking_token_budget": 4}, {"thinking_token_budget": 0}):
        requested = {"thinking_tags": TAGS, "max_tokens": 60, "ignore_eos": False, **form, **more}
        for ids in generated(llm, [prompt], **requested)[0]:
            thinks = prompt is OPENED or ids[0] == 50
            end = next((i for i in range(len(ids)) if ids[i : i + 2] == TAGS["end"]), None)
            if thinks and end is None:  # the model does not end the reasoning by itself
                assert "thinking_token_budget" not in more and len(ids) == 60 and not set(EOS) & set(ids)
                continue
            if "thinking_token_budget" in more and thinks:
                assert end == more["thinking_token_budget"] + (prompt is CLOSED)
            text = llm.tokenizer.decode(ids[end + 2 :] if thinks else ids)
            assert json.loads(text) in ("one", "two") and ids[-1] in EOS


def test_a_form_without_tags_begins_at_once(llm):
    pytest.importorskip("llguidance")
    (ids,) = generated(llm, [OPENED], structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)[0]
    assert llm.tokenizer.decode(ids) in ("yes", "no")


def test_a_model_without_tags_refuses_a_budget(llm):
    with pytest.raises(RequestError, match="has no tags of reasoning") as e:
        llm.generate("x", SamplingParams(thinking_token_budget=3), use_tqdm=False)
    assert e.value.param == "thinking_token_budget"
