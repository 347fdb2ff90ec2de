"""Random answers that a grammar of calls allows, and random functions with schemas."""

import numpy as np

from minivllm.core.interfaces.grammar import GrammarContext, GrammarSource
from minivllm.plugins.grammar.llguidance_plugin import LLGuidance
from minivllm.runtime.replies import ReplyContext

WORDS = (
    "the", " a", "null", "true", "12", "1.5", "None", '{"a": 1}', "[1]", "é", "中", "🙂", "\n", " ", "</", "<", ">",
    "}", "]", '"', '", "', '": ', "\\n", '\\"', ", ", "a", "b", "x", "k", "<tool_call>x", "</parameter", "/arg_value>",
    "{", "[", ")", "name", '{"name": "f"', "```", "`", "=",
)  # fmt: skip
ENDS = ('"', "}", "]", ")", ", ", "\n", "</")
HOSTILE = (
    'a"b', "a\\", "<tool_call>", "</parameter>", "a\nb", "}", "[TOOL_CALLS]", "日本", "a b", "<[5]>", '"', "%json",
    "</arg_value>", '<|"|>', "null", "12", "true", "{", "a'", "start: x", "/x/", "~", "\u2028", "é",
)  # fmt: skip


class Walker:
    """A vocabulary of bytes, words and tags, with the grammar plug-in, and random answers of grammars.

    ``marked`` are the tags that are tokens; those of ``special`` have no bytes."""

    def __init__(self, form, marked=(), special=False):
        texts = [*WORDS, *(tag for tag in form.tags if tag not in marked)]
        if form.calls and form.calls[0].pairs:
            texts.append(form.calls[0].pairs.after)
        self.tokens = [bytes([b]) for b in range(256)] + [text.encode() for text in texts]
        self.ids = {}
        for tag in marked:
            self.ids[tag] = len(self.tokens)
            self.tokens.append(b"" if special else tag.encode())
        self.eos = len(self.tokens)
        self.tokens += [b"", b""]  # the second one is another special token
        self.marks = {tag: chr(0xDC80 + k) for k, tag in enumerate(marked)}
        self.hidden = frozenset(marked) if special else frozenset()
        self.plugin = LLGuidance(None, GrammarContext(self.tokens, len(self.tokens), (self.eos,)))
        self._ends = [self.tokens.index(text.encode()) for text in (*ENDS, *texts[len(WORDS) :])]
        self._ends += [*self.ids.values()]
        self._by_id = {token: self.marks[tag] for tag, token in self.ids.items()}

    def context(self, functions, **more):
        """Return the request of a constrained answer."""
        return ReplyContext(functions, marks=self.marks, hidden=self.hidden, strict=True, **more)

    def compiled(self, source):
        """Return the compiled grammar."""
        return self.plugin.compile(GrammarSource("reply", source))

    def walk(self, compiled, rng, most=300, end=0.3):
        """Return the marked text of a random answer, or None if it is longer than ``most`` tokens.

        ``end`` is the chance to end where the answer may end."""
        matcher = self.plugin.start(compiled)
        mask = np.empty((1, -(-len(self.tokens) // 32)), np.int32)
        ids = []
        for number in range(most):
            failed = self.plugin.fill([matcher], mask, [0])
            assert not failed, (failed, self.text(ids))
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(self.tokens)]
            token = self._choose(bits, rng, number, end + number / most)
            assert self.plugin.accept([matcher], [[token]]) == [1], (self.text(ids), self.tokens[token])
            if token == self.eos:
                return self.text(ids)
            ids.append(token)
        return None

    def _choose(self, bits, rng, number, end):
        """Return an allowed token: often one that ends something, and the more often the longer the answer is."""
        if bits[self.eos] and rng.random() < end:
            return self.eos
        ends = [token for token in self._ends if bits[token]]
        if ends and rng.random() < 0.3 + number / 100:
            return rng.choice(ends)
        words = [token for token in range(256, self.eos) if bits[token]]
        if words and rng.random() < 0.5:
            return rng.choice(words)
        allowed = np.flatnonzero(bits)
        assert len(allowed)
        return int(rng.choice(allowed))

    def text(self, ids):
        """Return the text of tokens with marks."""
        parts, run = [], b""
        for token in ids:
            mark = self._by_id.get(token)
            if mark is None:
                run += self.tokens[token]
                continue
            parts += [run.decode(errors="replace"), mark]
            run = b""
        return "".join([*parts, run.decode(errors="replace")])


def schema(rng, depth=2, names=("a", "b", "key_2", "z")):
    """Return a random schema of a value."""
    kind = rng.randrange(13 if depth else 9)
    if kind == 0:
        return {"type": "string"}
    if kind == 1:
        return {
            "type": "string",
            **rng.choice(
                [
                    {"minLength": 2, "maxLength": 5},
                    {"pattern": "^[a-c]+$"},
                    {"format": "date"},
                    {"maxLength": 3},
                    {"format": "uuid"},
                ]
            ),
        }
    if kind == 2:
        return {"type": "integer", **rng.choice([{}, {"minimum": 3, "maximum": 120}])}
    if kind == 3:
        return rng.choice([{"type": "number"}, {"type": "number", "minimum": 0, "maximum": 1}, {"type": "boolean"}])
    if kind == 4:
        return {"enum": rng.sample([*HOSTILE, "red", "blue", 1, 2.5, None, True], 4)}
    if kind == 5:
        return {"type": "string", "enum": rng.sample([*HOSTILE, "red", "blue"], 3)}
    if kind == 6:
        return {
            "type": rng.choice(
                [
                    ["string", "null"],
                    ["integer", "null"],
                    ["string", "integer"],
                    "null",
                    ["string", "object"],
                    ["boolean", "string", "null"],
                ]
            )
        }
    if kind == 7:
        return rng.choice(
            [
                {},
                {"$ref": "#/$defs/D"},
                {"allOf": [{"$ref": "#/$defs/D"}], "description": "x"},
                {"const": rng.choice([*HOSTILE, 7])},
            ]
        )
    if kind == 8:
        return {
            "anyOf": [
                rng.choice(
                    [
                        {"type": "string"},
                        {"$ref": "#/$defs/D"},
                        {"type": "array"},
                        {"type": "string", "enum": ["on", "off"]},
                    ]
                ),
                {"type": "null"},
            ],
            "default": None,
        }
    if kind == 9:
        return {
            "type": "array",
            "items": schema(rng, depth - 1, names),
            **rng.choice([{}, {"minItems": 1, "maxItems": 3}]),
        }
    if kind == 10:
        return {"anyOf": [schema(rng, depth - 1, names), schema(rng, depth - 1, names)]}
    return parameters(rng, depth - 1, names)


def parameters(rng, depth=2, names=("a", "b", "key_2", "z")):
    """Return a random schema of an object that is closed."""
    properties = {name: schema(rng, depth, names) for name in rng.sample(names, rng.randrange(min(len(names), 3) + 1))}
    required = [name for name in properties if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def functions(rng, names=("a", "b", "key_2", "z")):
    """Return one to three functions with random schemas."""
    definitions = {
        "D": rng.choice(
            [
                {"type": "string", "enum": ["x", "y"]},
                {"type": "integer"},
                {
                    "type": "object",
                    "properties": {"t": {"type": "string"}},
                    "required": ["t"],
                    "additionalProperties": False,
                },
            ]
        )
    }
    chosen = rng.sample(("f", "get_weather", "write-file.v2"), rng.randrange(1, 4))
    return {name: {**parameters(rng, 2, names), "$defs": definitions} for name in chosen}
