"""The conformance suite of grammars, which compute masks of the tokens that a structured output allows.

The languages of the tests are so small that all their texts are listed, so the exact mask is known.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from minivllm.core.interfaces.grammar import Grammar, GrammarContext, GrammarSource

from .base import since
from .kept import Lasting
from .spec import SpecConformance

EOS = (3, 270)  # end-of-sequence tokens
WIDTH = 300  # bits of a mask, one per token id; logits are wider than the vocabulary
WORDS_OF_MASK = -(-WIDTH // 32)
FIRST_BYTE = 4  # id of the token with the byte 0
DIFFICULT_BYTES = (0xED, 0xA0, 0xBF, 9, 1)  # of surrogate pairs, and control characters
WORDS = (b"ab", b"abc", b"bc", b"true", b'"a', b'":', b'{"', b"12", b"\xc3\xa9", b"\xa9x", b" b", b"no", b"cab",
         b"a", b"ab")  # fmt: skip


@lru_cache(maxsize=1)
def vocabulary() -> tuple[bytes, ...]:
    """Return the bytes of each token of the test vocabulary.

    Special tokens, among them the end-of-sequence tokens, have no bytes.  Then follow a token for every byte and some
    words.  One byte and one word have two tokens each, as in vocabularies with byte tokens.
    """
    special = [b""] * FIRST_BYTE
    every_byte = [bytes([i]) for i in range(256)]
    tokens = [*special, *every_byte, *WORDS]
    tokens[EOS[1]] = b""
    return tuple(tokens)


@dataclass(frozen=True)
class GrammarCase:
    """A grammar of a kind (such as regex), and all texts of its language."""

    kind: str
    text: str
    fits: tuple[str, ...]  # all texts of the language
    any_whitespace: bool = True

    @property
    def source(self) -> GrammarSource:
        """Return the grammar in the form that a plug-in compiles."""
        return GrammarSource(self.kind, self.text, self.any_whitespace)

    def __str__(self) -> str:
        return f"{self.kind} {self.text!r}"


def _object(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly some properties."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _written(kind: str, text: str, fits: Sequence[str]) -> GrammarCase:
    """Return a grammar; if it is a JSON schema, without whitespace."""
    return GrammarCase(kind, text, tuple(fits), any_whitespace=kind != "json")


_WORD = [w for w in map(chr, range(128)) if re.fullmatch(r"\w", w)]
# texts of r"a/b|\d{1}\.\w{1}c"
DIGIT_AND_WORD = ("a/b", *(f"{d}.{w}c" for d in "0123456789" for w in _WORD))
# kind, grammar, all texts of its language
_CASES = (
    ("choice", '["ab", "abc", "bcab", "no"]', ("ab", "abc", "bcab", "no")),
    ("choice", '["a\\"b", "a\\\\b", "a\\nb", "\u00e9x", "\u4e2d"]', ('a"b', "a\\b", "a\nb", "\u00e9x", "\u4e2d")),
    ("choice", '["true"]', ("true",)),
    ("regex", "(ab|a)c{0,2}", ("ab", "abc", "abcc", "a", "ac", "acc")),
    ("regex", "[a-c]b?1|\u00e9x?", ("a1", "ab1", "b1", "bb1", "c1", "cb1", "\u00e9", "\u00e9x")),
    ("regex", r"a/b|\d{1}\.\w{1}c", DIGIT_AND_WORD),
    ("json", '{"enum": ["ab", 12, true, null]}', ('"ab"', "12", "true", "null")),
    ("json", json.dumps(_object(a={"type": "boolean"}, b={"const": "ab"})),
        ('{"a":true,"b":"ab"}', '{"a":false,"b":"ab"}')),
    ("json", '{"type": "integer", "minimum": 3, "maximum": 12}', tuple(map(str, range(3, 13)))),
    ("grammar", 'start: "a" tail\ntail: "b" | "bc" | "12"', ("ab", "abc", "a12")),
    ("reply", json.dumps({"behind": False, "lark": 'start: "a" j0 P0', "schemas": {"j0": {"enum": [1, 12]}},
                          "patterns": {"P0": ["pattern", "^[bc]$"]}, "free": {}}),
        ("a1b", "a1c", "a12b", "a12c")),
    ("grammar", 'root ::= "a" tail\ntail ::= "b" | "bc" | [1-2]', ("ab", "abc", "a1", "a2")),
)  # fmt: skip
CASES = tuple(_written(*row) for row in _CASES)
MALFORMED = {
    "regex": ("[", "(a", "a{2,1}", "a**)"),
    "json": ('{"type": "nothing"}', '{"type": "string", "pattern": "["}', '{"$ref": "#/$defs/none"}', "false"),
    "grammar": ("start: (", "start: nobody", "%%%", "root ::= nobody"),
}
LONG = "abctruebcno" * 15  # a text of 165 bytes
LISTED = tuple(f"{a}{b}{c}" for a in "abc" for b in "0123456789" for c in "abcdefghij")  # 300 texts
LARGE = (
    _written("choice", json.dumps([LONG, "ab"]), (LONG, "ab")),
    _written("choice", json.dumps(LISTED), LISTED),
    _written("regex", f"{LONG}|ab", (LONG, "ab")),
    _written("json", json.dumps({"enum": [LONG, 12]}), (f'"{LONG}"', "12")),
    _written("grammar", f'start: "{LONG}" | "ab"', (LONG, "ab")),
)
ENDLESS = {
    "regex": "(a+)+b?",
    "json": '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, '
    '"required": ["a"], "additionalProperties": false}',
    "grammar": 'start: "a" start "b" | "c"',
    "choice": '["ab", "abc"]',
}


class GrammarConformance(Lasting, SpecConformance):
    """The conformance suite of grammars.

    It tests the kinds of grammars that the spec names in ``features``: json, regex, choice, grammar.
    """

    kind = "grammar"
    threads = 2

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options."""
        return (GrammarContext(vocabulary(), WIDTH, EOS, self.threads),)

    def made(self) -> Grammar:
        """Create an instance of the plug-in."""
        return self.build(*self.context())

    def cases(self) -> list[GrammarCase]:
        """Return the test grammars of the kinds that the plug-in claims."""
        found = [case for case in CASES if self.claims(case.kind)]
        assert found, "features names none of json, regex, choice and grammar, so no request can use the plug-in"
        return found

    def exercise(self, instance: Grammar) -> Any:
        """Return the allowed tokens before each token of a text of the first test grammar."""
        case = self.cases()[0]
        matcher = begun(instance, case)
        masks = [allowed(instance, matcher)]
        for token in spelled(random.Random(0), case.fits[-1]):
            accepted(instance, matcher, [token])
            masks.append(allowed(instance, matcher))
        return masks

    def once_more(self, instance: Grammar, number: int) -> None:
        """Compile a new grammar and match one token."""
        word = f"v{number}"
        texts = {"choice": json.dumps([word, "a"])}
        texts["regex"] = f"{word}|a"
        texts["json"] = json.dumps({"enum": [word, "a"]})
        texts["grammar"] = f'start: "{word}" | "a"'
        kind = self.cases()[0].kind
        compiled = instance.compile(GrammarSource(kind, texts[kind], False))
        matcher = instance.start(compiled)
        first, *_ = allowed(instance, matcher)
        accepted(instance, matcher, [first])

    def walks(self, n: int, *, seed: int = 0) -> Iterator[tuple[GrammarCase, list[int]]]:
        """Yield each test grammar ``n`` times, with one of its texts cut into random tokens."""
        rng = random.Random(seed)
        for case in self.cases():
            for _ in range(n):
                text = rng.choice(case.fits)
                yield case, spelled(rng, text)

    def walk(self, plugin: Grammar, case: GrammarCase, tokens: Sequence[int], every: int = 1) -> None:
        """Match the tokens of a text, and fail unless every ``every``-th mask and the last two masks are right."""
        matcher = begun(plugin, case)
        text = b""
        last = len(tokens) - 1
        for i, token in enumerate(tokens):
            if i % every == 0 or i == last:
                check_mask(allowed(plugin, matcher), case, text)
            n = accepted(plugin, matcher, [token])
            assert n == 1, f"{case} after {text!r}: token {token} is refused"
            text += vocabulary()[token]
        check_mask(allowed(plugin, matcher), case, text)

    @since(1, 0)
    def test_a_mask_allows_exactly_what_can_go_on(self) -> None:
        """Check that a mask allows a token exactly if some text of the language continues with its bytes.

        A text may be cut into tokens in any way.  Special tokens and ids beyond the vocabulary are never allowed.
        """
        plugin = self.made()
        for case, tokens in self.walks(6):
            self.walk(plugin, case, tokens)

    @since(1, 0)
    def test_the_end_is_allowed_exactly_where_the_text_fits(self) -> None:
        """Check that all end-of-sequence tokens are allowed and accepted exactly after a complete text.

        No token is accepted after one of them.
        """
        plugin = self.made()
        for case, tokens in self.walks(3, seed=1):
            compiled = plugin.compile(case.source)
            whole = {text.encode() for text in case.fits}
            for n in range(len(tokens) + 1):
                start = tokens[:n]
                text = joined(start)
                complete = text in whole
                for eos in EOS:
                    matcher = plugin.start(compiled)
                    found = accepted(plugin, matcher, start) if start else 0
                    assert found == n, f"{case}: accepts {found} of {start}"
                    place = f"{case} after {text!r}, token {eos}"
                    may_end = eos in allowed(plugin, matcher)
                    assert may_end == complete, f"{place}: the end is allowed: {not complete}"
                    found = accepted(plugin, matcher, [eos])
                    assert found == int(complete), f"{place}: accepted: {not complete}"
                    if complete:
                        after = accepted(plugin, matcher, tokens[:1])
                        assert after == 0, f"{case}: a token after the end"

    @since(1, 0)
    def test_what_a_mask_forbids_is_refused(self) -> None:
        """Check that ``accept`` refuses a forbidden token, and returns the number of accepted tokens before it."""
        plugin = self.made()
        rng = random.Random(2)
        every = set(range(len(vocabulary()))) - set(EOS)
        for case, tokens in self.walks(3, seed=2):
            compiled = plugin.compile(case.source)
            cut = rng.randrange(len(tokens) + 1)
            start = tokens[:cut]
            allowed_ids = viable(case, joined(start))
            wrong = sorted(every - set(allowed_ids))
            for token in rng.sample(wrong, min(8, len(wrong))):
                matcher = plugin.start(compiled)
                found = accepted(plugin, matcher, [*start, token])
                assert found == cut, f"{case}: accepts {found} of {cut} valid tokens and the wrong token {token}"

    @since(1, 0)
    def test_only_the_rows_that_are_named_are_written_and_those_wholly(self) -> None:
        """Check that ``fill`` writes every bit of the named rows of a mask, and no other row."""
        plugin = self.made()
        case = self.cases()[0]
        compiled = plugin.compile(case.source)
        for before in (0, -1, 0x5A5A5A5A):
            mask = np.full((5, WORDS_OF_MASK), before, np.int32)
            matchers = [plugin.start(compiled), plugin.start(compiled)]
            assert not plugin.fill(matchers, mask, [3, 1])
            for row in (1, 3):
                check_mask(bits(mask[row]), case, b"", f"row {row} of a mask that held {before}, ")
            others = mask[[0, 2, 4]]
            assert (others == before).all(), "a row that was not named has changed"

    @since(1, 0)
    def test_a_batch_gives_what_each_matcher_gives_alone(self) -> None:
        """Check the masks of many matchers of several grammars in one call, in any order, over several steps."""
        plugin = self.made()
        walks = list(self.walks(4, seed=3))
        random.Random(3).shuffle(walks)
        matchers = [begun(plugin, case) for case, _ in walks]
        shape = (len(walks), WORDS_OF_MASK)
        for step in range(12):
            live = [i for i, (_, tokens) in enumerate(walks) if len(tokens) >= step]
            mask = np.zeros(shape, np.int32)
            of_live = [matchers[i] for i in live]
            failed = plugin.fill(of_live, mask, live)
            assert not failed, f"step {step}: {failed}"
            growing = []
            new = []
            for i in live:
                case, tokens = walks[i]
                check_mask(bits(mask[i]), case, joined(tokens[:step]))
                if len(tokens) > step:
                    growing.append(matchers[i])
                    new.append([tokens[step]])
            if not growing:
                break
            found = list(plugin.accept(growing, new))
            assert found == [1] * len(new), f"step {step}: accepts {found} tokens: expected 1 for each matcher"

    @since(1, 0)
    def test_long_texts_and_long_lists_are_held_whole(self) -> None:
        """Check a text of 165 bytes and a language of 300 texts: some masks along a text, and the last ones."""
        plugin = self.made()
        rng = random.Random(9)
        for case in LARGE:
            if not self.claims(case.kind):
                continue
            if len(case.fits) == 2:
                longest = case.fits[0]
            else:
                longest = case.fits[-1]
            tokens = spelled(rng, longest)
            self.walk(plugin, case, tokens, every=16)

    @since(1, 0)
    def test_matchers_of_one_grammar_share_no_state(self) -> None:
        """Check that two matchers of the same compiled grammar do not change each other."""
        plugin = self.made()
        for case, tokens in self.walks(1, seed=6):
            compiled = plugin.compile(case.source)
            used = plugin.start(compiled)
            before = plugin.start(compiled)
            accepted(plugin, used, tokens)
            for matcher in (before, plugin.start(compiled)):
                check_mask(allowed(plugin, matcher), case, b"", "a new matcher beside a used one, ")

    @since(1, 0)
    def test_what_is_malformed_is_refused_with_a_message(self) -> None:
        """Check that a malformed grammar, or one that no text fits, raises a ValueError with a message.

        The next grammar must be compiled correctly.
        """
        plugin = self.made()
        malformed = [(kind, text) for kind, texts in MALFORMED.items() if self.claims(kind) for text in texts]
        for kind, text in malformed:
            with pytest.raises(ValueError) as error:
                plugin.compile(GrammarSource(kind, text))
                pytest.fail(f"{kind} {text!r} is malformed, or its language is empty, but it is compiled")
            assert str(error.value).strip(), f"{kind} {text!r}: the error has no message"
        case = self.cases()[0]
        matcher = begun(plugin, case)
        check_mask(allowed(plugin, matcher), case, b"")

    @since(1, 0)
    def test_a_text_without_end_can_go_on_and_end(self) -> None:
        """Check random tokens of infinite languages.

        Some token is always allowed, each text that ends is in the language, and at least 3 of 12 texts end.
        """
        plugin = self.made()
        rng = np.random.default_rng(7)
        for kind, text in ENDLESS.items():
            if not self.claims(kind):
                continue
            compiled = plugin.compile(GrammarSource(kind, text))
            ended = sum(self._ends_a_text(plugin, compiled, kind, rng) for _ in range(12))
            assert ended >= 3, f"the test itself is too weak: {ended} of 12 texts of {kind} ended"

    def _ends_a_text(self, plugin: Grammar, compiled: Any, kind: str, rng: np.random.Generator) -> bool:
        """Match up to 60 random allowed tokens of the grammar ENDLESS[kind], and return whether the text ended."""
        matcher = plugin.start(compiled)
        text = b""
        for _ in range(60):
            choices = allowed(plugin, matcher)
            assert choices, f"{kind} {ENDLESS[kind]!r} after {text!r}: no token is allowed"
            ends = [token for token in choices if token in EOS]
            if ends and rng.random() < 0.4:
                token = ends[0]
            else:
                token = int(rng.choice(choices))
            found = accepted(plugin, matcher, [token])
            assert found == 1, f"{kind} after {text!r}: token {token} is refused"
            if token in EOS:
                assert fits(kind, text.decode()), f"{kind} {ENDLESS[kind]!r}: {text!r} is not in the language"
                return True
            text += vocabulary()[token]
        return False

    @since(1, 0)
    def test_whitespace_in_json_is_as_asked(self) -> None:
        """Check that a JSON grammar accepts any whitespace between values exactly if ``any_whitespace`` is True."""
        self.need("json")
        plugin = self.made()
        schema = json.dumps(_object(a={"type": "boolean"}))
        compact = '{"a":true}'
        for any_whitespace in (False, True):
            compiled = plugin.compile(GrammarSource("json", schema, any_whitespace=any_whitespace))
            for text in (compact, '{ "a" : true }', '{\n  "a": true\n}'):
                tokens = [FIRST_BYTE + byte for byte in text.encode()]
                matcher = plugin.start(compiled)
                complete = accepted(plugin, matcher, tokens) == len(tokens)
                expected = any_whitespace or text == compact
                assert complete == expected, f"{text!r} with any_whitespace={any_whitespace}: accepted is {complete}"

    @since(1, 0)
    def test_any_character_is_one_that_unicode_and_json_have(self) -> None:
        """Check that a text never has half of a surrogate pair, and a JSON string never a control character."""
        plugin = self.made()
        rng = np.random.default_rng(8)
        texts = {"type": "string", "minLength": 3, "maxLength": 6}
        schema = {"type": "array", "items": texts, "maxItems": 4}
        for kind, text in (("regex", "[^a]{1,9}"), ("json", json.dumps(schema))):
            if not self.claims(kind):
                continue
            compiled = plugin.compile(GrammarSource(kind, text))
            ended = sum(self._ends_in_unicode(plugin, compiled, kind, rng) for _ in range(60))
            assert ended >= 5, f"the test itself is too weak: {ended} of 60 texts of {kind} ended"

    def _ends_in_unicode(self, plugin: Grammar, compiled: Any, kind: str, rng: np.random.Generator) -> bool:
        """Match random tokens, often difficult bytes, and return whether the text ended.

        Fail if its bytes are no UTF-8.
        """
        matcher = plugin.start(compiled)
        text = b""
        for _ in range(80):
            choices = allowed(plugin, matcher)
            difficult = [token for token in choices if token - FIRST_BYTE in DIFFICULT_BYTES] or choices
            preferred = difficult if rng.random() < 0.5 else choices
            token = int(rng.choice(preferred))
            if EOS[0] in choices and rng.random() < 0.5:
                decoded = text.decode()  # raises an error unless the bytes are UTF-8
                assert kind != "json" or isinstance(json.loads(decoded), list)
                return True
            accepted(plugin, matcher, [token])
            text += vocabulary()[token]
            if token in EOS:
                break
        return False

    @since(1, 0)
    def test_several_threads_may_compile_at_once(self) -> None:
        """Check that threads can compile grammars while another thread fills masks."""
        plugin = self.made()
        cases = self.cases() * 4
        matcher = begun(plugin, cases[0])
        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(plugin.compile, case.source) for case in cases]
            for _ in range(20):
                check_mask(allowed(plugin, matcher), cases[0], b"")
            for case, future in zip(cases, futures, strict=True):
                matcher = plugin.start(future.result())
                check_mask(allowed(plugin, matcher), case, b"", "compiled in a thread, ")


