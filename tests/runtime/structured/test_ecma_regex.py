"""Regular expressions and formats: the texts that they match, in both libraries."""

from __future__ import annotations

import json
import random
import re
from datetime import date, datetime
from ipaddress import IPv6Address

import pytest

pytest.importorskip("jsonschema")

from json_helpers import compiled, draw, library, takes

from minivllm.plugins.grammar import ecma_regex, formats

_ = library  # the fixture

SIGNS = 'ab"\\\n'


def expression(rng, depth=0):
    kind = rng.randrange(8 if depth < 4 else 2)
    inner = lambda: expression(rng, depth + 1)  # noqa: E731
    if kind < 2:
        return rng.choice(["a", "b", '"', r"\\", r"\n", "[ab]", '[^"]', ".", "[^ab]", r"[\n\\]", r"\w", r"\S", r"\x61"])
    if kind < 5:
        return "".join(inner() for _ in range(rng.randrange(1, 4)))
    if kind == 5:
        return "(" + "|".join(inner() for _ in range(rng.randrange(1, 4))) + ")"
    return f"({inner()})" + rng.choice(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?"])


@pytest.mark.parametrize("kind", ["regex", "json"])
def test_an_expression_matches_what_python_says(library, kind):
    """As a text of its own, and as a pattern within a string of JSON, which is spelled with escapes."""
    for seed in range(120):
        rng = random.Random(seed)
        pattern = expression(rng)
        schema = {"type": "string", "pattern": f"^(?:{pattern})$"}
        grammar = compiled(library, kind, pattern if kind == "regex" else schema)
        for _ in range(12):
            text = "".join(rng.choice(SIGNS) for _ in range(rng.randrange(5)))
            got = takes(library, grammar, text if kind == "regex" else json.dumps(text))
            assert got == (re.fullmatch(pattern, text) is not None), (seed, pattern, text)


@pytest.mark.parametrize("pattern, matches, fails", [
    (r"\s", " \t\n\v\f\r", "\u00a0\ufeff\u2028\x85\x1ca"), (r"\S", "a\u00e9\u4e2d", " \n\u00a0\ufeff\u2028\x85\x1c"),
    (r"\d", "07", "\u0663\u00b2a"), (r"\D", "a\u00b2", "7\u0663"), (r"\w", "aZ_9", "\u00e9\u4e2d-"),
    (r"\W", "-\u2028 ", "a_\u00e9\u0663"), (".", "a\u00e9\x85", "\n\r\u2028\u2029"), ("(?s).", "\n\u2028a", ""),
    (r"[^\s]", "a", "\ufeff\u00a0\x1c "), (r"[^\S]", " \n", "\u00a0\ufeffa"), (r"[^\W]", "a_", "\u00e9-"),
    (r"[^\w-]", "+", "a-\u00e9"), ("[^k]", "K\u212a", "k"), ("(?i)k", "kK", "\u212a"), ("(?i)[^k]", "j", "kK\u212a"),
    ("(?i:[a-c])", "aB", "d"), (r"\p{Lu}", "A\u00c9", "a1"), (r"\P{L}", "1-", "a\u00c9\u0378"), ("[a&&b]", "a&b", "c"),
    (r"[\]\[^-]", "][^-", "a"), (r"\u{1F600}|\ud83d\ude01|\x41|\cJ|\0", "\U0001f600\U0001f601A\n\0", "B"),
    ("^a$|^b", "ab", "c"), ("(?:^)a($)", "a", "b"), (r"[\b]|\/|\-|\#", "\b/-#", "b"), ("{|}|]", "{}]", "["),
    (r"[\w-.]", "a_-.", ",/ "), (r"[\w-z]", "a_-z", ".+"), (r"[+-\d]", "+-7", ",."), (r"[\d-\s]", "7- ", "a/"),
    (r"[^\w-.]", ",/", "a-.\u00e9"), (r"(?i:[\d-z])", "7-zZ", "ay"), (r"[\d-z-a]", "7-za", "by"), (r"[\w-]", "a-", "."),
])  # fmt: skip
def test_classes_are_those_that_ecma_and_python_have_in_common(library, pattern, matches, fails):
    grammar = compiled(library, "regex", pattern)
    assert [c for c in matches if not takes(library, grammar, c)] == []
    assert [c for c in fails if takes(library, grammar, c)] == []


@pytest.mark.parametrize("pattern, names", [
    (r"\bx", r"word boundary \\b"), ("(?=a)b", "look-around"), ("(?<!a)b", "look-around"), (r"(a)\1", "back reference"),
    ("a$b", "anchor in its middle"), ("a^", "anchor in its middle"), ("(?m)^a", r"\(\?m"), ("a{,2}", r"\{,2\}"),
    ("[]a]", "empty"), ("a**", "repetition of a repetition"), ("a++", "repetition of a repetition"), ("^*", "anchor"),
    (r"\Aa", "escape"), (r"\p{Nope}", "Nope"), (r"\ud800", "number of a character"), ("(?i)\u00e9", "beyond ASCII"),
    ("(a", "without its"), ("a)", "without its"), ("[z-a]", "does not go up"), ("(?x)a", r"\(\?x"),
    (r"\p{Script=Greek}", "Script=Greek"), ("(a|)^b", "anchor in its middle"), ("()a^()", "anchor in its middle"),
    ("a{2,1}", "smaller"), ("a{9999999}", "at most"), ("(" * 101 + ")" * 101, "groups within 100"),
])  # fmt: skip
def test_expressions_that_are_read_in_several_ways_are_refused_by_name(pattern, names):
    for read in (ecma_regex.whole, ecma_regex.search):
        with pytest.raises(ValueError, match=names) as e:
            read(pattern)
        assert len(str(e.value)) < 250 and "\n" not in str(e.value)


def test_a_pattern_is_searched_for_and_anchors_bind_at_the_ends(library):
    for pattern in ("b", "^b", "b$", "^a|b$", "(^a|b)c*$", "^", "$", "", "^(?:ab|b)$"):
        grammar = compiled(library, "json", {"type": "string", "pattern": pattern})
        for text in ("", "a", "b", "ab", "ba", "xbx", "ac", "xac", "bc", "c"):
            assert takes(library, grammar, f'"{text}"') == (re.search(pattern, text) is not None), (pattern, text)


@pytest.mark.parametrize("pattern", [
    "(?i)^yes$", "(?s)^.*$", "(?i)^[a-z]+", "(?is)^a|b$", "()^a$", "^a$()", "(?:)^a", "^()a", "a$(?:)", "()*^a",
    "(){2}^a(){3}$", "((?:))^a", "(?i)(^a|b$)", "()(?:)^(?:)()$()", "(?i)()^a",
])  # fmt: skip
def test_flags_and_empty_groups_leave_an_anchor_at_its_edge(library, pattern):
    grammar = compiled(library, "json", {"type": "string", "pattern": pattern})
    for text in ("", "a", "A", "b", "ab", "ba", "yes", "YES", "yes!", "1", "1a"):
        assert takes(library, grammar, f'"{text}"') == (re.search(pattern, text) is not None), (pattern, text)


def test_whitespace_is_what_json_allows(library):
    def requested(pattern):
        return compiled(library, "json", {"type": "array"}, any_whitespace=True, whitespace=pattern)

    if requested(r"\s*") is None:  # a library that has none
        return
    assert takes(library, requested(r"\s*"), "[ 1\n,\t2]") and not takes(library, requested(r"\s*"), "[\v1]")
    assert (
        requested("[a-z]") is None
        and takes(library, requested("[ a]?"), "[ 1]")
        and takes(library, requested(""), "[1,2]")
    )


# ---- formats ---------------------------------------------------------------------------------------------------------

UUID = "12345678-1234-1234-1234-123456789aBc"
LONG = ".".join(["a" * 60] * 4)
GOOD = {
    "date": ["2024-02-29", "2000-02-29", "2023-12-31", "0001-01-01", "9999-11-30"],
    "time": ["23:59:59Z", "00:00:00.123456789+23:59", "12:00:00-00:00"],
    "date-time": ["2024-02-29T00:00:00Z", "1999-12-31T23:59:59.5-11:30"],
    "duration": ["P1Y", "P1Y2M3DT4H5M6S", "PT1H", "P4W", "PT1M2S", "P0D"],
    "email": ["a.b+c@d-e.org", "x@y", "1@a.b.c"],
    "hostname": ["a", "a.b-c.org", "1a.b"],
    "ipv4": ["0.0.0.0", "255.249.199.99"],
    "ipv6": ["::", "1::", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:7::", "a:B::c"],
    "uri": ["http://a/b", "a:", "http://u:p@[::1]:80/x?y#z", "urn:x:y", "mailto:a@b"],
    "uuid": [UUID],
}
BAD = {
    "date": ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-00-10", "2024-1-1", "0000-01-01", "24-1-1"],
    "time": ["24:00:00Z", "23:60:00Z", "23:59:60Z", "12:00:00", "12:00Z", "12:00:00+24:00", "12:00:00+0000", "1:0:0Z"],
    "date-time": ["2023-02-29T00:00:00Z", "2024-02-29 00:00:00Z", "2024-02-29T00:00:00", "2024-02-30T00:00:00Z"],
    "duration": ["P", "PT", "P1DT", "P1W2D", "P1Y2D", "PT1H2S", "1Y", "P-1D", "P1.5D"],
    "email": ["a", "@b", "a@", "a..b@c", ".a@b", "a@-b", "a@b-", "a b@c", "a@b@c", "a" * 65 + "@b", "a@1.2.3.4"],
    "hostname": ["", "-a", "a-", "a..b", "a.", "a_b", "a" * 64, LONG + ".abcdefghij", "1.2.3.4", "xn--a", "a.1"],
    "ipv4": ["256.1.1.1", "01.1.1.1", "1.1.1", "1.1.1.1.1"],
    "ipv6": ["1:2:3:4:5:6:7", "1::2::3", "12345::", "1:2:3:4:5:6:7::8:9", "::1.2.3.256", ":::"],
    "uri": ["a", "//a", "http://[1::2::3]/", "a:b c", "x:%zz", "1a:b", "http://a:b:c/"],
    "uuid": ["12345678-1234-1234-1234-123456789ab", "12345678123412341234123456789abc", "g" + UUID[1:]],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_a_format_is_held_exactly(library, name):
    grammar = compiled(library, "json", {"type": "string", "format": name})
    assert [text for text in GOOD[name] if not takes(library, grammar, f'"{text}"')] == []
    assert [text for text in BAD[name] if takes(library, grammar, f'"{text}"')] == []


READ = {
    "date": date.fromisoformat, "ipv6": IPv6Address, "date-time": lambda t: datetime.fromisoformat(t[:19]),
    "email": lambda t: [None][len(t) > 254 or len(t.partition("@")[0]) > 64],
    "hostname": lambda t: [None][len(t) > 253 or max(map(len, t.split("."))) > 63],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(READ))
def test_what_is_drawn_of_a_format_is_read(library, name):
    grammar, rng = compiled(library, "json", {"type": "string", "format": name}), random.Random(3)
    for _ in range(60):
        if (text := draw(library, grammar, rng, most=300)) is not None:
            READ[name](json.loads(text))


@pytest.mark.parametrize("name", sorted(formats.ANNOTATIONS))
def test_a_format_that_only_annotates_is_any_string(library, name):
    grammar = compiled(library, "json", {"type": "string", "format": name, "maxLength": 4})
    assert [text for text in ("", "a/b", "=?", "\u00e9\u4e2d") if not takes(library, grammar, f'"{text}"')] == []
    assert not takes(library, grammar, '"abcde"') and not takes(library, grammar, "5")


def test_models_of_secrets_bytes_and_paths_can_be_asked_for(library):
    from pathlib import Path

    from pydantic import BaseModel, DirectoryPath, FilePath, SecretStr

    class Model(BaseModel):
        a: SecretStr
        b: bytes
        c: Path
        d: FilePath
        e: DirectoryPath

    grammar = compiled(library, "json", {**Model.model_json_schema(), "additionalProperties": False})
    assert takes(library, grammar, '{"a":"s","b":"t","c":"/u","d":"v","e":"/"}')


@pytest.mark.parametrize("good, bad, more", [
    ("2024-12-31", ["2023-12-31", "2024-02-30"], {"format": "date", "pattern": "^2024"}),
    ("a@b", ["aa@b", "a"], {"format": "email", "maxLength": 3}),
    ("\U0001f600a", ["\U0001f600", "abc"], {"minLength": 2, "maxLength": 2}),
    ("ab", ["a", "abc", "xy"], {"minLength": 2, "maxLength": 2, "pattern": "^a"}),
])  # fmt: skip
def test_what_is_asked_of_one_string_holds_together(library, good, bad, more):
    grammar = compiled(library, "json", {"type": "string", **more})
    if grammar is not None:
        assert takes(library, grammar, json.dumps(good, ensure_ascii=False))
        assert [text for text in bad if takes(library, grammar, json.dumps(text, ensure_ascii=False))] == []
