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
WORDS = (b"ab", b"abc", b"bc", b"true", b'"a', b'":', b'{"', b"12", b"\xc3\xa9", b"\xa9x", b" b", b"no", b"cab",
         b"a", b"ab")  # fmt: skip


@lru_cache(maxsize=1)
def vocabulary() -> tuple[bytes, ...]:
    """Return the bytes of each token of the test vocabulary.

    Special tokens, among them the end-of-sequence tokens, have no bytes.  Then follow a token for every byte and some
    words.  One byte and one word have two tokens each, as in vocabularies with byte tokens.
    """
    tokens = [b""] * FIRST_BYTE + [bytes([i]) for i in range(256)] + list(WORDS)
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


def _json(schema: Any, *values: Any) -> GrammarCase:
    """Return the grammar of a JSON schema that allows exactly some values, without whitespace."""
    texts = tuple(json.dumps(value, separators=(",", ":")) for value in values)
    return GrammarCase("json", json.dumps(schema), texts, any_whitespace=False)


def _object(**properties: Any) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly some properties."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


CASES = (
    GrammarCase("choice", '["ab", "abc", "bcab", "no"]', ("ab", "abc", "bcab", "no")),
    GrammarCase("choice", '["a\\"b", "a\\\\b", "a\\nb", "\u00e9x", "\u4e2d"]',
        ('a"b', "a\\b", "a\nb", "\u00e9x", "\u4e2d")),
    GrammarCase("choice", '["true"]', ("true",)),
    GrammarCase("regex", "(ab|a)c{0,2}", ("ab", "abc", "abcc", "a", "ac", "acc")),
    GrammarCase("regex", "[a-c]b?1|\u00e9x?", (*(f"{x}{b}1" for x in "abc" for b in ("", "b")), "\u00e9", "\u00e9x")),
    GrammarCase("regex", r"a/b|\d{1}\.\w{1}c", ("a/b", *(f"{d}.{w}c" for d in "0123456789" for w in map(chr, range(128))
                                                   if re.fullmatch(r"\w", w)))),
    _json({"enum": ["ab", 12, True, None]}, "ab", 12, True, None),
    _json(_object(a={"type": "boolean"}, b={"const": "ab"}), {"a": True, "b": "ab"}, {"a": False, "b": "ab"}),
    _json({"type": "integer", "minimum": 3, "maximum": 12}, *range(3, 13)),
    GrammarCase("grammar", 'start: "a" tail\ntail: "b" | "bc" | "12"', ("ab", "abc", "a12")),
    GrammarCase("reply", json.dumps({"behind": False, "lark": 'start: "a" j0 P0', "schemas": {"j0": {"enum": [1, 12]}},
                                     "patterns": {"P0": ["pattern", "^[bc]$"]}, "free": {}}),
        ("a1b", "a1c", "a12b", "a12c")),
    GrammarCase("grammar", 'root ::= "a" tail\ntail ::= "b" | "bc" | [1-2]', ("ab", "abc", "a1", "a2")),
)  # fmt: skip
MALFORMED = {
    "regex": ("[", "(a", "a{2,1}", "a**)"),
    "json": ('{"type": "nothing"}', '{"type": "string", "pattern": "["}', '{"$ref": "#/$defs/none"}', "false"),
    "grammar": ("start: (", "start: nobody", "%%%", "root ::= nobody"),
}
LONG = "abctruebcno" * 15  # a text of 165 bytes
LISTED = tuple(f"{a}{b}{c}" for a in "abc" for b in "0123456789" for c in "abcdefghij")  # 300 texts
LARGE = (
    GrammarCase("choice", json.dumps([LONG, "ab"]), (LONG, "ab")), GrammarCase("choice", json.dumps(LISTED), LISTED),
    GrammarCase("regex", f"{LONG}|ab", (LONG, "ab")), _json({"enum": [LONG, 12]}, LONG, 12),
    GrammarCase("grammar", f'start: "{LONG}" | "ab"', (LONG, "ab")),
)  # fmt: skip
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
        matcher = instance.start(instance.compile(case.source))
        masks = [allowed(instance, matcher)]
        for token in spelled(random.Random(0), case.fits[-1]):
            instance.accept([matcher], [[token]])
            masks.append(allowed(instance, matcher))
        return masks

    def once_more(self, instance: Grammar, number: int) -> None:
        """Compile a new grammar and match one token."""
        word = f"v{number}"
        texts = {
            "choice": json.dumps([word, "a"]),
            "regex": f"{word}|a",
            "json": json.dumps({"enum": [word, "a"]}),
            "grammar": f'start: "{word}" | "a"',
        }
        kind = self.cases()[0].kind
        compiled = instance.compile(GrammarSource(kind, texts[kind], False))
        matcher = instance.start(compiled)
        token = next(iter(allowed(instance, matcher)))
        instance.accept([matcher], [[token]])

    def walks(self, n: int, *, seed: int = 0) -> Iterator[tuple[GrammarCase, list[int]]]:
        """Yield each test grammar ``n`` times, with one of its texts cut into random tokens."""
        rng = random.Random(seed)
        for case in self.cases():
            for _ in range(n):
                yield case, spelled(rng, rng.choice(case.fits))

    def walk(self, plugin: Grammar, case: GrammarCase, tokens: Sequence[int], every: int = 1) -> None:
        """Match the tokens of a text, and fail unless every ``every``-th mask and the last two masks are right."""
        matcher = plugin.start(plugin.compile(case.source))
        text = b""
        for i, token in enumerate(tokens):
            if i % every == 0 or i == len(tokens) - 1:
                check_mask(allowed(plugin, matcher), case, text)
            accepted = plugin.accept([matcher], [[token]])[0]
            assert accepted == 1, f"{case} after {text!r}: token {token} is refused"
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
            for n in range(len(tokens) + 1):
                text = joined(tokens[:n])
                complete = text in {whole.encode() for whole in case.fits}
                for eos in EOS:
                    matcher = plugin.start(compiled)
                    if n:
                        accepted = plugin.accept([matcher], [tokens[:n]])[0]
                    else:
                        accepted = 0
                    assert accepted == n, f"{case}: accepts {accepted} of {tokens[:n]}"
                    place = f"{case} after {text!r}, token {eos}"
                    assert (eos in allowed(plugin, matcher)) == complete, f"{place}: the end is allowed: {not complete}"
                    found = plugin.accept([matcher], [[eos]])[0]
                    assert found == int(complete), f"{place}: accepted: {not complete}"
                    if complete:
                        got = plugin.accept([matcher], [[tokens[0]]])[0]
                        assert got == 0, f"{case}: a token after the end"

    @since(1, 0)
    def test_what_a_mask_forbids_is_refused(self) -> None:
        """Check that ``accept`` refuses a forbidden token, and returns the number of accepted tokens before it."""
        plugin = self.made()
        rng = random.Random(2)
        for case, tokens in self.walks(3, seed=2):
            compiled = plugin.compile(case.source)
            cut = rng.randrange(len(tokens) + 1)
            allowed_ids = viable(case, joined(tokens[:cut]))
            wrong = sorted(set(range(len(vocabulary()))) - set(allowed_ids) - set(EOS))
            for token in rng.sample(wrong, min(8, len(wrong))):
                matcher = plugin.start(compiled)
                accepted = plugin.accept([matcher], [[*tokens[:cut], token]])[0]
                assert accepted == cut, f"{case}: accepts {accepted} of {cut} valid tokens and the wrong token {token}"

    @since(1, 0)
    def test_only_the_rows_that_are_named_are_written_and_those_wholly(self) -> None:
        """Check that ``fill`` writes every bit of the named rows of a mask, and no other row."""
        plugin = self.made()
        case = self.cases()[0]
        compiled = plugin.compile(case.source)
        for before in (0, -1, 0x5A5A5A5A):
            mask = np.full((5, WORDS_OF_MASK), before, np.int32)
            assert not plugin.fill([plugin.start(compiled), plugin.start(compiled)], mask, [3, 1])
            for row in (1, 3):
                check_mask(bits(mask[row]), case, b"", f"row {row} of a mask that held {before}, ")
            assert (mask[[0, 2, 4]] == before).all(), "a row that was not named has changed"

    @since(1, 0)
    def test_a_batch_gives_what_each_matcher_gives_alone(self) -> None:
        """Check the masks of many matchers of several grammars in one call, in any order, over several steps."""
        plugin = self.made()
        walks = list(self.walks(4, seed=3))
        random.Random(3).shuffle(walks)
        matchers = [plugin.start(plugin.compile(case.source)) for case, _ in walks]
        for step in range(12):
            live = [i for i, (_, tokens) in enumerate(walks) if len(tokens) >= step]
            shape = (len(walks), WORDS_OF_MASK)
            mask = np.zeros(shape, np.int32)
            failed = plugin.fill([matchers[i] for i in live], mask, live)
            assert not failed, f"step {step}: {failed}"
            for i in live:
                case, tokens = walks[i]
                check_mask(bits(mask[i]), case, joined(tokens[:step]))
            live = [i for i, (_, tokens) in enumerate(walks) if len(tokens) > step]
            if not live:
                break
            new = [[walks[i][1][step]] for i in live]
            accepted = list(plugin.accept([matchers[i] for i in live], new))
            assert accepted == [1] * len(live), f"step {step}: accepts {accepted} tokens: expected 1 for each matcher"

    @since(1, 0)
    def test_long_texts_and_long_lists_are_held_whole(self) -> None:
        """Check a text of 165 bytes and a language of 300 texts: some masks along a text, and the last ones."""
        plugin = self.made()
        rng = random.Random(9)
        for case in LARGE:
            if self.claims(case.kind):
                if len(case.fits) == 2:
                    longest = case.fits[0]
                else:
                    longest = case.fits[-1]
                self.walk(plugin, case, spelled(rng, longest), every=16)

    @since(1, 0)
    def test_matchers_of_one_grammar_share_no_state(self) -> None:
        """Check that two matchers of the same compiled grammar do not change each other."""
        plugin = self.made()
        for case, tokens in self.walks(1, seed=6):
            compiled = plugin.compile(case.source)
            used = plugin.start(compiled)
            before = plugin.start(compiled)
            plugin.accept([used], [tokens])
            for matcher in (before, plugin.start(compiled)):
                check_mask(allowed(plugin, matcher), case, b"", "a new matcher beside a used one, ")

    @since(1, 0)
    def test_what_is_malformed_is_refused_with_a_message(self) -> None:
        """Check that a malformed grammar, or one that no text fits, raises a ValueError with a message.

        The next grammar must be compiled correctly.
        """
        plugin = self.made()
        for kind, texts in MALFORMED.items():
            for text in texts if self.claims(kind) else ():
                with pytest.raises(ValueError) as error:
                    plugin.compile(GrammarSource(kind, text))
                    pytest.fail(f"{kind} {text!r} is malformed, or its language is empty, but it is compiled")
                assert str(error.value).strip(), f"{kind} {text!r}: the error has no message"
        case = self.cases()[0]
        matcher = plugin.start(plugin.compile(case.source))
        check_mask(allowed(plugin, matcher), case, b"")

    @since(1, 0)
    def test_a_text_without_end_can_go_on_and_end(self) -> None:
        """Check random tokens of infinite languages.

        Some token is always allowed, each text that ends is in the language, and at least 3 of 12 texts end.
        """
        plugin = self.made()
        rng = np.random.default_rng(7)
        for kind, text in ENDLESS.items():
            if self.claims(kind):
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
            found = plugin.accept([matcher], [[token]])[0]
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
        for any_whitespace in (False, True):
            compiled = plugin.compile(GrammarSource("json", schema, any_whitespace=any_whitespace))
            for text, compact in (('{"a":true}', True), ('{ "a" : true }', False), ('{\n  "a": true\n}', False)):
                tokens = [FIRST_BYTE + byte for byte in text.encode()]
                matcher = plugin.start(compiled)
                accepted = plugin.accept([matcher], [tokens])[0] == len(tokens)
                expected = compact or any_whitespace
                assert accepted == expected, f"{text!r} with any_whitespace={any_whitespace}: accepted is {accepted}"

    @since(1, 0)
    def test_any_character_is_one_that_unicode_and_json_have(self) -> None:
        """Check that a text never has half of a surrogate pair, and a JSON string never a control character."""
        plugin = self.made()
        rng = np.random.default_rng(8)
        schema = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 6}, "maxItems": 4}
        for kind, text in (("regex", "[^a]{1,9}"), ("json", json.dumps(schema))):
            if self.claims(kind):
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
            difficult = [token for token in choices if token - FIRST_BYTE in (0xED, 0xA0, 0xBF, 9, 1)] or choices
            token = int(rng.choice(difficult if rng.random() < 0.5 else choices))
            if EOS[0] in choices and rng.random() < 0.5:
                decoded = text.decode()  # raises an error unless the bytes are UTF-8
                assert kind != "json" or isinstance(json.loads(decoded), list)
                return True
            plugin.accept([matcher], [[token]])
            text += vocabulary()[token]
            if token in EOS:
                break
        return False

    @since(1, 0)
    def test_several_threads_may_compile_at_once(self) -> None:
        """Check that threads can compile grammars while another thread fills masks."""
        plugin = self.made()
        cases = self.cases() * 4
        matcher = plugin.start(plugin.compile(cases[0].source))
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
        rest = rest[len(vocabulary()[token]) :]
    return tokens


def joined(tokens: Sequence[int]) -> bytes:
    """Return the bytes of some token ids."""
    return b"".join(vocabulary()[token] for token in tokens)


def bits(row: np.ndarray) -> list[int]:
    """Return the token ids below ``WIDTH`` whose bit is set in one row of a mask, int32 [words]."""
    unpacked = np.unpackbits(row.view(np.uint8), bitorder="little")
    return np.flatnonzero(unpacked[:WIDTH]).tolist()


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
    assert found == expected, (
        f"{situation}{str(case)[:200]} after {text!r}: it allows {_names(set(found) - set(expected))} that cannot "
        f"follow, and forbids {_names(set(expected) - set(found))} that can"
    )


def _names(tokens: Collection[int]) -> str:
    """Describe up to eight token ids for a message, with the bytes of each."""
    data = dict(enumerate(vocabulary()))
    names = sorted(repr(data[token]) if data.get(token) else f"<{token}>" for token in tokens)
    return ", ".join(names[:8]) or "nothing"


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
    return list(value) == ["a"] and all(map(_is_integer, value["a"]))


def _is_integer(value: Any) -> bool:
    """Return whether a JSON value is an integer, which may be written as 1.0."""
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float)) and value == int(value)
