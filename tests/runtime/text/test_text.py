"""One way from token ids to text: an engine's sink and a server's frames give the same text for the same tokens."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabulary import EOS, IDS, TOKENIZER

from minivllm.core.engine.request import Seq
from minivllm.core.engine.scores import TokenLogprobs
from minivllm.core.interfaces.finish import Finish
from minivllm.core.interfaces.params import SamplingParams
from minivllm.frontend.requests import Tracked
from minivllm.frontend.text import RequestText
from minivllm.server.link.streams import Stream

ENDS = [Finish("stop"), Finish("stop", 7), Finish("length"), Finish("abort"), Finish("error")]


def stream_of(params):
    received = []
    stream = Stream(1, "r", 1, params, TOKENIZER, lambda s: None, lambda s, sample, stop: received.append(stop), set())
    return stream, received


def seq_of(tracked, sample):
    seq = Seq(sample, tracked.request, sample, 0)
    tracked.request.sequences.append(seq)
    return seq


@settings(max_examples=200, deadline=None)
@given(IDS, st.lists(st.text(alphabet="ab c", min_size=1, max_size=4), max_size=3), st.sampled_from(ENDS), st.data())
def test_tokens_have_the_same_text_whichever_way_they_come_and_however_they_are_cut(ids, stops, end, data):
    include = data.draw(st.booleans())
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, logprobs=data.draw(st.sampled_from([None, 0]))
    )
    ids = [*ids, 7 if end.stop else EOS] if end.reason == "stop" else ids
    pieces = []
    tracked = Tracked([1], params, TOKENIZER, stream=pieces.append)
    seq = seq_of(tracked, 0)
    stream, cut = stream_of(params)
    read = []
    stopped, at = None, 0
    while stopped is None:
        n = data.draw(st.integers(1, 5))
        new, at = ids[at : at + n], at + n
        ended = end if at >= len(ids) else None
        seq.logprobs = [TokenLogprobs(-1.0, 1)] * min(at, len(ids))
        stopped = tracked._sink(seq, new, ended)
        stream.feed(0, new, *(ended or (None, None)))
        if data.draw(st.booleans()):
            read += stream.taken()
        if ended is not None:
            break
    read += stream.taken()
    here, there = tracked.texts[0], stream.texts[0]
    assert (here.text, here.token_ids) == (there.text, there.token_ids)
    assert (here.finish_reason, here.stop_reason) == (there.finish_reason, there.stop_reason) != (None, None)
    assert "".join(p.delta for p in pieces) == "".join(p.text for p in read) == here.text
    assert [t for p in pieces for t in p.token_ids] == [t for p in read for t in p.token_ids] == here.token_ids
    assert (read[-1].finish_reason, read[-1].stop_reason) == (here.finish_reason, here.stop_reason)
    assert cut == ([stopped] if stopped is not None and ended is None else [])
    assert not tracked.open and not stream.open and stream.completion_tokens == tracked.completion_tokens


@pytest.mark.parametrize("ended", [None, Finish("stop"), Finish("abort")])
def test_a_sample_that_has_ended_takes_nothing_more(ended):
    text = RequestText(SamplingParams(n=2), TOKENIZER, 2, time.monotonic())
    text.accept(0, [5, 6], Finish("length"))
    before = text.texts[0].output()
    assert text.accept(0, [5, 6], ended) is None and text.texts[0].output() == before and text.open == {1}


def test_the_answer_is_the_first_samples_until_their_order_is_known():
    text = RequestText(SamplingParams(n=2, best_of=3), TOKENIZER, 3, time.monotonic())
    for sample in range(3):
        text.accept(sample, [5] * (sample + 1), Finish("length"))
    assert [len(t.token_ids) for t in text.answer] == [1, 2]
    text.order = [2, 0]
    assert [len(t.token_ids) for t in text.answer] == [3, 1] and text.completion_tokens == 6


def test_a_stream_keeps_scores_in_columns_and_its_samples_none():
    stream, _ = stream_of(SamplingParams(logprobs=1))
    stream.feed(0, [5], "length")
    assert stream.scored is not None and stream.texts[0].logprobs is None
