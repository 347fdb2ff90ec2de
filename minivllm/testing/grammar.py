"""Grammars: masks allow exactly what can go on, over languages that are small enough to be listed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from minivllm.core.interfaces.grammar import Grammar, GrammarContext, GrammarSource

from .base import since
from .kept import Lasting
from .spec import SpecConformance

EOS = (3, 270)
WIDTH = 300  # logits are wider than the vocabulary
WORDS = (b"ab", b"abc", b"bc", b"true", b'"a', b'":', b'{"', b"12", b"\xc3\xa9", b"\xa9x", b" b", b"no", b"cab",
         b"a", b"ab")  # fmt: skip


def vocabulary() -> list[bytes]:
    """Four special ids (two end-of-sequence ids among them are silent), every byte, and some words, one byte and one
    word under two ids each, as vocabularies with byte tokens have them."""
    tokens = [b"", b"", b"", b"", *(bytes([i]) for i in range(256)), *WORDS]
    tokens[EOS[1]] = b""
    return tokens


@dataclass(frozen=True)
class GrammarCase:
    """A grammar and all the texts that fit it."""

    kind: str
    text: str
    fits: tuple[str, ...]
    any_whitespace: bool = True

    @property
    def source(self) -> GrammarSource:
        return GrammarSource(self.kind, self.text, self.any_whitespace)

    def __str__(self) -> str:
        return f"{self.kind} {self.text!r}"


def _json(schema: Any, *fits: Any) -> GrammarCase:
    texts = tuple(json.dumps(v, separators=(",", ":")) for v in fits)
    return GrammarCase("json", json.dumps(schema), texts, any_whitespace=False)


def _object(**properties: Any) -> dict[str, Any]:
    more = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **more}


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
    GrammarCase("grammar", 'root ::= "a" tail\ntail ::= "b" | "bc" | [1-2]', ("ab", "abc", "a1", "a2")),
)  # fmt: skip
MALFORMED = {
    "regex": ("[", "(a", "a{2,1}", "a**)"),
    "json": ('{"type": "nothing"}', '{"type": "string", "pattern": "["}', '{"$ref": "#/$defs/none"}', "false"),
    "grammar": ("start: (", "start: nobody", "%%%", "root ::= nobody"),
}
LONG = "abctruebcno" * 15  # a text, of 165 bytes
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
    """What the spec claims in ``features`` is tested: json, regex, choice, grammar."""

    kind = "grammar"
    threads = 2

    def context(self) -> tuple[Any, ...]:
        return (GrammarContext(tuple(vocabulary()), WIDTH, EOS, self.threads),)

    def made(self) -> Grammar:
        return self.build(*self.context())

    def cases(self) -> list[GrammarCase]:
        """Those of the forms that the plug-in claims."""
        found = [case for case in CASES if self.claims(case.kind)]
        assert found, "features names none of json, regex, choice and grammar: nobody could use it"
        return found

    def exercise(self, instance: Grammar) -> Any:
        case = self.cases()[0]
        matcher = instance.start(instance.compile(case.source))
        masks = [allowed(instance, matcher)]
        for token in spelled(random.Random(0), case.fits[-1]):
            instance.accept([matcher], [[token]])
            masks.append(allowed(instance, matcher))
        return masks

    def once_more(self, instance: Grammar, number: int) -> None:
        """Serve a sequence with a grammar that nobody has asked for before."""
        word = f"v{number}"
        texts = {
            "choice": json.dumps([word, "a"]),
            "regex": f"{word}|a",
            "json": json.dumps({"enum": [word, "a"]}),
            "grammar": f'start: "{word}" | "a"',
        }
        kind = self.cases()[0].kind
        matcher = instance.start(instance.compile(GrammarSource(kind, texts[kind], False)))
        instance.accept([matcher], [[next(iter(allowed(instance, matcher)))]])

    def walks(self, n: int, *, seed: int = 0) -> Iterator[tuple[GrammarCase, list[int]]]:
        """Cases, each with ``n`` ways to spell texts of it in tokens."""
        rng = random.Random(seed)
        for case in self.cases():
            for _ in range(n):
                yield case, spelled(rng, rng.choice(case.fits))

    @since(1, 0)
    def test_a_mask_allows_exactly_what_can_go_on(self) -> None:
        """A token is allowed if and only if some text that fits goes on with its bytes, however a text is cut into
        tokens; never a special token or an id that is none."""
        plugin = self.made()
        for case, tokens in self.walks(6):
            matcher, text = plugin.start(plugin.compile(case.source)), b""
            for token in [*tokens, None]:
                got, want = allowed(plugin, matcher), viable(case, text)
                assert got == want, f"{case} after {text!r}: {told(got, want)}"
                if token is not None:
                    assert plugin.accept([matcher], [[token]])[0] == 1, f"{case}: {token} is refused after {text!r}"
                    text += vocabulary()[token]

    @since(1, 0)
    def test_the_end_is_allowed_exactly_where_the_text_fits(self) -> None:
        """All end-of-sequence ids alike; each of them is accepted there, refused elsewhere, and the last."""
        plugin = self.made()
        for case, tokens in self.walks(3, seed=1):
            compiled = plugin.compile(case.source)
            for n in range(len(tokens) + 1):
                text = b"".join(vocabulary()[t] for t in tokens[:n])
                fits = text in {f.encode() for f in case.fits}
                for eos in EOS:
                    matcher = plugin.start(compiled)
                    took = plugin.accept([matcher], [tokens[:n]])[0] if n else 0
                    assert took == n, f"{case}: {took} of {tokens[:n]} are taken"
                    assert (eos in allowed(plugin, matcher)) == fits, f"{case} after {text!r}: the end is {not fits}"
                    assert plugin.accept([matcher], [[eos]])[0] == int(fits), f"{case} after {text!r}: eos {eos}"
                    if fits:
                        assert plugin.accept([matcher], [[tokens[0]]])[0] == 0, f"{case}: a token after the end"

    @since(1, 0)
    def test_what_a_mask_forbids_is_refused(self) -> None:
        """Also after tokens that were taken in the same call: the number of those is the answer."""
        plugin, rng = self.made(), random.Random(2)
        for case, tokens in self.walks(3, seed=2):
            compiled = plugin.compile(case.source)
            cut = rng.randrange(len(tokens) + 1)
            text = b"".join(vocabulary()[t] for t in tokens[:cut])
            wrong = sorted(set(range(len(vocabulary()))) - set(viable(case, text)) - set(EOS))
            for token in rng.sample(wrong, min(8, len(wrong))):
                took = plugin.accept([plugin.start(compiled)], [[*tokens[:cut], token]])[0]
                assert took == cut, f"{case}: took {took} of {cut} tokens that fit and one, {token}, that does not"

    @since(1, 0)
    def test_only_the_rows_that_are_named_are_written_and_those_wholly(self) -> None:
        plugin, case = self.made(), self.cases()[0]
        compiled = plugin.compile(case.source)
        want = viable(case, b"")
        for before in (0, -1, 0x5A5A5A5A):
            mask = np.full((5, -(-WIDTH // 32)), before, np.int32)
            assert not plugin.fill([plugin.start(compiled), plugin.start(compiled)], mask, [3, 1])
            for row in (1, 3):
                assert bits(mask[row]) == want, f"row {row} of a mask that held {before}: {told(bits(mask[row]), want)}"
            assert (mask[[0, 2, 4]] == before).all(), "a row that was not named has changed"

    @since(1, 0)
    def test_a_batch_gives_what_each_matcher_gives_alone(self) -> None:
        """Many matchers of several grammars, in any order, over several steps."""
        plugin, rng = self.made(), random.Random(3)
        work = list(self.walks(4, seed=3))
        rng.shuffle(work)
        matchers = [plugin.start(plugin.compile(case.source)) for case, _ in work]
        texts = [b""] * len(work)
        for step in range(12):
            live = [i for i, (_, tokens) in enumerate(work) if len(tokens) >= step]
            mask = np.zeros((len(work), -(-WIDTH // 32)), np.int32)
            failed = plugin.fill([matchers[i] for i in live], mask, live)
            assert not failed, f"step {step}: {failed}"
            for i in live:
                want = viable(work[i][0], texts[i])
                assert bits(mask[i]) == want, f"{work[i][0]} after {texts[i]!r}: {told(bits(mask[i]), want)}"
            live = [i for i, (_, tokens) in enumerate(work) if len(tokens) > step]
            if not live:
                break
            new = [[work[i][1][step]] for i in live]
            assert list(plugin.accept([matchers[i] for i in live], new)) == [1] * len(live)
            for i, tokens in zip(live, new, strict=True):
                texts[i] += vocabulary()[tokens[0]]

    @since(1, 0)
    def test_long_texts_and_long_lists_are_held_whole(self) -> None:
        """A text of 165 bytes and 300 texts: masks up to the end, and the end itself."""
        plugin, rng = self.made(), random.Random(9)
        for case in (case for case in LARGE if self.claims(case.kind)):
            matcher, text = plugin.start(plugin.compile(case.source)), b""
            tokens = spelled(rng, case.fits[0] if len(case.fits) == 2 else case.fits[-1])
            for i, token in enumerate([*tokens, None]):
                if i % 16 == 0 or len(tokens) - i < 2:
                    got, want = allowed(plugin, matcher), viable(case, text)
                    assert got == want, f"{case.kind} of {len(case.text)} bytes after {text!r}: {told(got, want)}"
                if token is not None:
                    took = plugin.accept([matcher], [[token]])[0]
                    assert took == 1, f"{case.kind} of {len(case.text)} bytes: {token} is refused after {text!r}"
                    text += vocabulary()[token]

    @since(1, 0)
    def test_matchers_of_one_grammar_share_no_state(self) -> None:
        plugin = self.made()
        for case, tokens in self.walks(1, seed=6):
            compiled = plugin.compile(case.source)
            used, fresh = plugin.start(compiled), plugin.start(compiled)
            plugin.accept([used], [tokens])
            for matcher in (fresh, plugin.start(compiled)):
                got, want = allowed(plugin, matcher), viable(case, b"")
                assert got == want, f"{case}: a matcher beside one that has gone on: {told(got, want)}"

    @since(1, 0)
    def test_what_is_malformed_is_refused_with_a_message(self) -> None:
        """A ValueError, and what is compiled afterwards is as right as ever."""
        plugin = self.made()
        for kind, texts in MALFORMED.items():
            for text in texts if self.claims(kind) else ():
                with pytest.raises(ValueError) as e:
                    plugin.compile(GrammarSource(kind, text))
                    pytest.fail(f"{kind} {text!r} is malformed, or nothing fits it, and it is compiled")
                assert str(e.value).strip(), f"{kind} {text!r}: a refusal without words"
        case = self.cases()[0]
        assert allowed(plugin, plugin.start(plugin.compile(case.source))) == viable(case, b"")

    @since(1, 0)
    def test_a_text_without_end_can_go_on_and_end(self) -> None:
        """Random tokens under the masks: no mask is empty, and what ends is what was asked for."""
        plugin, rng = self.made(), np.random.default_rng(7)
        for kind, text in ENDLESS.items():
            if not self.claims(kind):
                continue
            compiled, ended = plugin.compile(GrammarSource(kind, text)), 0
            for _ in range(12):
                matcher, got = plugin.start(compiled), b""
                for _ in range(60):
                    now = allowed(plugin, matcher)
                    assert now, f"{kind} {text!r} after {got!r}: no token is allowed"
                    ends = [t for t in now if t in EOS]
                    token = ends[0] if ends and rng.random() < 0.4 else int(rng.choice(now))
                    assert plugin.accept([matcher], [[token]])[0] == 1, f"{kind} after {got!r}: {token} is refused"
                    if token in EOS:
                        ended += 1
                        assert fits(kind, got.decode()), f"{kind} {text!r}: {got!r} does not fit"
                        break
                    got += vocabulary()[token]
            assert ended >= 3, f"the test itself is too weak: {ended} of 12 texts of {kind} ended"

    @since(1, 0)
    def test_whitespace_in_json_is_as_asked(self) -> None:
        self.need("json")
        plugin = self.made()
        text = json.dumps(_object(a={"type": "boolean"}))
        tight, loose = (plugin.compile(GrammarSource("json", text, any_whitespace=free)) for free in (False, True))
        for written, both in (('{"a":true}', True), ('{ "a" : true }', False), ('{\n  "a": true\n}', False)):
            tokens = [4 + b for b in written.encode()]
            for compiled, want in ((tight, both), (loose, True)):
                took = plugin.accept([plugin.start(compiled)], [tokens])[0] == len(tokens)
                assert took == want, f"{written!r} with any_whitespace={compiled is loose}: taken is {took}"

    @since(1, 0)
    def test_any_character_is_one_that_unicode_and_json_have(self) -> None:
        """No half of a surrogate pair, and no bare control character in a string of JSON."""
        plugin, rng = self.made(), np.random.default_rng(8)
        schema = {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 6}, "maxItems": 4}
        for kind, text in (("regex", "[^a]{1,9}"), ("json", json.dumps(schema))):
            if not self.claims(kind):
                continue
            compiled, ended = plugin.compile(GrammarSource(kind, text)), 0
            for _ in range(60):
                matcher, got = plugin.start(compiled), b""
                for _ in range(80):
                    now = allowed(plugin, matcher)
                    hard = [t for t in now if t in (4 + 0xED, 4 + 0xA0, 4 + 0xBF, 4 + 9, 4 + 1)] or now
                    token = int(rng.choice(hard if rng.random() < 0.5 else now))
                    if EOS[0] in now and rng.random() < 0.5:
                        read = got.decode()  # raises if it is no UTF-8
                        assert kind != "json" or isinstance(json.loads(read), list)
                        ended += 1
                        break
                    plugin.accept([matcher], [[token]])
                    got += vocabulary()[token]
                    if token in EOS:
                        break
            assert ended >= 5, f"the test itself is too weak: {ended} of 60 texts of {kind} ended"

    @since(1, 0)
    def test_several_threads_may_compile_at_once(self) -> None:
        """Beside the loop, which fills masks meanwhile."""
        plugin, cases = self.made(), self.cases() * 4
        matcher = plugin.start(plugin.compile(cases[0].source))
        with ThreadPoolExecutor(4) as pool:
            made = [pool.submit(plugin.compile, case.source) for case in cases]
            for _ in range(20):
                assert allowed(plugin, matcher) == viable(cases[0], b"")
            for case, compiled in zip(cases, made, strict=True):
                got, want = allowed(plugin, plugin.start(compiled.result())), viable(case, b"")
                assert got == want, f"{case}, compiled beside others: {told(got, want)}"


# ---- what is right, by listing --------------------------------------------------------------------------------------


def viable(case: GrammarCase, text: bytes) -> list[int]:
    """Ids that may follow a text, in order."""
    rest = [f.encode()[len(text) :] for f in case.fits if f.encode().startswith(text)]
    found = [i for i, token in enumerate(vocabulary()) if token and any(r.startswith(token) for r in rest)]
    return sorted(found + (list(EOS) if b"" in rest else []))


def spelled(rng: random.Random, text: str) -> list[int]:
    """One of the ways to cut a text into tokens."""
    data, tokens, out = text.encode(), vocabulary(), []
    while data:
        token = rng.choice([i for i, t in enumerate(tokens) if t and data.startswith(t)])
        out.append(token)
        data = data[len(tokens[token]) :]
    return out


def bits(row: np.ndarray) -> list[int]:
    """Ids below WIDTH whose bit is set."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:WIDTH]).tolist()


