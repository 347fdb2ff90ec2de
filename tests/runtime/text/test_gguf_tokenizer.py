"""Tokenizers in GGUF files against llama.cpp, sentencepiece and transformers.

``llama_cpp_tokens.json`` has a byte-level vocabulary, texts, and the ids that llama.cpp (build 11549) makes of them for
each pre-tokenizer.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import random
import unicodedata
from pathlib import Path

import pytest
from limited import limited

from minivllm.errors import ModelError
from minivllm.runtime.text.detokenize import IncrementalDetokenizer
from minivllm.runtime.text.gguf_splits import NAMES
from minivllm.runtime.text.tokenizer import load_tokenizer

pytest.importorskip("gguf")

from gguf_vocabularies import BYTES, write_large, write_vocabulary

RECORDED = json.loads(Path(__file__).with_name("llama_cpp_tokens.json").read_text())
TOKENS, KINDS, MERGES, TEXTS = (RECORDED[name] for name in ("tokens", "kinds", "merges", "texts"))
EOS, BOS = len(TOKENS) - 3, len(TOKENS) - 2
# llama.cpp has no classes of case and no digits of other scripts; here the patterns of tokenizer.json apply
CASED = {"tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"}
DIGITS = {"tiny_aya", "cohere2moe"}
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "naïve",
    "café",
    "straße",
    "Москва",
    "東京",
    "한국어",
    "नमस्ते",
    "🙂",
    "👍🏽",
    "é",
    "ﬁ",
    "１２３",
    "3.14",
    "don't",
    "foo_bar",
    "(x)",
    "—",
    "“q”",
]
SPACES = (" ", " ", "  ", "   ", "\n", "\n\n", "\t", "", ".", ", ", "\u00a0", "\u3000", "\u200d", "\u2581")
EDGES = (
    "", " ", "  ", "\n", " \n ", "\u2581", "\u2581\u2581a", " a", "  a", "a ", "a  b", "\x00a", "<0x41>", "a" * 40,
    "        x", "\U0010ffff", "\ud7ff",
)  # fmt: skip


def text(rng, words):
    return "".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(words))


def byte_level(path, pre, more=None, arch="llama", **changed):
    def keys(writer):
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(EOS)
        if more is not None:
            more(writer)

    given = {"tokens": TOKENS, "kinds": KINDS, "merges": MERGES, **changed}
    return write_vocabulary(path, "gpt2", pre=pre, more=keys, arch=arch, **given)


def in_pieces(tokenizer, ids, sizes):
    """The text of ids that come in pieces."""
    detokenizer, found, at = IncrementalDetokenizer(tokenizer), [], 0
    while at < len(ids):
        size = sizes.choice([1, 1, 2, 3])
        found.append(detokenizer.add(ids[at : at + size]))
        at += size
    return "".join([*found, detokenizer.finish()])


@pytest.mark.parametrize("answer", RECORDED["answers"], ids=lambda answer: answer["pre"][0])
def test_ids_are_those_of_llama_cpp_and_decode_to_the_text(answer, tmp_path):
    for pre in answer["pre"]:
        tokenizer = load_tokenizer(byte_level(tmp_path / f"{pre}.gguf", pre))
        compared = 0
        for reported, ids in zip(TEXTS, answer["ids"], strict=True):
            kinds = {unicodedata.category(c) for c in reported if not c.isascii()}
            if (pre in CASED and kinds & {"Mn", "Mc"}) or (pre in DIGITS and "Nd" in kinds):
                continue
            found = tokenizer.encode(reported)
            assert found == ids, (pre, reported)
            want = unicodedata.normalize("NFC", reported) if NAMES[pre].nfc else reported
            bare = tokenizer.encode(reported, add_special_tokens=False)
            assert bare == ids[answer["add_bos"] :]
            assert tokenizer.decode(bare, skip_special_tokens=False) == want
            assert in_pieces(tokenizer, found, random.Random(compared)) == tokenizer.decode(found)
            compared += 1
        assert compared > len(TEXTS) // 2


def test_each_name_of_a_pre_tokenizer_was_compared_with_llama_cpp():
    assert {pre for answer in RECORDED["answers"] for pre in answer["pre"]} == NAMES.keys()


def test_qwen_cohere_and_neox_compose_characters_and_others_do_not(tmp_path):
    whole, parts = "é ö 각", unicodedata.normalize("NFD", "é ö 각")
    for pre, composed in {"qwen2": True, "command-r": True, "olmo": True, "llama-bpe": False, "tekken": False}.items():
        tokenizer = load_tokenizer(byte_level(tmp_path / f"{pre}.gguf", pre))
        assert (tokenizer.encode(whole) == tokenizer.encode(parts)) is composed, pre


def test_what_the_file_says_of_bos_and_eos_counts_before_the_default(tmp_path):
    for pre, default in {"llama-bpe": True, "tekken": True, "qwen2": False, "gpt-2": False, "default": False}.items():
        for bos in (None, True, False):
            for eos in (None, True, False):

                def flags(writer, bos=bos, eos=eos):
                    if bos is not None:
                        writer.add_add_bos_token(bos)
                    if eos is not None:
                        writer.add_add_eos_token(eos)

                tokenizer = load_tokenizer(byte_level(tmp_path / "f.gguf", pre, flags))
                bare = tokenizer.encode("the fox", add_special_tokens=False)
                first = [BOS] if (default if bos is None else bos) else []
                assert tokenizer.encode("the fox") == [*first, *bare, *([EOS] if eos else [])]
                assert tokenizer.encode("") == [*first, *([EOS] if eos else [])]
                (tmp_path / "f.gguf").unlink()


def test_ids_agree_with_transformers_where_it_reads_the_same_keys(tmp_path):
    from transformers import AutoTokenizer

    for pre, arch in (("llama-bpe", "llama"), ("qwen2", "qwen2")):
        path = byte_level(tmp_path / f"{pre}.gguf", pre, arch=arch)
        ours = load_tokenizer(path)
        theirs = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=f"{pre}.gguf", local_files_only=True)
        for reported in (unicodedata.normalize("NFC", t) for t in TEXTS):
            assert ours.encode(reported, False) == theirs.encode(reported, add_special_tokens=False), reported


@pytest.fixture(scope="module")
def trained():
    """Models that sentencepiece trains on generated text: options -> the bytes of one."""
    import sentencepiece

    rng = random.Random(7)
    lines = [text(rng, 10).replace("\n", " ").replace("\u2581", "") for _ in range(800)]

    def train(**options):
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=made,
            minloglevel=2,
            normalization_rule_name="identity",
            num_threads=1,
            **{"model_type": "bpe", **options},
        )
        return made.getvalue()

    return train


def of_sentencepiece(path, model, **flags):
    from sentencepiece import sentencepiece_model_pb2

    pieces = sentencepiece_model_pb2.ModelProto.FromString(model).pieces

    def keys(writer):
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    tokens, kinds, scores = ([getattr(p, name) for p in pieces] for name in ("piece", "type", "score"))
    return write_vocabulary(path, "llama", tokens, kinds, scores=scores, more=keys)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"vocab_size": 700, "byte_fallback": True, "remove_extra_whitespaces": False}, {}),
        ({"vocab_size": 700, "byte_fallback": True, "remove_extra_whitespaces": False, "add_dummy_prefix": False,
          "allow_whitespace_only_pieces": True}, {"add_space_prefix": False}),
        ({"vocab_size": 700, "byte_fallback": True}, {"remove_extra_whitespaces": True}),
        ({"vocab_size": 400, "character_coverage": 0.98, "remove_extra_whitespaces": False}, {}),
        ({"model_type": "unigram", "vocab_size": 600, "byte_fallback": True, "remove_extra_whitespaces": False}, {}),
        ({"model_type": "unigram", "vocab_size": 300, "character_coverage": 0.98,
          "remove_extra_whitespaces": False}, {}),
    ],
    ids=["prefix", "no prefix", "spaces removed", "no bytes", "unigram", "unigram without bytes"],
)  # fmt: skip
def test_pieces_are_those_of_sentencepiece(options, flags, trained, tmp_path):
    import sentencepiece

    model = trained(**options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = load_tokenizer(of_sentencepiece(tmp_path / "s.gguf", model, **flags))
    rng, compared = random.Random(8), 0
    for reported in [*EDGES, *(text(rng, rng.randint(1, 12)) for _ in range(200))]:
        if "remove_extra_whitespaces" in flags and "\u2581" in reported:  # there it is a space for sentencepiece alone
            continue
        want = theirs.encode(reported)
        assert ours.encode(reported) == [theirs.bos_id(), *want], reported
        if theirs.unk_id() not in want:  # which it prints as " ⁇ "
            assert ours.decode(want) == theirs.decode(want), reported
        assert in_pieces(ours, want, rng) == ours.decode(want)
        compared += 1
    assert compared > 100


def pieces(path, *, scores=None, more=None, model="llama", kinds=None, tokens=None):
    """A vocabulary of sentencepiece that is written by hand."""
    own = ["<unk>", "<s>", "</s>", *BYTES, "\u2581", "a", "b", "ab", "\u2581a", "<ctl>", "<ud>"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 3, 4]
    numbers = [0.0] * 259 + [-9.0, -8.0, -7.0, -1.0, -2.0, 0.0, 0.0]
    return write_vocabulary(
        path, model, tokens or own, kinds or types, scores=numbers if scores is None else scores, more=more
    )


def test_a_vocabulary_of_sentencepiece_has_the_defaults_of_llama_cpp(tmp_path):
    """The ids were made with llama.cpp, build 11549: BOS is 1, and each part of the text begins with a space."""
    tokenizer = load_tokenizer(pieces(tmp_path / "p.gguf"))
    space, a, b, ab, near, ctl, ud = range(259, 266)
    cases = {
        "": [], "a": [near], " a": [space, near], "ab": [space, ab], "<ctl>a": [ctl, near],
        "a<ud>b": [near, ud, space, b], "</s>": [2], "é": [space, 3 + 0xC3, 3 + 0xA9], "a\n": [near, 3 + 0x0A],
        "<unk>": [0],
    }  # fmt: skip
    for reported, ids in cases.items():
        assert tokenizer.encode(reported) == [1, *ids], reported
    assert tokenizer.special_ids == {0, 1, 2, ctl} and tokenizer.eos_ids == (2,)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.decode([near, ud, a, ctl, b]) == "a<ud>ab"


def test_tokens_that_end_an_answer_are_found_by_their_spelling(tmp_path):
    tokens = [*TOKENS, "<|im_end|>", "<|eot_id|>", "</s>"]
    kinds = [*KINDS, 3, 1, 1]  # the last is a tag
    more = lambda writer: writer.add_eot_token_id(5)  # noqa: E731
    tokenizer = load_tokenizer(byte_level(tmp_path / "e.gguf", "qwen2", more, tokens=tokens, kinds=kinds))
    assert tokenizer.eos_ids == (EOS, 5, len(TOKENS), len(TOKENS) + 1)
    assert len(TOKENS) + 1 in tokenizer.special_ids and len(TOKENS) + 2 not in tokenizer.special_ids


def test_a_vocabulary_that_is_not_read_is_refused_by_name(tmp_path):
    def refused(make, *args, **kwargs):
        path = make(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", *args, **kwargs)
        with pytest.raises(ModelError) as found:
            load_tokenizer(path)
        assert str(found.value).startswith(path) and "\n" not in str(found.value)
        return str(found.value)

    def key(name, value):
        return lambda writer: writer.add_key_value(name, value, TYPES[type(value)])

    from gguf import GGUFValueType

    TYPES = {int: GGUFValueType.UINT32, str: GGUFValueType.STRING}
    kinds = {
        "bert": "WordPiece (WPM)",
        "t5": "unigram of sentencepiece (UGM)",
        "rwkv": "is RWKV",
        "new": "is not known",
    }
    for model, what in kinds.items():
        assert what in refused(pieces, model=model), model
    assert "holds no tokenizer" in refused(pieces, model=None)
    for pre in ("kimi-k2", "afmoe", "gemma4", "Qwen2", "nonsense"):
        assert f"tokenizer.ggml.pre={pre!r}: expected one of a.x-4.0, bailingmoe" in refused(byte_level, pre)
    twice = [*TOKENS[:-1], TOKENS[5]]
    assert f"has the ids 5 and {len(TOKENS) - 1}" in refused(byte_level, "qwen2", tokens=twice)
    assert "merges[1]='no token': expected two tokens" in refused(byte_level, "qwen2", merges=[MERGES[0], "no token"])
    assert "lacks tokenizer.ggml.merges" in refused(byte_level, "qwen2", merges=None)
    assert "token_type: expected a number for each of the" in refused(byte_level, "qwen2", kinds=KINDS[:-5])
    assert "scores: expected a number for each of the" in refused(pieces, scores=[0.0])
    assert "lacks tokenizer.ggml.scores, a finite number" in refused(pieces, scores=[float("nan")] * 266)
    assert "bos_token_id=9999: expected an id below" in refused(pieces, more=key("tokenizer.ggml.bos_token_id", 9999))
    assert "add_space_prefix=1: expected a truth" in refused(pieces, more=key("tokenizer.ggml.add_space_prefix", 1))
    assert "expected shorter tokens" in refused(byte_level, "qwen2", tokens=["a" * 10**6, *TOKENS[1:]])
    assert "a token of 3000 characters" in refused(byte_level, "qwen2", tokens=[*TOKENS[:-1], "a" * 3000])
    no_bos = lambda path: write_vocabulary(path, "gpt2", TOKENS, KINDS, pre="llama-bpe", merges=MERGES)  # noqa: E731
    assert "prompts get a BOS token, but tokenizer.ggml.bos_token_id is absent" in refused(no_bos)


def test_a_file_without_the_name_of_a_pre_tokenizer_is_read_with_a_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "minivllm"):
        unnamed = load_tokenizer(byte_level(tmp_path / "n.gguf", None))
    assert "names no pre-tokenizer" in caplog.text and str(tmp_path) in caplog.text
    named = load_tokenizer(byte_level(tmp_path / "d.gguf", "default"))
    assert [unnamed.encode(reported) for reported in TEXTS] == [named.encode(reported) for reported in TEXTS]


def test_a_large_vocabulary_is_read_in_seconds(tmp_path):
    """128,000 tokens with their merges take 1.5 s of CPU time, and 20,000 pieces of sentencepiece 0.3 s."""
    pairs = ["".join(two) for two in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2)]
    made = [(a, b) for a, b in itertools.product(pairs, pairs) if a + b not in TOKENS][:128_000]
    pairs = [pair for pair in pairs if pair not in TOKENS]
    tokens = [*TOKENS, *pairs, *(a + b for a, b in made)]
    merges = [*MERGES, *(" ".join(pair) for pair in pairs), *(f"{a} {b}" for a, b in made)]
    keys = {"model": "gpt2", "pre": "llama-bpe", "bos_token_id": BOS, "tokens": tokens, "merges": merges}
    large = write_large(tmp_path / "large.gguf", **keys)
    load = lambda path: load_tokenizer(path).vocab_size  # noqa: E731
    assert limited(lambda: load(large), seconds=10, megabytes=1024) == ("done", str(len(tokens)))
    words = ["<unk>", "<s>", "</s>", *BYTES, *(t for t in tokens[300:20_000] if t.isalpha())]
    keys = {"model": "llama", "tokens": words, "scores": [float(-i) for i in range(len(words))]}
    many = write_large(tmp_path / "many.gguf", **keys)
    assert limited(lambda: load(many), seconds=10, megabytes=1024) == ("done", str(len(words)))