# ---- expected masks -------------------------------------------------------------------------------------------------


def viable(case: GrammarCase, text: bytes) -> list[int]:
    """Return the token ids that may follow a text in the language of a test grammar, in ascending order."""
    texts = [whole.encode() for whole in case.fits]
    rests = [whole[len(text) :] for whole in texts if whole.startswith(text)]
    found = []
    for i, token in enumerate(vocabulary()):
        if token and any(rest.startswith(token) for rest in rests):
            found.append(i)
    if b"" in rests:
        found += EOS
    return sorted(found)


def spelled(rng: random.Random, text: str) -> list[int]:
    """Cut a text into random tokens, and return their ids."""
    rest = text.encode()
    tokens = []
    while rest:
        starts = [i for i, data in enumerate(vocabulary()) if data and rest.startswith(data)]
        token = rng.choice(starts)
        tokens.append(token)
        rest = rest.removeprefix(vocabulary()[token])
    return tokens


def joined(tokens: Sequence[int]) -> bytes:
    """Return the bytes of some token ids."""
    return b"".join(vocabulary()[token] for token in tokens)


def bits(row: np.ndarray) -> list[int]:
    """Return the token ids below ``WIDTH`` whose bit is set in one row of a mask, int32 [words]."""
    unpacked = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(unpacked[:WIDTH]).tolist()


