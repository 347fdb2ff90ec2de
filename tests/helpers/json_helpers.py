"""Shared code of tests of JSON and of regular expressions, with both libraries over bytes, texts drawn under masks, and
random schemas.
"""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest

from minivllm.core.interfaces.grammar import GrammarContext, GrammarSource
from minivllm.plugins.grammar import formats

EOS = 256
BYTES = GrammarContext([*(bytes([i]) for i in range(256)), b""], 257, (EOS,))  # each byte is a token


@pytest.fixture(params=["llguidance", "xgrammar"], scope="module")
def library(request):
    pytest.importorskip(request.param)
    if request.param == "llguidance":
        from minivllm.plugins.grammar.llguidance_plugin import LLGuidance as Plugin
    else:
        from minivllm.plugins.grammar.xgrammar_plugin import XGrammar as Plugin
    return Plugin(None, BYTES)


def compiled(library, kind, text, **more):
    """Return a compiled grammar, or None if it is refused with the name of the unsupported part."""
    source = GrammarSource(kind, text if kind == "regex" else json.dumps(text), **{"any_whitespace": False, **more})
    try:
        return library.compile(source)
    except ValueError as e:
        assert str(e).strip()
        return None


def allowed(library, matcher):
    mask = np.zeros((1, 9), np.int32)
    assert not library.fill([matcher], mask, [0])
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:257]).tolist()


def takes(library, grammar, text):
    """Return whether the masks allow this text up to its end."""
    matcher = library.start(grammar)
    for byte in text.encode():
        if byte not in allowed(library, matcher) or library.accept([matcher], [[byte]])[0] != 1:
            return False
    return EOS in allowed(library, matcher)


def draw(library, grammar, rng, most=160):
    """Draw a text at random with a preference for difficult characters.  Return None if it becomes too long."""
    matcher, text = library.start(grammar), b""
    hurry = rng.choice([0.2, 0.6])
    while len(text) < most:
        tokens = allowed(library, matcher)
        assert tokens, f"nothing may follow {text!r}"
        if EOS in tokens and rng.random() < 0.5:
            return text.decode()
        closing = [t for t in tokens if t in b'"}]' and rng.random() < hurry] if max(tokens) < EOS else []
        hard = [t for t in tokens if t < EOS and t in b'\\u/"-0eE.+\xed\x7f\xef\xbb\xbf\xc2\x85\xe2\x80\xa8a9k']
        token = rng.choice(closing or (hard if hard and rng.random() < 0.4 else tokens))
        assert library.accept([matcher], [[token]])[0] == 1, f"{token} is allowed and refused after {text!r}"
        if token == EOS:
            return text.decode()
        text += bytes([token])
    return None


# ---- random schemas --------------------------------------------------------------------------------------------------

NAMES = ["a", "ab", "b", "\u00e9", 'a"b', "a/b", "x\n", "", "\U0001f600", "a\\"]
PATTERNS = [
    "^a+$", "b", r"^\d{1,3}$", r"^\S+$", r"^[^\W\d]{1,4}$", "^.$", "^(a|b\n)*$", r"\.$", '^["\\\\]$', "^a|b$", "^$",
    r"^\/\w*$", r"^[\s\S]{0,3}$", r"^[^\S]$", r"^(?:x\d{1,3})?$",
]  # fmt: skip
VALUES = [
    None, True, 1, -2, 1.5, "a", "\u00e9\n", "\U0001f600", '"\\/', [1, "a"], {"a": 1, "b": [None]}, {}, 1.0, -0.0, 1e-7,
    "\x7f", 2**53, 0.30000000000000004, 10**30, "\x01",
]  # fmt: skip
BOUNDS = [0, 1, -1, 5, 10, -10, 99, 2**31, -(2**40), 0.5, -0.25, 1.1, -3.7, 1e-3, 123456.789, -0.0, 1e20, -1e20]


