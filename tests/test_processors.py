"""Penalties and bias against float64, and what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.core.interfaces.sampling import Rows, SamplingContext
from minivllm.core.request import SamplingParams
from minivllm.errors import RequestError
from minivllm.plugins.processor.logit_bias import MAX_ENTRIES, LogitBias
from minivllm.plugins.processor.penalties import Penalties

VOCAB, MAX_LEN = 30, 24
CTX = SamplingContext(VOCAB, MAX_LEN, ())


def apply(processor, logits, params, tokens, prompt, position, slots=None):
    """One step over rows that bound; ``tokens`` [S, L] is the history, stale entries included."""
    n = len(params)
    slots = torch.arange(n) if slots is None else slots
    size = len(tokens)
    state = {
        name: torch.full((size, *c.shape), c.fill, dtype=getattr(torch, c.dtype))
        for name, c in processor.columns().items()
    }
    variant = 0
    for slot, p in zip(slots, params, strict=True):
        row = processor.bind(p, 1)
        variant |= row.variant
        for name, value in row.values.items():
            state[name][slot] = torch.as_tensor(value)
    zero = torch.zeros(n, dtype=torch.long)
    rows = Rows(slots, position, prompt, zero, zero, variant, tokens, int(position.max()))
    processor.apply(logits, rows, state)


def penalised64(logits, history, prompt, p):
    out = logits.double().numpy().copy()
    for t in set(history):
        out[t] = out[t] / p.repetition_penalty if out[t] > 0 else out[t] * p.repetition_penalty
    output = history[prompt:]
    for t in set(output):
        out[t] -= p.frequency_penalty * output.count(t) + p.presence_penalty
    return torch.tensor(out)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_penalties_are_those_of_the_float64_reference(data):
    n = data.draw(st.integers(1, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    tokens = torch.tensor(rng.integers(0, VOCAB, (n + 2, MAX_LEN)), dtype=torch.int32)
    position = torch.tensor([data.draw(st.integers(1, MAX_LEN)) for _ in range(n)])
    prompt = torch.tensor([data.draw(st.integers(1, int(e))) for e in position])
    slots = torch.tensor(rng.permutation(n + 2)[:n].copy())
    number = st.sampled_from([0.0, 0.3, -1.5, 2.0])
    params = [
        SamplingParams(
            repetition_penalty=data.draw(st.sampled_from([1.3, 0.8, 1.0001])),
            presence_penalty=data.draw(number),
            frequency_penalty=data.draw(number),
        )
        for _ in range(n)
    ]
    logits = torch.tensor(rng.normal(0, 4, (n, VOCAB)), dtype=torch.float32)
    logits[:, 5] = -float("inf")
    want = [
        penalised64(logits[i], tokens[s, : position[i]].tolist(), int(prompt[i]), params[i])
        for i, s in enumerate(slots)
    ]
    for i, s in enumerate(slots):  # what is stale may be anything, even no token at all
        tokens[s, position[i] :] = torch.tensor(rng.choice([-1, 2**30, 3], MAX_LEN - int(position[i])))
    apply(Penalties(None, CTX), logits, params, tokens, prompt, position, slots)
    torch.testing.assert_close(logits.double(), torch.stack(want), rtol=1e-5, atol=1e-5)


def test_repetition_penalty_is_transformers_own():
    from transformers import RepetitionPenaltyLogitsProcessor

    tokens = torch.randint(0, VOCAB, (2, 10), dtype=torch.int32)
    logits = torch.randn(2, VOCAB)
    want = RepetitionPenaltyLogitsProcessor(1.7)(tokens.long(), logits.clone())
    params = [SamplingParams(repetition_penalty=1.7)] * 2
    apply(Penalties(None, CTX), logits, params, tokens, torch.tensor([4, 1]), torch.tensor([10, 10]))
    torch.testing.assert_close(logits, want)


def test_presence_and_frequency_leave_the_prompt_alone():
    tokens = torch.tensor([[1, 1, 2, 7, 7, 8]], dtype=torch.int32)
    logits = torch.zeros(1, VOCAB)
    params = [SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)]
    apply(Penalties(None, CTX), logits, params, tokens, torch.tensor([3]), torch.tensor([6]))
    assert logits[0, [1, 2, 7, 8]].tolist() == [0.0, 0.0, -1.0, -0.75]


def test_neutral_parameters_do_not_bind():
    assert Penalties(None, CTX).bind(SamplingParams(), 3) is None
    assert LogitBias(None, CTX).bind(SamplingParams(), 3) is None
    assert LogitBias(None, CTX).bind(SamplingParams(logit_bias={}), 3) is None
    assert LogitBias(None, CTX).bind(SamplingParams(logit_bias={4: 0}), 3) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), min_size=1), min_size=1))
def test_bias_is_added_to_the_named_tokens_only(biases):
    biases = [b if any(b.values()) else {3: 1.0} for b in biases]
    n = len(biases)
    logits = torch.randn(n, VOCAB)
    want = logits.clone()
    for row, bias in zip(want, biases, strict=True):
        for t, b in bias.items():
            row[t] += b
    params = [
        SamplingParams(logit_bias={str(t) if i % 2 else t: v for t, v in b.items()}) for i, b in enumerate(biases)
    ]
    one = torch.ones(n, dtype=torch.long)
    apply(LogitBias(None, CTX), logits, params, torch.zeros(n, MAX_LEN, dtype=torch.int32), one, one)
    assert torch.equal(logits, want)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({VOCAB: 1.0}, "not in the vocabulary"),
        ({-1: 1.0}, "not in the vocabulary"),
        ({"x": 1.0}, "not in the vocabulary"),
        ({True: 1.0}, "not in the vocabulary"),
        ({1.5: 1.0}, "not in the vocabulary"),
        ({"9" * 5000: 1.0}, "not in the vocabulary"),
        ({1: 100.5}, "-100 to 100"),
        ({1: float("nan")}, "-100 to 100"),
        ({1: "a"}, "-100 to 100"),
        ({1: None}, "-100 to 100"),
        ({1: 1.0, "1": 2.0}, "twice"),
        ([1], "mapping"),
        (dict.fromkeys(range(MAX_ENTRIES + 1), 1.0), str(MAX_ENTRIES)),
    ],
)
def test_a_bad_bias_is_refused_by_name(bias, message):
    with pytest.raises(RequestError, match=message) as e:
        LogitBias(None, CTX).bind(SamplingParams(logit_bias=bias), 3)
    assert e.value.param == "logit_bias" and "logit_bias" in str(e.value)
