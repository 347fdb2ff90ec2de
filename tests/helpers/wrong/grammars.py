"""Wrong grammars, and right ones that are not like the libraries': over lists of texts, so that they need none."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import minivllm.testing.scaffold
from minivllm.core.interfaces.grammar import Compiled, Grammar
from minivllm.registration.spec import Spec

SEAM = "grammar"
MASK = "test_a_mask_allows_exactly_what_can_go_on"
END = "test_the_end_is_allowed_exactly_where_the_text_fits"
REFUSES = "test_what_a_mask_forbids_is_refused"
ROWS = "test_only_the_rows_that_are_named_are_written_and_those_wholly"
BATCH = "test_a_batch_gives_what_each_matcher_gives_alone"
APART = "test_matchers_of_one_grammar_share_no_state"
FAULTS = {
    "BytesOnly": (MASK, BATCH),
    "OneEnd": (END, MASK),
    "EndsAnywhere": (MASK, END),
    "TakesAnything": (REFUSES,),
    "OrsItsBits": (ROWS,),
    "FirstRows": (ROWS,),
    "InOrder": (BATCH,),
    "OneMatcher": (APART,),
    "NeverEnds": (MASK, END),
    "AllOrNothing": (REFUSES,),
    "SpecialToo": (MASK,),
    "LastCompiled": (BATCH, "test_several_threads_may_compile_at_once"),
    "AcceptsTheMalformed": ("test_what_is_malformed_is_refused_with_a_message",),
    "AlwaysTight": ("test_whitespace_in_json_is_as_asked",),
}
RIGHT = ("Trie",)


def spec(name: str, *more: str) -> Spec:
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", features=frozenset({"choice", *more}))


@cache
def template() -> type[Grammar]:
    """The plug-in that ``minivllm plugins new`` writes."""
    path = Path(minivllm.testing.scaffold.__file__).parent / "templates/grammar/src/my_plugin/plugin.py"
    names = {"__name__": "template"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    return names["MyPlugin"]


Base = template()


class Texts(tuple):
    """The texts of a grammar.  ``tree`` maps each beginning of a text to the tokens that may follow it."""


class Trie(Base):
    """Right.  The allowed tokens are found by a walk over a tree of all texts, which is freed with its grammar."""

    spec = spec("Trie")

    def compile(self, source):
        made = super().compile(source)
        texts = Texts(made.handle)
        texts.tree = {}
        for text in texts:
            for n in range(len(text) + 1):
                texts.tree.setdefault(text[:n], super().next(texts, text[:n]))
        return Compiled(texts, made.nbytes)

    def next(self, texts, text):
        return texts.tree[text]


class BytesOnly(Base):
    """Each token that is allowed is a single byte."""

    spec = spec("BytesOnly")

    def next(self, texts, text):
        return [i for i in super().next(texts, text) if len(self.ctx.tokens[i]) < 2]


class OneEnd(Base):
    """Uses only the first of several end-of-sequence ids."""

    spec = spec("OneEnd")

    def next(self, texts, text):
        return [i for i in super().next(texts, text) if i not in self.ctx.eos_ids[1:]]


class EndsAnywhere(Base):
    spec = spec("EndsAnywhere")

    def next(self, texts, text):
        return sorted({*super().next(texts, text), *self.ctx.eos_ids})


class NeverEnds(Base):
    spec = spec("NeverEnds")

    def next(self, texts, text):
        return [i for i in super().next(texts, text) if i not in self.ctx.eos_ids]


class SpecialToo(Base):
    """An id that is no token is allowed."""

    spec = spec("SpecialToo")

    def next(self, texts, text):
        return [*super().next(texts, text), 299]


class TakesAnything(Base):
    """Accepts every token, in the belief that forbidden tokens are never drawn."""

    spec = spec("TakesAnything")

    def take(self, matcher, tokens):
        super().take(matcher, tokens)
        return len(tokens)


class AllOrNothing(Base):
    """Does not return how many tokens it accepted."""

    spec = spec("AllOrNothing")

    def take(self, matcher, tokens):
        return len(tokens) if super().take(matcher, tokens) == len(tokens) else 0


class OrsItsBits(Base):
    spec = spec("OrsItsBits")

    def fill(self, matchers, mask, rows):
        before = mask.copy()
        failed = super().fill(matchers, mask, rows)
        mask |= before
        return failed


class FirstRows(Base):
    """Rows are numbered by matcher."""

    spec = spec("FirstRows")

    def fill(self, matchers, mask, rows):
        return super().fill(matchers, mask, range(len(matchers)))


class InOrder(Base):
    """The masks of a batch come sorted by the texts so far."""

    spec = spec("InOrder")

    def fill(self, matchers, mask, rows):
        return super().fill(sorted(matchers, key=lambda m: m[-1] or b""), mask, rows)


class OneMatcher(Base):
    """The state is the grammar's."""

    spec = spec("OneMatcher")

    def __init__(self, options, ctx):
        super().__init__(options, ctx)
        self.kept = {}

    def start(self, compiled):
        return self.kept.setdefault(id(compiled), super().start(compiled))

    def compile(self, source):
        made = super().compile(source)
        self.kept[-len(self.kept) - 1] = made  # no other object gets its id
        return made


class LastCompiled(Base):
    """It serves the grammar that was compiled last."""

    spec = spec("LastCompiled")

    def compile(self, source):
        self.last = super().compile(source)
        return self.last

    def next(self, texts, text):
        return super().next(self.last.handle, text)


class AcceptsTheMalformed(Base):
    """Whatever it cannot read is a list of one text."""

    spec = spec("AcceptsTheMalformed", "regex")

    def compile(self, source):
        return super().compile(source) if source.kind == "choice" else Compiled((source.text.encode(),), 0)


class AlwaysTight(Base):
    """Allows only the two objects of a schema with one property of two values, without whitespace."""

    spec = spec("AlwaysTight", "json")

    def compile(self, source):
        if source.kind != "json":
            return super().compile(source)
        name = next(iter(json.loads(source.text)["properties"]))
        return Compiled(tuple(f'{{"{name}":{value}}}'.encode() for value in ("true", "false")), 0)