def begun(plugin: Grammar, case: GrammarCase) -> Any:
    """Return a new matcher of a test grammar."""
    compiled = plugin.compile(case.source)
    return plugin.start(compiled)


def accepted(plugin: Grammar, matcher: Any, tokens: Sequence[int]) -> int:
    """Match some tokens, and return how many of them are accepted."""
    (n,) = plugin.accept([matcher], [list(tokens)])
    return n


def allowed(plugin: Grammar, matcher: Any) -> list[int]:
    """Return the token ids that the mask of a matcher allows."""
    mask = np.zeros((1, WORDS_OF_MASK), np.int32)
    failed: Mapping[int, str] = plugin.fill([matcher], mask, [0])
    assert not failed, f"the matcher cannot continue: {failed[0]}"
    return bits(mask[0])


def check_mask(found: list[int], case: GrammarCase, text: bytes, situation: str = "") -> None:
    """Fail unless the allowed tokens ``found`` are exactly those that may follow a text.

    ``situation`` is the start of the message.
    """
    expected = viable(case, text)
    if found == expected:
        return
    wrong = _names(set(found) - set(expected))
    missing = _names(set(expected) - set(found))
    raise AssertionError(
        f"{situation}{str(case)[:200]} after {text!r}: it allows {wrong} that cannot follow, and forbids {missing} "
        "that can"
    )


def _names(tokens: Collection[int]) -> str:
    """Describe up to eight token ids for a message, with the bytes of each."""
    names = []
    for token in tokens:
        data = vocabulary()[token] if token < len(vocabulary()) else b""
        names.append(repr(data) if data else f"<{token}>")
    return ", ".join(sorted(names)[:8]) or "nothing"


def fits(kind: str, text: str) -> bool:
    """Return whether a text is in the language of ENDLESS[kind]."""
    if kind == "regex":
        return re.fullmatch("a+b?", text) is not None
    if kind == "choice":
        return text in ("ab", "abc")
    if kind == "grammar":
        n = len(text) // 2
        return text == "a" * n + "c" + "b" * n
    value = json.loads(text)
    if list(value) != ["a"]:
        return False
    return all(map(_is_integer, value["a"]))


def _is_integer(value: Any) -> bool:
    """Return whether a JSON value is an integer, which may be written as 1.0."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) and value == int(value)
