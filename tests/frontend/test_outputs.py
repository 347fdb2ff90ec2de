"""The client's view of a sequence: deltas, stops, log-probabilities, and outputs that are objects and mappings."""

import copy
import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_vocabulary import EOS, IDS, TOKENIZER

from minivllm.core.engine.scores import Scores
from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import RequestError
from minivllm.runtime.text.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SequenceText,
    TokenLogprobs,
)


def ids_of(*tokens):
    return [TOKENIZER.token_id(t) for t in tokens]


def feed_in_cuts(sequence, ids, data, **last):
    deltas, i = [], 0
    while True:
        n = data.draw(st.integers(1, 5))
        final = i + n >= len(ids)
        deltas.append(sequence.feed(ids[i : i + n], final, **(last if final else {})))
        i += n
        if final or deltas[-1].stopped is not None:
            return deltas


@settings(max_examples=300, deadline=None)
@given(IDS, st.lists(st.text(alphabet="ab c", min_size=1, max_size=4), max_size=3), st.data())
def test_deltas_joined_are_the_text_up_to_the_first_stop(ids, stops, data):
    include, min_tokens = data.draw(st.booleans()), data.draw(st.integers(0, 3))
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens)
    sequence = SequenceText(TOKENIZER, params)
    deltas = feed_in_cuts(sequence, ids, data)
    assert "".join(d.text for d in deltas) == sequence.text == sequence.output().text
    assert (
        sum(d.used for d in deltas) == len(sequence.token_ids) and sequence.token_ids == ids[: len(sequence.token_ids)]
    )
    # the definition: text grows by characters, until it ends with a stop string after min_tokens
    ends = [len(TOKENIZER.decode(ids[:k])) for k in range(len(ids) + 1)]
    text, start = TOKENIZER.decode(ids), ends[min(min_tokens, len(ids))]
    at = next((e for e in range(start + 1, len(text) + 1) if any(text[:e].endswith(s) for s in stops)), None)
    if at is None:
        assert sequence.finish_reason is None and sequence.token_ids == ids and sequence.text == text
        return
    assert sequence.finish_reason == "stop" and text[:at].endswith(sequence.stop_reason)
    assert len(sequence.token_ids) == next(k for k, e in enumerate(ends) if e >= at)
    want = text[: at if include else at - len(sequence.stop_reason)]
    assert sequence.text == want or (min_tokens and not include and len(want) < start)
    assert sequence.feed(ids, True) == ("", None, 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size), max_size=20), st.booleans(), st.data())
def test_the_stop_token_is_kept_in_the_ids_and_left_out_of_the_text(ids, include, data):
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=data.draw(st.booleans()))
    sequence = SequenceText(TOKENIZER, params)
    feed_in_cuts(sequence, [*ids, EOS], data, stop_token=True)
    sequence.finish("stop")
    shown = [*ids, EOS] if include else ids
    assert sequence.text == TOKENIZER.decode(shown, params.skip_special_tokens)
    assert sequence.token_ids == [*ids, EOS]
    assert sequence.output().finish_reason == "stop" and sequence.output().stop_reason is None


def test_half_a_character_waits_and_is_given_out_at_the_end():
    sequence = SequenceText(TOKENIZER, SamplingParams())
    assert sequence.feed(ids_of("ðŁĻ")).text == ""
    assert sequence.feed(ids_of("Ĥa")).text == "🙂a"
    assert sequence.feed(ids_of("ðŁĻ")).text == ""
    assert sequence.feed([], final=True).text == "\ufffd"
    sequence.finish("abort")
    assert (sequence.text, sequence.output().finish_reason) == ("🙂a\ufffd", "abort")


def test_a_stop_string_beats_the_stop_token_behind_it_and_says_where_it_ended():
    sequence = SequenceText(TOKENIZER, SamplingParams(stop=["ca"]))
    got = sequence.feed([*ids_of("ab", "c", "ab"), EOS], True, stop_token=True)
    assert got == ("ab", "ca", 3) and sequence.token_ids == ids_of("ab", "c", "ab")
    sequence.finish("stop", EOS)
    assert sequence.output().stop_reason == "ca"


def test_without_detokenization_no_text_is_made():
    class Poison:
        def __getattr__(self, name):
            raise AssertionError(name)

    for tokenizer, params in (
        (Poison(), SamplingParams(detokenize=False, logprobs=1)),
        (None, SamplingParams(logprobs=1)),
    ):
        sequence = SequenceText(tokenizer, params)
        delta = sequence.feed([1, 2], True, logprobs=[TokenLogprobs(-1.0, 1, [1], [-1.0])] * 2)
        assert delta == ("", None, 2) and sequence.output().text == ""
        assert sequence.logprobs[0][1].decoded_token is None
    with pytest.raises(RequestError, match="stop"):
        SequenceText(None, SamplingParams(stop="x"))


