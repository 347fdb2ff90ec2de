"""Functions of a request on its logits: what they see, what they change, and that nobody else notices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minivllm import LLM, RequestError, SamplingParams
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other

SMALL = dict(
    skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=40, max_num_seqs=8, max_num_batched_tokens=64
)
PROMPTS = [[5, 9, 2], [7] * 20, [1, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_dir(folder, "qwen3", vocab_size=131)
    return str(folder)


def same(output, logits):
    return logits


def tokens(llm, items, params):
    return [[o.token_ids for o in out.outputs] for out in llm.generate(items, params, use_tqdm=False)]


REQUESTED = [
    dict(temperature=0), dict(temperature=0.9, top_p=0.8, top_k=20, seed=1, n=2),
    dict(temperature=1.5, min_p=0.05, presence_penalty=1.0, logit_bias={3: 2.0}, seed=9),
]  # fmt: skip


@pytest.mark.parametrize("sampler", ["default", "mirostat"])
def test_functions_that_change_nothing_change_no_token(folder, sampler):
    """The draw on the host is the device's, state, seeds, branches, penalties and preemption included."""
    parameters = REQUESTED if sampler == "default" else [dict(mirostat_tau=4.0, mirostat_eta=0.4, seed=3, n=2)]
    items = [[i + 1] * (3 + 5 * i) for i in range(4)]
    with LLM(folder, sampler=sampler, **{**SMALL, "num_kvcache_blocks": 12}) as llm:
        for some in parameters:
            base = dict(max_tokens=28, ignore_eos=True, **some)
            host = SamplingParams(**base, logits_processors=[same, lambda prompt, output, x: x])
            assert tokens(llm, items, host) == tokens(llm, items, SamplingParams(**base)), some
        assert llm.stats()["preemptions"] > 0


def test_functions_run_in_order_and_see_ids_and_processed_logits(folder):
    seen = []

    def first(output, x):
        seen.append(list(output))
        assert x.dtype == torch.float32 and x.shape == (131,) and x[9] == -torch.inf
        x[:] = -torch.inf
        x[7] = 0.0
        return x

    def second(prompt, output, x):
        assert prompt == [5, 9, 2] and x[7] == 0.0
        return np.roll(x.numpy(), len(output))

    with LLM(folder, **SMALL) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, bad_words=[[9]], logits_processors=[first, second])
        out = llm.generate([5, 9, 2], params, use_tqdm=False)[0]
    assert out.tokens == [7, 8, 9] and seen == [[], [7], [7, 8]]


def gives(value):
    return lambda output, x: value(x)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda output, x: 1 / 0, "ZeroDivisionError"), (gives(lambda x: None), "expected the logits"),
        (gives(lambda x: x[:5]), "shape (5,)"), (gives(lambda x: x * float("nan")), "left no token"),
        (gives(lambda x: x - float("inf")), "left no token"), (gives(lambda x: "logits"), "expected the logits"),
        (gives(lambda x: [x]), "ValueError"), (lambda output, x: x.no_such_thing, "AttributeError"),
    ],
)  # fmt: skip
def test_a_function_that_fails_ends_its_own_request(folder, function, words):
    """After two tokens, with its message and what it had; the others' tokens are what they are without it."""
    late = lambda output, x: x if len(output) < 2 else function(output, x)  # noqa: E731
    plain = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    bad = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logits_processors=[late])
    with LLM(folder, **SMALL) as llm:
        want = tokens(llm, PROMPTS, plain)
        a, broken, b = llm.generate(PROMPTS, [plain, bad, plain], use_tqdm=False)
        assert [a.tokens, b.tokens] == [want[0][0], want[2][0]]
        assert (broken.finish_reason, broken.tokens) == ("error", want[1][0][:2])
        assert broken.error.startswith("logits_processors: ") and words in broken.error, broken.error


@pytest.mark.parametrize(
    "parameters",
    [
        dict(logits_processors=5), dict(logits_processors=same), dict(logits_processors=[same, 3]),
        dict(logits_processors=[same], logprobs=1), dict(logits_processors=[same], choose_fn=lambda x, ids: 1),
        dict(logits_processors=[same], allowed_tokens_fn=lambda ids: [1]), dict(logits_processors=[lambda x: x]),
        dict(logits_processors=[lambda a, b, c, d: d]),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused(folder, parameters):
    with LLM(folder, **SMALL) as llm, pytest.raises(RequestError, match="logits_processors") as e:
        llm.generate([1], SamplingParams(**parameters), use_tqdm=False)
    assert e.value.param == "logits_processors"


def test_an_empty_list_is_none(folder):
    assert SamplingParams(logits_processors=[]).logits_processors is None
