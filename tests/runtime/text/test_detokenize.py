"""Streamed text has the bytes of decoding all ids at once, for any ids, and no part of a stop string is sent."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_helpers import TOKENIZERS, ids_of

from minivllm.runtime.text.detokenize import CONTEXT, IncrementalDetokenizer, StopStrings
from minivllm.runtime.text.library import SlowTokenizer
from minivllm.runtime.text.tokenizer import Tokenizer


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_decoded_whole(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer))
    skip = data.draw(st.booleans())
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    pieces = []
    while ids[len(pieces) :]:
        pieces.append(detokenizer.add([ids[len(pieces)]]))
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == tokenizer.decode(ids, skip)
    other, i, text = IncrementalDetokenizer(tokenizer, skip), 0, ""
    while i < len(ids):
        n = data.draw(st.integers(1, 9))
        text += other.add(ids[i : i + n])
        i += n
    assert text + other.finish() == "".join(pieces)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_byte_level_text_comes_with_the_byte_that_completes_it(text):
    detokenizer = IncrementalDetokenizer(TOKENIZERS["byte_level"])
    data, out = text.encode(), ""
    for i, b in enumerate(data):
        out += detokenizer.add([b])
        assert out == data[: i + 1].decode(errors="ignore")


def test_other_decoders_give_text_with_each_whole_token_and_hold_only_byte_runs():
    tokenizer = TOKENIZERS["llama"]
    byte = tokenizer.token_id("<0x00>")
    detokenizer = IncrementalDetokenizer(tokenizer)
    steps = [("▁hello", "hello"), ("▁hello", " hello"), ("\ufffd", "\ufffd"), ("</s>", ""), ("▁", " ")]
    for token, want in steps:
        assert detokenizer.add([tokenizer.token_id(token)]) == want
    assert detokenizer.add([byte + b for b in "é".encode()]) == ""
    assert detokenizer.add([tokenizer.token_id("a")]) == "éa"


def test_cost_per_token_is_bounded(monkeypatch):
    tokenizer = TOKENIZERS["llama"]
    longest, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, skip: longest.append(len(ids)) or decode(ids, skip))
    detokenizer = IncrementalDetokenizer(tokenizer)
    words = [tokenizer.token_id(w) for w in ("▁hello", "a", "日")]
    for i in range(3000):
        detokenizer.add([words[i % 3]])
    assert max(longest) <= CONTEXT + 1 and len(longest) <= 6000
    longest.clear()
    detokenizer.add([tokenizer.token_id("<0xFF>")] * 5000)
    assert not longest  # a run of bytes is decoded once, when it ends
    assert detokenizer.finish() == "\ufffd" * 5000


def test_a_slow_tokenizer_streams_whole_characters():
    """transformers' Python tokenizers do not reveal their decoder, so text that ends in U+FFFD waits for a limited
    time.
    """

    class Slow:
        all_special_ids = [0]

        def __len__(self):
            return 300

        def convert_ids_to_tokens(self, i):
            return f"t{i}"

        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
            return bytes(i for i in ids if i or not skip_special_tokens).decode(errors="replace")

    tokenizer = Tokenizer(None, SlowTokenizer(Slow()), {}, None)
    detokenizer = IncrementalDetokenizer(tokenizer)
    out = [detokenizer.add([b]) for b in "a日🙂b".encode()]
    assert [o for o in out if o] == ["a", "日", "🙂", "b"] and detokenizer.add([0]) == ""
    assert detokenizer.finish() == ""
    assert "".join(detokenizer.add([0xFF]) for _ in range(100)).count("\ufffd") > 80


def first_stop(text, stops, armed_from=0):
    """The definition: character by character, the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if end > armed_from and text[:end].endswith(stop):
                return end, stop
    return None


SMALL = st.text(alphabet="ab", min_size=1, max_size=5)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.text(alphabet="abc", max_size=6), max_size=12), st.lists(SMALL, min_size=1, max_size=4), st.data())
def test_stop_strings_end_the_text_where_the_definition_says(pieces, stops, data):
    include = data.draw(st.booleans())
    unarmed = data.draw(st.integers(0, len(pieces)))
    found = first_stop("".join(pieces), stops, len("".join(pieces[:unarmed])))
    watch, out, got, used = StopStrings(stops, include), "", None, 0
    for used, piece in enumerate(pieces, 1):
        text, got = watch.push(piece, used > unarmed)
        out += text
        whole = "".join(pieces[:used])
        if got is None:
            assert whole.startswith(out)
            held = whole[len(out) :]
            assert held == "" or any(s.startswith(held) and s != held for s in stops)  # nothing is held in vain
            if used > unarmed:
                assert not any(s[:k] == whole[len(whole) - k :] for s in stops for k in range(len(held) + 1, len(s)))
        else:
            break
    out += watch.finish() if got is None else ""
    if found is None:
        assert got is None and out == "".join(pieces)
        return
    end, stop = found
    assert got == stop
    assert len("".join(pieces[: used - 1])) < end <= len("".join(pieces[:used]))
    start = end - len(stop)
    given_before = len("".join(pieces[:unarmed]))  # text that was sent before stops apply stays sent
    want = "".join(pieces)[: end if include else start]
    assert out == want or (not include and start < given_before and want.startswith(out[: len(want)]))


def test_long_stop_strings_are_found_across_many_pieces():
    rng = random.Random(1)
    stop = "".join(rng.choice("ab") for _ in range(200)) + "c"
    watch, out = StopStrings([stop, "zzz"]), ""
    for c in "abab" + stop[:150] + "x" + stop + "tail":
        text, got = watch.push(c)
        out += text
        if got:
            break
    assert got == stop and out == "abab" + stop[:150] + "x"
