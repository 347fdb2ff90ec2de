"""Sampling parameters that cannot be served are refused within 2 s by a message that names the field, or are answered.

Two requests that run beside all of them give the same tokens as alone.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch

from minivllm import LLM, RequestError, SamplingParams
from minivllm.frontend.prompts import params_for
from minivllm.frontend.requests import Tracked
from minivllm.testing.tiny import tiny_dir

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other

VOCAB = 131  # size of the model's vocabulary, not a multiple of 32
NAN, INF = float("nan"), float("inf")
HUGE = 10**5000  # Python refuses to spell it
MANY = list(range(1_000_000))
LINEAR = {"kind": "linear", "start": 1.0, "end": 0.5, "tokens": 9}
FLOATS = (NAN, INF, -INF, "1", None, True, 10**400, HUGE, [1.0], 1j, {})
NUMBERS = {
    "temperature": (-0.1, 2.01, 100), "top_p": (0, -0.5, 1.01), "min_p": (-0.1, 1.1), "typical_p": (0, 1.5, -1),
    "repetition_penalty": (0, -1), "presence_penalty": (-2.1, 2.1), "frequency_penalty": (-2.1, 2.1),
    "mirostat_eta": (0, -1, 1.5),
}  # fmt: skip
WHOLE = {
    "top_k": (-2, 1.5), "n": (0, -1, 129, 10**30), "max_tokens": (0, -5, 2.5), "min_tokens": (-1, 2.5, 65),
    "seed": (2**63, 1.5, "x"), "logprobs": (-2, 21, 1.5), "prompt_logprobs": (-2, 21, 1.5),
    "best_of": (0, 1.5), "beam_width": (0, 129), "no_repeat_ngram_size": (-1, 1.5, 65, 10**9),
    "priority": (2**31, 1.5), "expected_tokens": (0, 2**40),
}  # fmt: skip
OTHERS = {
    "mirostat_tau": (0, -1, NAN, INF, "x", HUGE, 65),
    "stop": ([""], "", ["x"] * 10_000, [1], 5, "x" * 10_000_000, {"a": 1}, ["x" * 257], [None], b"stop"),
    "stop_token_ids": (MANY, [-1], [1.5], ["x"], "12", 5, [VOCAB], [2**70], [True], list(range(25)), [[1]]),
    "logit_bias": ({VOCAB: 1.0}, {-1: 1.0}, {1: NAN}, {1: INF}, {1: 101}, {"x": 1}, [1], 5, dict.fromkeys(MANY, 1.0),
                   {1: HUGE}, {HUGE: 1.0}),
    "bad_words": (5, "word", ["word"], [[]], [[VOCAB]], [[-1]], [[1] * 17], [[1]] * 257, [[1.5]], [None], MANY, [HUGE],
                  [[HUGE]], [[[1]]]),
    "allowed_token_ids": ([], [VOCAB], [-1], [1.5], ["1"], MANY, 5, "12", {1, 2}, [True], [HUGE], [[1], [2, 3]]),
    "temperature_schedule": (5, {}, {"kind": "step"}, {**LINEAR, "start": NAN}, {**LINEAR, "end": HUGE},
                             {**LINEAR, "tokens": 0}, {**LINEAR, "speed": 1}, {"kind": ["linear"]}, {1: 2}),
    "logits_processors": (5, [5], [None], "x", MANY),
    "allowed_tokens_fn": (5, "x"), "choose_fn": (5, "x"),
    "extra": (5, [1]),
    "tenant": (5, "x" * 257), "cache_salt": ("", 5, "x" * 10_000_000), "ttft_ms": (0, -1, NAN, HUGE), "tpot_ms": (0,
    INF),
    "detokenize": (1, "yes", None), "ignore_eos": (1,), "include_stop_str_in_output": ("",),
    "skip_special_tokens": (0,),
    "no_such_parameter": (1,), "x" * 1_000_000: (1,),
}  # fmt: skip


def table():
    for name, values in NUMBERS.items():
        yield from ((name, value) for value in (*values, *FLOATS))
    for name, values in WHOLE.items():
        extra = (NAN, INF, "1", True, HUGE, [1]) if name != "top_k" else (NAN, INF, "1", True, [1])
        yield from ((name, value) for value in (*values, *extra))
    yield from ((name, value) for name, values in OTHERS.items() for value in values)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_dir(folder, "qwen3", vocab_size=VOCAB)
    options = dict(skip_tokenizer_init=True, dtype="float32", num_kvcache_blocks=60, max_num_seqs=8)
    with LLM(str(folder), max_num_batched_tokens=64, **options) as made:
        yield made


GOLDEN = [
    ([5, 9, 2], dict(temperature=0, max_tokens=60, ignore_eos=True)),
    ([7] * 20, dict(temperature=1.2, seed=3, max_tokens=60, ignore_eos=True, presence_penalty=0.5)),
]


def test_every_bad_value_is_refused_by_name_and_disturbs_nobody(llm):
    want = [o.tokens for o in llm.generate([p for p, _ in GOLDEN], [SamplingParams(**a) for _, a in GOLDEN], False)]
    golden = [Tracked(p, SamplingParams(**a), None) for p, a in GOLDEN]
    for t in golden:
        t.add_to(llm.engine)
    cases, slow, wrong = list(table()), [], []
    for i, (name, value) in enumerate(cases):
        if i % (len(cases) // 50) == 0:
            llm.engine.step()
        start = time.thread_time()
        try:
            Tracked([1, 2, 3], params_for({name: value}, 1)[0], None).add_to(llm.engine)
        except RequestError as e:
            if e.param != name or name[:40] not in str(e) or len(str(e)) > 600:
                wrong.append((name[:40], str(e)[:200], (e.param or "")[:40]))
        except Exception as e:
            wrong.append((name[:40], type(value).__name__, f"{type(e).__name__}: {e}"[:200]))
        else:
            wrong.append((name[:40], type(value).__name__, "was accepted"))
        if time.thread_time() - start > 2:
            slow.append((name[:40], type(value).__name__))
    assert not wrong, "\n".join(map(str, wrong))
    assert not slow
    while llm.engine.busy:
        llm.engine.step()
    assert [t.output().tokens for t in golden] == want
    assert len(cases) > 200


@pytest.mark.parametrize(
    ("requested", "param"),
    [
        (dict(n=4, max_tokens=2000), "max_tokens"), (dict(n=9), "n"),
        (dict(min_tokens=9, max_tokens=5), "min_tokens"), (dict(stop="x", detokenize=False), "stop"),
        (dict(stop="x"), "stop"), (dict(bad_words=["x"]), "bad_words"), (dict(typical_p=0.5), "typical_p"),
        (dict(mirostat_tau=2.0), "mirostat_tau"), (dict(temperature=0, temperature_schedule=LINEAR),
        "temperature_schedule"),
        (dict(choose_fn=lambda x, ids: 1, logprobs=1), "choose_fn"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(llm, requested, param):
    """n x max_tokens beyond the pool, text without a tokenizer, a sampler that reads it not."""
    with pytest.raises(RequestError) as e:
        llm.generate([1, 2, 3], SamplingParams(**requested), use_tqdm=False)
    assert e.value.param == param and param in str(e.value)


def test_ids_are_those_of_the_model_and_not_of_the_tokenizer(llm):
    """The last id of the logits is in the vocabulary even if the tokenizer has no token for it.  The next id is not."""
    last = VOCAB - 1
    for requested in (
        dict(allowed_token_ids=[last]),
        dict(bad_words=[[last]]),
        dict(logit_bias={last: 100}),
        dict(stop_token_ids=[last]),
    ):
        out = llm.generate([last, 1], SamplingParams(temperature=0, max_tokens=2, **requested), use_tqdm=False)[0]
        assert out.error is None
    with pytest.raises(RequestError, match=f"{VOCAB}.*0 to {last}"):
        llm.generate([VOCAB], SamplingParams(), use_tqdm=False)


def test_large_values_that_can_be_served_are_answered(llm):
    """As many as the limits allow, numpy numbers, ranges."""
    start = time.thread_time()
    for requested in (
        dict(allowed_token_ids=range(VOCAB)),
        dict(allowed_token_ids=np.arange(VOCAB)),
        dict(bad_words=[[1] * 16] * 256),
        dict(logit_bias=dict.fromkeys(range(VOCAB), 1.0)),
        dict(top_k=10**18),
        dict(top_p=np.float32(0.5)),
        dict(temperature=np.float64(2)),
        dict(seed=np.int64(-(2**63))),
        dict(top_p=1e-300),
        dict(temperature=1e-300),
        dict(no_repeat_ngram_size=64),
        dict(stop_token_ids=np.arange(20)),
        dict(repetition_penalty=1e6),
    ):
        out = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, **requested), use_tqdm=False)[0]
        assert out.error is None and len(out.tokens) >= 1, requested
    assert time.thread_time() - start < 13 * 2


def test_when_nothing_is_left_to_draw_that_request_ends_alone(llm):
    plain = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    want = llm.generate([4, 5], plain, use_tqdm=False)[0].tokens
    nothing = SamplingParams(allowed_token_ids=[7], bad_words=[[7]])
    a, b = llm.generate([[4, 5], [4, 5]], [plain, nothing], use_tqdm=False)
    assert a.tokens == want and b.finish_reason == "error" and "allow no token" in b.error


def test_another_end_changes_nothing_else_and_is_refused_below_min_tokens():
    params = SamplingParams(min_tokens=3, stop=["x"], logit_bias={5: 1.0}, extra={}, temperature=0.5)
    shorter = params.ending_after(7)
    assert (shorter.max_tokens, params.max_tokens) == (7, 64)
    assert dataclasses.replace(shorter, max_tokens=64) == params
    for most in (0, -1, 2):
        with pytest.raises(RequestError, match=r"max_tokens=.*min_tokens=3"):
            params.ending_after(most)


class WithoutTruth:
    def __bool__(self):
        raise ValueError("neither true nor false")


class WithoutEquality:
    __hash__ = None

    def __eq__(self, other):
        raise ValueError("neither equal nor different")


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, 2]), np.zeros((2, 2)), np.array(["a", "b"]), np.array(2), torch.tensor([1, 2]), WithoutTruth(),
        WithoutEquality(),
    ],
    ids=lambda value: f"{type(value).__name__}{list(getattr(value, 'shape', ''))}",
)  # fmt: skip
def test_a_value_that_cannot_be_tested_or_compared_is_refused_by_the_name_of_its_field(value):
    read = []
    for field in dataclasses.fields(SamplingParams):
        try:
            params = SamplingParams(**{field.name: value})
        except RequestError as error:
            assert field.name in str(error)
        else:
            read.append(field.name)
            params.changed_parameters()
    assert set(read) <= {"stop_token_ids", "allowed_token_ids"}, "only lists of numbers may be arrays"
