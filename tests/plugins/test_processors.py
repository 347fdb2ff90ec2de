"""Tests of the built-in processors alone.  The conformance kit tests the rest."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import minivllm
from minivllm.core.engine.request import Request
from minivllm.core.engine.request_checks import binders
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.sampling import Processor, SamplingContext
from minivllm.errors import RequestError
from minivllm.frontend.prompts import with_token_ids
from minivllm.plugins.processor.logit_bias import MAX_ENTRIES, LogitBias
from minivllm.plugins.processor.penalties import Penalties
from minivllm.runtime.text.tokenizer import load_tokenizer
from minivllm.server.link.client import params_to_json
from minivllm.testing.processor import ProcessorConformance, standard_reference
from minivllm.testing.sampling_rows import SampledSeq, Stage
from minivllm.testing.session import run

VOCAB = 30
CTX = SamplingContext(VOCAB, 24, ())


def test_repetition_penalty_is_transformers_own():
    from transformers import RepetitionPenaltyLogitsProcessor

    suite = ProcessorConformance()
    suite.plugin, suite.vocab = "penalties", VOCAB
    tokens, logits = torch.randint(0, VOCAB, (10,)), torch.randn(VOCAB)
    want = RepetitionPenaltyLogitsProcessor(1.7)(tokens[None], logits[None].clone())[0]
    params, ids = SamplingParams(repetition_penalty=1.7), tuple(tokens.tolist())
    torch.testing.assert_close(suite.alone(SampledSeq(params, ids[:4], ids[4:], logits)), want)
    reference = standard_reference(Penalties.reads, params, logits.double(), ids[:4], ids[4:])
    torch.testing.assert_close(reference.float(), want)


def test_the_reference_counts_the_output_only_for_presence_and_frequency():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    got = standard_reference(Penalties.reads, params, torch.zeros(VOCAB).double(), [1, 1, 2], [7, 7, 8])
    assert got[[1, 2, 7, 8]].tolist() == [0.0, 0.0, -1.0, -0.75]


def test_neutral_parameters_do_not_bind():
    assert Penalties(None, CTX).bind(SamplingParams(), 3) is None
    assert LogitBias(None, CTX).bind(SamplingParams(), 3) is None
    assert LogitBias(None, CTX).bind(SamplingParams(logit_bias={}), 3) is None
    assert LogitBias(None, CTX).bind(SamplingParams(logit_bias={4: 0}), 3) is None


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


BANS = ("allowed_tokens", "bad_words", "no_repeat_ngram", "temperature_schedule")


@pytest.mark.parametrize("plugin", BANS)
def test_what_bans_or_divides_is_exact(plugin):
    """The kit's other tests of these are slow tests."""
    outcomes = run([("processor", f"minivllm/{plugin}")], select="test_logits_are_those_of_the_float64_reference")
    assert [(o.status, o.text) for o in outcomes] == [("passed", "")]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ngrams_that_are_banned_are_those_of_transformers(n):
    from transformers import NoRepeatNGramLogitsProcessor

    suite = ProcessorConformance()
    suite.plugin, suite.vocab = "no_repeat_ngram", VOCAB
    for seed in range(20):
        tokens = torch.randint(0, 4, (3 + seed,), generator=torch.Generator().manual_seed(seed))
        logits, ids = torch.randn(VOCAB), tuple(tokens.tolist())
        want = NoRepeatNGramLogitsProcessor(n)(tokens[None], logits[None].clone())[0]
        got = suite.alone(SampledSeq(SamplingParams(no_repeat_ngram_size=n), ids[:2], ids[2:], logits))
        assert torch.equal(got, want), ids


