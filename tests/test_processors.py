"""What is particular to the built-in processors; the conformance kit tests the rest."""

import pytest
import torch

from minivllm.core.interfaces.sampling import SamplingContext
from minivllm.core.request import SamplingParams
from minivllm.errors import RequestError
from minivllm.plugins.processor.logit_bias import MAX_ENTRIES, LogitBias
from minivllm.plugins.processor.penalties import Penalties
from minivllm.testing.processor import ProcessorConformance, standard_reference
from minivllm.testing.sampling_rows import Seq

VOCAB = 30
CTX = SamplingContext(VOCAB, 24, ())


def test_repetition_penalty_is_transformers_own():
    from transformers import RepetitionPenaltyLogitsProcessor

    suite = ProcessorConformance()
    suite.plugin, suite.vocab = "penalties", VOCAB
    tokens, logits = torch.randint(0, VOCAB, (10,)), torch.randn(VOCAB)
    want = RepetitionPenaltyLogitsProcessor(1.7)(tokens[None], logits[None].clone())[0]
    params, ids = SamplingParams(repetition_penalty=1.7), tuple(tokens.tolist())
    torch.testing.assert_close(suite.alone(Seq(params, ids[:4], ids[4:], logits)), want)
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