def allowed(plugin: Grammar, matcher: Any) -> list[int]:
    mask = np.zeros((1, -(-WIDTH // 32)), np.int32)
    failed: Mapping[int, str] = plugin.fill([matcher], mask, [0])
    assert not failed, f"the matcher cannot go on: {failed[0]}"
    return bits(mask[0])


def told(got: Sequence[int], want: Sequence[int]) -> str:
    """How two masks differ, in tokens."""
    name = {i: repr(t) if t else f"<{i}>" for i, t in enumerate(vocabulary())}
    more, less = ([name.get(i, f"<{i}>") for i in ids] for ids in (set(got) - set(want), set(want) - set(got)))
    much, little = (", ".join(sorted(names)[:8]) or "nothing" for names in (more, less))
    return f"it allows {much} that cannot go on, and forbids {little} that can"


def fits(kind: str, text: str) -> bool:
    """Whether a text fits the language of ENDLESS."""
    if kind == "regex":
        return re.fullmatch("a+b?", text) is not None
    if kind == "choice":
        return text in ("ab", "abc")
    if kind == "grammar":
        n = len(text) // 2
        return text == "a" * n + "c" + "b" * n
    value = json.loads(text)
    whole = [isinstance(v, (int, float)) and not isinstance(v, bool) and v == int(v) for v in value["a"]]
    return list(value) == ["a"] and all(whole)