def test_logprobs_are_dicts_of_the_chosen_and_the_best():
    a, b, ab, space_a = ids_of("a", "b", "ab", "Ġa")
    sequence = SequenceText(TOKENIZER, SamplingParams(logprobs=2))
    sequence.feed([a], logprobs=[TokenLogprobs(-3.0, 9, [b, ab, space_a], [-0.5, -1.0, -2.0])])
    sequence.feed([b], True, logprobs=[TokenLogprobs(-0.5, 1, [b, ab, space_a], [-0.5, -1.0, -2.0])])
    first, second = sequence.output().logprobs
    assert first == {a: Logprob(-3.0, 9, "a"), b: Logprob(-0.5, 1, "b"), ab: Logprob(-1.0, 2, "ab")}
    assert next(iter(first)) == a
    assert second == {b: Logprob(-0.5, 1, "b"), ab: Logprob(-1.0, 2, "ab")}
    assert math.isclose(sequence.output().cumulative_logprob, -3.5)
    tied = SequenceText(TOKENIZER, SamplingParams(logprobs=2))  # the chosen keeps its own rank where the best are equal
    tied.feed([b], logprobs=[TokenLogprobs(-0.5, 1, [ab, b], [-0.5, -0.5])])
    assert tied.logprobs == [{b: Logprob(-0.5, 1, "b"), ab: Logprob(-0.5, 1, "ab")}]
    plain = SequenceText(TOKENIZER, SamplingParams())
    plain.feed([a], logprobs=[TokenLogprobs(-3.0, 9)])
    assert plain.output().logprobs is None and plain.output().cumulative_logprob is None
    with pytest.raises(ValueError, match="one each"):
        sequence.feed([a], logprobs=[])


def test_logprobs_end_with_the_tokens_at_a_stop_string():
    sequence = SequenceText(TOKENIZER, SamplingParams(stop="b", logprobs=0))
    sequence.feed(ids_of("a", "b", "c"), logprobs=[TokenLogprobs(-1.0, 1)] * 3)
    assert len(sequence.token_ids) == len(sequence.logprobs) == 2 and sequence.cumulative_logprob == -2.0


def test_a_snapshot_does_not_change_when_more_is_fed():
    sequence = SequenceText(TOKENIZER, SamplingParams())
    sequence.feed(ids_of("a"))
    before = sequence.output()
    sequence.feed(ids_of("b"))
    assert (before.text, before.token_ids) == ("a", ids_of("a")) and sequence.output().text == "ab"


def test_outputs_are_objects_and_mappings():
    completion = CompletionOutput(0, "hi", [5, 6], finish_reason="stop", stop_reason=6)
    out = RequestOutput("r1", "say", [1, 2], [completion], True, RequestMetrics(1.0, 1.5, 2.0, cached_tokens=16))
    assert out["prompt"] == out.prompt == "say" and out["text"] == out.outputs[0].text == "hi"
    assert out["tokens"] == [5, 6] and out["finished"] is True and out["finish_reason"] == "stop"
    assert out["num_cached_tokens"] == out.num_cached_tokens == 16 and out["stop_reason"] == 6
    assert out["outputs"][0]["text"] == "hi" and completion["tokens"] == completion["token_ids"] == [5, 6]
    assert "text" in out and "nope" not in out and out.get("nope", 3) == 3 and set(out) == set(dict(out))
    with pytest.raises(KeyError, match=r"'txt'.*finish_reason"):
        out["txt"]
    assert json.loads(json.dumps(out))["outputs"][0]["text"] == "hi"
    failed = RequestOutput("r2", None, [1], [], True, error="no room")
    assert (failed["text"], failed["tokens"], failed["finish_reason"], failed["error"]) == ("", [], "error", "no room")


def scored():
    """An answer with all that an output can hold, its log-probabilities not made yet."""
    text = SequenceText(None, SamplingParams(logprobs=1))
    text.feed([3, 5], logprobs=[TokenLogprobs(-0.5, 1, [3], [-0.5]), TokenLogprobs(-2.0, 2, [4], [-0.25])])
    return RequestOutput("r", None, [1], [text.output()], True, RequestMetrics(1.0), None, [None, {1: Logprob(-1.0)}])


