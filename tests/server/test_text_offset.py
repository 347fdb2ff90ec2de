"""``text_offset`` of completions: each token's place in the text, whatever that text is made of."""

import pytest

pytest.importorskip("fastapi")

from http_helpers import served
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_helpers import TOKENIZERS, ids_of, spell

from minivllm.core.interfaces.params import SamplingParams
from minivllm.runtime.text.outputs import SequenceText
from minivllm.server.link.scored import ScoredToken
from minivllm.server.openai.offsets import Placed, Places

server = served(engine={"batch_invariant": False, "max_num_seqs": 8})
COMPLETIONS = "/v1/completions"
TEXT = "né ☺☺ 猫 a\n\n b"


def complete(server, **body):
    answer = server.post(COMPLETIONS, {"temperature": 0, "logprobs": 1, "max_tokens": 12, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def check(choice):
    """Check that places never decrease and lie in the text, and that each has the text of its token."""
    places, tokens, text = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], choice["text"]
    assert places == sorted(places) and all(0 <= place <= len(text) for place in places)
    for place, token, end in zip(places, tokens, [*places[1:], len(text)], strict=True):
        if not token.startswith(("bytes:", "token_id:", "<|")):
            assert text[place:end] == token or text[place:end] == token[: end - place], (place, token, text)
    return places


def test_places_fit_the_text_of_an_answer_with_and_without_its_prompt(server):
    for more in (
        {},
        {"echo": True},
        {"echo": True, "max_tokens": 0},
        {"echo": True, "prompt": [1, 40, 2, 50, 60]},
        {"prompt": TEXT, "echo": True},
        {"prompt": f"<|im_start|>{TEXT}<|im_end|>", "echo": True},
        {"prompt": [1, 40, 2], "echo": True, "skip_special_tokens": False, "ignore_eos": True},
        {"return_tokens_as_token_ids": True, "echo": True},
        {"prompt": TEXT, "echo": True, "truncate_prompt_tokens": 5},
    ):
        body = {"prompt": "Once upon a time", **more}
        places = check(complete(server, **body))
        assert len(set(places)) > 2
        assert check(complete(server, **body, n=2, temperature=1, seed=1))


def test_a_streams_places_are_those_of_the_whole_with_stop_strings_too(server):
    plain = complete(server, prompt="Once upon a time", max_tokens=12)
    text = plain["text"]
    for stop in ([text[7:10]], [text[5:15]], [text[12:14], text[3:9] + "#"], ["\x00"]):
        for more in ({}, {"echo": True}, {"include_stop_str_in_output": True}):
            body = {"prompt": "Once upon a time", "max_tokens": 12, "stop": stop, **more}
            whole = complete(server, **body)
            places = check(whole)
            pieces = [
                e["choices"][0] for e in server.events(COMPLETIONS, {"temperature": 0, "logprobs": 1, **body})[:-1]
            ]
            assert "".join(piece["text"] for piece in pieces) == whole["text"]
            for key, want in whole["logprobs"].items():
                assert [one for piece in pieces for one in piece["logprobs"][key]] == want, (key, stop)
            shown = 0
            for piece in pieces:  # no place is sent before the text reaches it
                shown += len(piece["text"])
                assert all(place <= shown for place in piece["logprobs"]["text_offset"])
            assert len(places) == len(whole["logprobs"]["tokens"])


def placed(tokenizer, ids, size, **params):
    """Places of ids as a choice gives them, in pieces of ``size`` tokens, and the text."""
    requested = SamplingParams(logprobs=None, **params)
    text = SequenceText(tokenizer, requested)
    rows, found = Placed(Places(tokenizer, requested.skip_special_tokens)), []
    for at in range(0, len(ids), size):
        final = at + size >= len(ids)
        delta = text.feed(ids[at : at + size], final)
        new = [ScoredToken(token, -1.0, 1) for token in ids[at : at + size][: delta.used]]
        found += rows.take(new, delta.text, final or delta.stopped is not None)
        if delta.stopped is not None:
            break
    return [place for _, place in found], text.text


CASES = {  # tokens as their tokenizer spells them -> the text, and the place of each token
    "byte_level": [
        (
            [spell("日".encode()[:2]), spell("日".encode()[2:]), spell(b" the"), spell("é".encode())],
            "日 theé",
            [0, 0, 1, 5],
        ),
        ([spell(b"\xe2\x80"), "a", "b"], "\ufffdab", [0, 1, 2]),
        ([spell(b" " + "🙂".encode()[:2]), *map(spell, (b"\x99", b"\x82")), "x"], " 🙂x", [0, 1, 1, 2]),
        (["a", "<s>", "b", "</s>", "<s>"], "ab", [0, 1, 1, 2, 2]),
        (["<s>", "hello there", "!"], "hello there!", [0, 0, 11]),
        (["<s>"], "", [0]),
    ],
    "llama": [
        (["<0xE2>", "<0x98>", "<0xBA>", "▁hello", "a"], "☺ helloa", [0, 0, 0, 1, 7]),
        (["▁hello", "<0xE2>", "<0x98>", "<0xBA>", "<s>", "▁hello"], "hello☺ hello", [0, 5, 5, 5, 5, 6]),
        (["<s>", "▁hello", "▁hello"], "hello hello", [0, 0, 5]),
        (["<0xE2>", "a"], "\ufffda", [0, 1]),
    ],
}


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_characters_and_special_tokens_have_a_place(name, size):
    tokenizer = TOKENIZERS[name]
    for tokens, text, places in CASES[name]:
        ids = [tokenizer.token_id(token) for token in tokens]
        assert None not in ids and placed(tokenizer, ids, size) == (places, text), tokens


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_tokens_have_places_in_order_within_the_text_however_they_come(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(tokenizer)) or [0]
    stop = data.draw(st.sampled_from([(), ("a",), ("the", "\n")]))
    skip = data.draw(st.booleans())
    whole, text = placed(tokenizer, ids, len(ids), stop=stop, skip_special_tokens=skip)
    assert whole == sorted(whole) and all(0 <= place <= len(text) for place in whole)
    assert placed(tokenizer, ids, 1, stop=stop, skip_special_tokens=skip) == (whole, text)


def test_a_prompt_has_the_places_of_its_own_text():
    tokenizer = TOKENIZERS["byte_level"]
    special, end = tokenizer.token_id("<s>"), tokenizer.token_id("</s>")
    letters = [tokenizer.token_id(letter) for letter in "ab"]
    for prompt, ids, want in (
        ("ab", letters, [0, 1]),
        ("ab", [special, *letters, end], [0, 0, 1, 2]),
        ("<s>ab", [special, *letters], [0, 3, 4]),
        ("AB", letters, [0, 1]),  # the tokenizer may change letters
        ("<s>ab", [special, special, *letters], [0, 3, 3, 4]),
    ):
        places = Places(tokenizer, False, prompt=prompt)
        assert [places.next(token) for token in ids] == want
    assert [Places(None, True, 7).next(token) for token in (1, 2)] == [7, 7]