class Maker:
    """Random schemas; the properties of no two objects have a common name."""

    def __init__(self, seed):
        self.rng, self.objects = random.Random(seed), 0

    def schema(self, depth=0):
        kinds = ["number", "integer", "string", "string", "values", "any"]
        kinds += ["array", "object", "object", "object", "anyOf", "allOf"] if depth < 3 else []
        return getattr(self, self.rng.choice(kinds))(depth)

    def some(self, share, **values):
        return {key: make() for key, make in values.items() if self.rng.random() < share}

    def number(self, depth, kind="number"):
        whole = [int(b) for b in BOUNDS if abs(b) < 1e9]
        bound = lambda: self.rng.choice(whole if kind == "integer" and self.rng.random() < 0.8 else BOUNDS)  # noqa: E731
        keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        factor = lambda: self.rng.choice([1, 2, 3, 7, 10, 0.5, 0.25, 2.5])  # noqa: E731
        return {"type": kind, **self.some(0.25, **dict.fromkeys(keys, bound)), **self.some(0.2, multipleOf=factor)}

    def integer(self, depth):
        return self.number(depth, "integer")

    def string(self, depth):
        return {
            "type": "string",
            **self.some(
                0.35,
                pattern=lambda: self.rng.choice(PATTERNS),
                format=lambda: self.rng.choice(sorted(formats.FORMATS)),
                minLength=lambda: self.rng.randrange(4),
                maxLength=lambda: self.rng.randrange(6),
            ),
        }

    def values(self, depth):
        found = [self.rng.choice(VALUES) for _ in range(self.rng.randrange(1, 4))]
        kind = lambda: self.rng.choice(["string", "integer", "number", ["null", "string"]])  # noqa: E731
        return {**self.rng.choice([{"enum": found}, {"const": found[0]}]), **self.some(0.3, type=kind)}

    def any(self, depth):
        return self.rng.choice(
            [
                {},
                {"type": ["string", "null"]},
                {"type": "object"},
                {"type": "array"},
                {"type": ["integer", "boolean"], "minimum": 3},
                {"pattern": "^a"},
            ]
        )

    def array(self, depth):
        one = lambda: self.schema(depth + 1)  # noqa: E731
        return {
            "type": "array",
            **self.some(
                0.5,
                items=one,
                prefixItems=lambda: [one()],
                minItems=lambda: self.rng.randrange(3),
                maxItems=lambda: self.rng.randrange(4),
            ),
        }

    def object(self, depth):
        self.objects += 1
        one, here = (lambda: self.schema(depth + 1)), str(self.objects)
        names = [name + here for name in self.rng.sample(NAMES, self.rng.randrange(4))]
        schema = {"type": "object", "properties": {name: one() for name in names}}
        schema["required"] = self.rng.sample(names, self.rng.randrange(len(names) + 1))
        schema |= self.some(0.35, additionalProperties=one) or self.some(0.6, additionalProperties=lambda: False)
        patterns = lambda: {p: one() for p in self.rng.sample(["^a", "b$", r"^\d+$", "^x.$"], 2)}  # noqa: E731
        sizes = {key: lambda: self.rng.randrange(4) for key in ("minProperties", "maxProperties")}
        return schema | self.some(0.2, patternProperties=patterns, **sizes)

    def anyOf(self, depth):
        return {self.rng.choice(["anyOf", "anyOf", "oneOf"]): [self.schema(depth + 1) for _ in range(2)]}

    def allOf(self, depth):
        return {**self.object(depth), "allOf": [self.object(depth + 1)]}


def declared(schema):
    if isinstance(schema, dict):
        yield from schema.get("properties", {}) if isinstance(schema.get("properties"), dict) else ()
        for inner in schema.values():
            yield from declared(inner)
    elif isinstance(schema, list):
        for inner in schema:
            yield from declared(inner)


def check(schema, text):
    """Check that a text is strict JSON that fits, without a declared name given twice."""
    twice, names = [], set(declared(schema))

    def read(pairs):
        keys = [key for key, _ in pairs]
        twice.extend(key for key in keys if keys.count(key) > 1 and key in names)
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=read)
    json.dumps(value, ensure_ascii=False).encode()  # fails for half of a surrogate pair
    assert not twice, f"{text}: {twice} given twice"
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)