@pytest.mark.parametrize("penalty", [0.5, 1.2, 30.0])
def test_the_penalty_of_the_prompt_is_that_of_transformers(penalty):
    """For any output, only the logits of tokens of the prompt change, and -inf stays."""
    from transformers import EncoderRepetitionPenaltyLogitsProcessor

    suite = ProcessorConformance()
    suite.plugin, suite.vocab = "prompt_penalty", VOCAB
    for seed in range(20):
        rng = torch.Generator().manual_seed(seed)
        tokens, logits = torch.randint(0, VOCAB, (4 + seed,), generator=rng), 3 * torch.randn(VOCAB, generator=rng)
        logits[seed % VOCAB] = -torch.inf
        prompt, output = tokens[: 2 + seed // 2], tokens[2 + seed // 2 :]
        want = EncoderRepetitionPenaltyLogitsProcessor(penalty, prompt[None])(tokens[None], logits[None].clone())[0]
        requested = SamplingParams(encoder_repetition_penalty=penalty)
        got = suite.alone(SampledSeq(requested, tuple(prompt.tolist()), tuple(output.tolist()), logits))
        torch.testing.assert_close(got, want)


def test_a_processor_sees_the_prompts_ids_and_cannot_write_to_them():
    """The ids are the request's in all cases.  A processor that writes to them ends its own request."""
    seen = []

    class Looks(Processor):
        reads = frozenset()

        def bind_prompt(self, params, prompt):
            seen.append(prompt.tolist())
            if len(prompt) == 2:
                prompt[0] = 1

        def apply(self, logits, rows, state):
            raise AssertionError("no row was bound")

    (binder,) = binders([("acme/looks", Looks(None, CTX))])
    for ids in ([5, 6, 7], [5, 6]):
        request = Request("a", np.array(ids, np.int32), SamplingParams(), 0.0)
        if len(ids) == 3:
            assert binder.bind(request) is None
        else:
            with pytest.raises(RequestError, match=r"acme/looks failed on this request: .*read-only"):
                binder.bind(request)
        assert request.prompt.tolist() == ids
    assert seen == [[5, 6, 7], [5, 6]]


def test_bad_words_that_are_banned_are_those_of_transformers():
    """Which looks for them in the prompt too: here it is one token that is in none."""
    from transformers import NoBadWordsLogitsProcessor

    suite = ProcessorConformance()
    suite.plugin, suite.vocab = "bad_words", VOCAB
    rng = torch.Generator().manual_seed(2)
    for _ in range(30):
        words = [
            torch.randint(0, 4, (int(k),), generator=rng).tolist() for k in torch.randint(1, 4, (3,), generator=rng)
        ]
        tokens, logits = [9, *torch.randint(0, 4, (6,), generator=rng).tolist()], torch.randn(VOCAB)
        want = NoBadWordsLogitsProcessor(words, eos_token_id=29)(torch.tensor([tokens]), logits[None].clone())[0]
        got = suite.alone(SampledSeq(SamplingParams(bad_words=words), (9,), tuple(tokens[1:]), logits))
        assert torch.equal(got, want), (words, tokens)


def test_words_are_banned_as_they_begin_a_text_and_after_a_space():
    """Each spelling of a word is banned as tokens, and ids are banned unchanged.

    Words without a tokenizer are refused.
    """
    tokenizer = load_tokenizer(Path(minivllm.__file__).parent / "pocket" / "model")
    got = with_token_ids(SamplingParams(bad_words=["fox", [5, 6], " red"]), tokenizer).bad_words
    spelt = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("fox", " fox", " red")]
    assert set(spelt) <= set(got) and (5, 6) in got and len(got) == len(set(got))
    same = SamplingParams(bad_words=[[5, 6]])
    assert with_token_ids(same, None) is same
    for words in (["fox"], [[1], "fox"]):
        with pytest.raises(RequestError, match=r"bad_words.*tokenizer"):
            with_token_ids(SamplingParams(bad_words=words), None)
    for word in ("", "  ", "x" * 257, "\ud800"):
        with pytest.raises(RequestError, match="bad_words"):
            with_token_ids(SamplingParams(bad_words=[word]), tokenizer)


def test_bans_and_schedules_reach_an_engine_elsewhere_and_functions_are_refused():
    requested = dict(
        bad_words=[[5, 6], (7,)],
        allowed_token_ids=range(9),
        no_repeat_ngram_size=3,
        typical_p=0.5,
        mirostat_eta=0.2,
        temperature_schedule=dict(kind="linear", start=1.5, end=0.5, tokens=9),
    )
    wire = json.loads(json.dumps(params_to_json(SamplingParams(**requested))))
    assert wire == {**requested, "bad_words": [[5, 6], [7]], "allowed_token_ids": list(range(9))}
    assert params_to_json(SamplingParams.make(**wire)) == wire
    with pytest.raises(RequestError, match="logits_processors") as e:
        params_to_json(SamplingParams(logits_processors=[lambda ids, x: x]))
    assert e.value.param == "logits_processors"


def test_a_word_that_is_banned_is_not_written():
    with minivllm.LLM("pocket", dtype="float32", num_kvcache_blocks=60, max_num_seqs=8) as llm:
        plain = llm.generate("Once", SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)[0].text
        word = max(plain.split(), key=len).strip(".,!?\"'")
        banned = SamplingParams(temperature=0, max_tokens=40, bad_words=[word])
        text = llm.generate("Once", banned, use_tqdm=False)[0].text
    assert word in plain and word not in text and text


@pytest.mark.parametrize(
    ("schedule", "at"),
    [
        (dict(kind="linear", start=2.0, end=0.5, tokens=10), {0: 2.0, 5: 1.25, 10: 0.5, 50: 0.5}),
        (dict(kind="cosine", start=2.0, end=0.5, tokens=10), {0: 2.0, 5: 1.25, 10: 0.5, 50: 0.5}),
        (dict(kind="entropy", low=0.5, high=2.0), {0: 2.0, 9: 2.0}),
    ],
)
def test_a_schedule_is_where_it_should_be(schedule, at):
    """Logits of two tokens that differ by 1 then differ by 1 / T.

    All other tokens are equal, so the entropy is the largest possible one, to 1e-3.
    """
    suite = ProcessorConformance()
    suite.plugin, suite.vocab = "temperature_schedule", 3000
    logits = torch.zeros(3000)
    logits[7] = 1.0
    for t, temperature in at.items():
        s = SampledSeq(SamplingParams(temperature_schedule=schedule), (1, 2), tuple(range(t)), logits)
        stage = Stage(suite, 1, max_len=64)
        stage.join([0], [s])
        got = stage.apply([0], logits[None])[0]
        assert float(got[7]) == pytest.approx(1 / temperature, rel=1e-3), t