PLAIN = {
    "request_id": "r", "prompt": None, "text": "", "tokens": [3, 5], "finished": True,
    "prompt_logprobs": [None, {"1": [-1.0, None, None]}],
}  # fmt: skip
WAYS = {
    "dumps": json.dumps,
    "indented": lambda out: json.dumps(out, indent=1),  # json's encoder in Python
    "sorted": lambda out: json.dumps(out, sort_keys=True),
    "of a dict": lambda out: json.dumps({**out}),
    "united": lambda out: json.dumps(out | {}),
    "united with a dict": lambda out: json.dumps({} | out),
    "of a copy": lambda out: json.dumps(copy.deepcopy(out)),
    "of another": lambda out: json.dumps(dataclasses.replace(out, finished=True)),
    "pickled": lambda out: json.dumps(pickle.loads(pickle.dumps(out))),
    "in a list": lambda out: json.dumps([out])[1:-1],
    "items": lambda out: json.dumps(dict(out.items())),
    "by name": lambda out: json.dumps({name: out.get(name) for name in out}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_write_an_output_as_json_writes_all_of_it(way):
    out, want = scored(), scored()
    found = json.loads(WAYS[way](out))
    assert set(found) == set(out) and found | PLAIN == found
    inner = found["outputs"][0]
    assert set(inner) == set(out.outputs[0]) and inner["token_ids"] == inner["tokens"] == [3, 5]
    assert [set(entry) for entry in inner["logprobs"]] == [{"3"}, {"5", "4"}]
    assert found["metrics"]["arrival_time"] == 1.0 and out == want and (out != want) is False


def test_a_computed_entry_follows_the_fields_it_is_computed_from():
    out = scored()
    out.outputs[0].finish_reason = "length"
    assert out["finish_reason"] == (out | {})["finish_reason"] == dict(out)["finish_reason"] == "length"
    out.outputs.clear()
    assert (out["text"], out["tokens"], out["finish_reason"]) == ("", [], None)


def test_an_attribute_of_an_output_is_its_entry_however_it_is_set():
    out = scored()
    out.prompt, out["error"] = "said", "none"
    out.outputs[0].text = "new"
    assert (out["prompt"], out.error, out["text"], out.text) == ("said", "none", "new", "new")
    assert json.loads(json.dumps(out))["text"] == "new" and len(out) == len(list(out)) == len(out.keys())
    with pytest.raises(AttributeError, match="text"):
        out.text = "other"
    with pytest.raises(AttributeError, match="nope"):
        _ = out.nope


def test_entries_of_log_probabilities_are_made_when_they_are_looked_at_and_are_those_of_the_snapshot():
    text = SequenceText(None, SamplingParams(logprobs=1))
    spelt = []
    text._spell = lambda i: spelt.append(i) or str(i)
    text.feed([3, 5], logprobs=[TokenLogprobs(-0.5, 1, [3], [-0.5]), TokenLogprobs(-2.0, 2, [4], [-0.25])])
    before = text.output()
    text.feed([7], logprobs=[TokenLogprobs(-1.0, 1, [7], [-1.0])])
    assert not spelt and before.cumulative_logprob == -2.5
    want = [{3: Logprob(-0.5, 1, "3")}, {5: Logprob(-2.0, 2, "5"), 4: Logprob(-0.25, 1, "4")}]
    assert before.logprobs == want == before["logprobs"] and before.logprobs is before.logprobs
    assert pickle.loads(pickle.dumps(text.output())).logprobs == [*want, {7: Logprob(-1.0, 1, "7")}]
    assert CompletionOutput().logprobs is None and spelt == [3, 5, 4, 7]


entries = st.lists(
    st.builds(
        lambda chosen, rank, top: TokenLogprobs(chosen, rank, [t for t, _ in top], [v for _, v in top]),
        st.floats(-50, 0),
        st.integers(1, 99),
        st.lists(st.tuples(st.integers(0, 999), st.floats(-50, 0)), max_size=4),
    ),
    max_size=6,
)


@given(entries, entries, st.slices(12))
def test_scores_as_columns_are_the_list_of_entries(first, more, at):
    scores = Scores(first)
    scores.extend(more)
    scores.extend(Scores(more)[1:])
    want = [*first, *more, *more[1:]]
    assert list(scores) == want and list(scores[at]) == want[at] and len(scores[at]) == len(want[at])
    assert not want or scores[-1] == want[-1]
    both = Scores(want[:3])
    both.extend(scores[at])
    assert list(both) == [*want[:3], *want[at]]
