"""Marked text has one character for each tag token, and between the marks the text of each run decoded alone."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_helpers import TOKENIZERS, ids_of

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import ConfigError
from minivllm.runtime.text.detokenize import StopStrings
from minivllm.runtime.text.marks import MARK, MOST, NO_MARKS, MarkedDetokenizer, MarkedStops, Marks
from minivllm.runtime.text.outputs import SequenceText

TAGS = ("</s>", "<plain>", "<s>")


def expected(tokenizer, ids, skip, marks):
    """The definition: each run decoded alone, each mark as it is."""
    pieces = []
    for mark, run in groupby(ids, marks.get):
        run = list(run)
        pieces.append(mark * len(run) if mark else tokenizer.decode(run, skip))
    return "".join(pieces)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_each_run_between_marks_is_decoded_alone(name, data):
    tokenizer = TOKENIZERS[name]
    marks = Marks.of(TAGS, tokenizer).by_token
    tags = st.sampled_from(sorted(marks)).map(lambda token: [token])
    ids = [i for part in data.draw(st.lists(ids_of(tokenizer) | tags, max_size=8)) for i in part]
    skip = data.draw(st.booleans())
    text = SequenceText(tokenizer, SamplingParams(skip_special_tokens=skip), marks=marks)
    joined, at = "", 0
    while at < len(ids):
        count = data.draw(st.integers(1, 5))
        joined += text.extend(ids[at : at + count])
        at += count
    joined += text.feed([], final=True).text
    assert joined == text.marked == expected(tokenizer, ids, skip, marks)
    assert len(MARK.findall(joined)) == sum(i in marks for i in ids)
    spelled = {mark: tokenizer.decode([token], skip) for token, mark in marks.items()}
    assert text.text == text.output().text == MARK.sub(lambda found: spelled[found[0]], joined)
    assert not MARK.search(text.text) and text.token_ids == ids


def test_only_added_tokens_have_marks():
    tokenizer = TOKENIZERS["llama"]
    assert {"▁hello", "</s>", "<plain>"} <= set(tokenizer.backend.get_vocab())
    found = Marks.of(["▁hello", "</s>", "<other>", "<plain>", "</s>"], tokenizer)
    assert found.by_tag == {"</s>": "\udc81", "<plain>": "\udc83"}
    assert found.by_token == {tokenizer.token_id(tag): mark for tag, mark in found.by_tag.items()}
    assert found.spell("é\udc81x\udc83") == "é</s>x<plain>"
    assert Marks.of(TAGS, None) == Marks.of([], tokenizer) == NO_MARKS
    with pytest.raises(ConfigError, match="129 tags of a parser: expected at most 128"):
        Marks.of(map(str, range(MOST + 1)), tokenizer)


def test_a_part_of_a_character_before_a_mark_becomes_a_replacement():
    tokenizer = TOKENIZERS["byte_level"]
    marks = Marks.of(TAGS, tokenizer)
    end = tokenizer.token_id("</s>")
    text = MarkedDetokenizer(tokenizer, True, marks.by_token)
    first, *rest = "é".encode()
    mark = marks.by_tag["</s>"]
    assert [text.add([first]), text.add([end]), text.add(rest)] == ["", "\ufffd" + mark, "\ufffd"]
    assert text.finish() == ""


def test_sentencepiece_omits_the_space_at_the_beginning_of_each_run():
    tokenizer = TOKENIZERS["llama"]
    marks = Marks.of(TAGS, tokenizer)
    hello, plain = tokenizer.token_id("▁hello"), tokenizer.token_id("<plain>")
    text = MarkedDetokenizer(tokenizer, True, marks.by_token)
    assert text.add([hello, hello, plain, hello]) == f"hello hello{marks.by_tag['<plain>']}hello"


@pytest.mark.parametrize("stop", ["</s>", "s>", "ab</s>", "</s>ab", "b</", "x</s>"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_spells_a_tag_finds_its_mark(stop, include):
    tokenizer = TOKENIZERS["byte_level"]
    marks = Marks.of(TAGS, tokenizer)
    params = SamplingParams(stop=[stop], include_stop_str_in_output=include)
    text = SequenceText(tokenizer, params, marks=marks.by_token)
    spelled = "aab</s>abc"
    ids = [*b"aab", tokenizer.token_id("</s>"), *b"abc"]
    pieces = [text.feed([i], final=n == len(ids) - 1) for n, i in enumerate(ids)]
    end = spelled.find(stop)
    assert text.stop_reason == (stop if end >= 0 else None)
    whole = "".join(piece.text for piece in pieces)
    if end < 0:
        assert whole == "aab" + marks.by_tag["</s>"] + "abc"
    else:
        assert marks.spell(whole) == spelled[: end + len(stop) if include else end]
        assert (marks.by_tag["</s>"] in whole) == ("</s>" in marks.spell(whole))
    assert not MARK.search(text.text)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.text(alphabet="ab<>\udc80\udc81", max_size=6), max_size=12),
    st.lists(st.text(alphabet="ab<>", min_size=1, max_size=6), min_size=1, max_size=3),
    st.booleans(),
)
def test_stops_in_marked_text_are_those_of_the_spelled_text(pieces, stops, include):
    tags = dict(zip("\udc80\udc81", ("<a>", "<b>b"), strict=True))

    def spell(text):
        return text.translate({ord(mark): tag for mark, tag in tags.items()})

    marked, plain = MarkedStops(stops, include, tags), StopStrings(stops, include)
    out = want = ""
    stopped = None
    for piece in pieces:
        text, stopped = marked.push(piece)
        spelled, reference = plain.push(spell(piece))
        out += text
        want += spelled
        assert stopped == reference
        if stopped is not None:
            break
        assert want.startswith(spell(out)) and "".join(pieces).startswith(out)
    else:
        out += marked.finish()
        want += plain.finish()
        assert out == "".join(pieces)
    assert spell(out) == want
    whole = "".join(pieces)
    same = next((n for n, (a, b) in enumerate(zip(out, whole, strict=False)) if a != b), len(out))
    cut = tags.get(whole[same : same + 1], "")  # only the last tag may be cut
    assert cut.startswith(out[same:])


def test_a_tag_that_ends_the_answer_is_the_last_mark():
    tokenizer = TOKENIZERS["byte_level"]
    marks = Marks.of(TAGS, tokenizer)
    end = tokenizer.token_id("</s>")
    for stop in (None, ["zz"]):
        text = SequenceText(tokenizer, SamplingParams(stop=stop), marks=marks.by_token)
        delta = text.feed([*b"az", end], final=True, stop_token=True)
        assert delta.text == text.marked == "az" + marks.by_tag["</s>"] and delta.used == 3
        assert text.text == "az" and text.token_ids == [*b"az", end]
    shown = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    text = SequenceText(tokenizer, shown, marks=marks.by_token)
    assert text.feed([*b"az", end], final=True, stop_token=True).text == "az" + marks.by_tag["</s>"]
    assert text.text == "az</s>"
