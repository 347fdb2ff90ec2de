"""The conformance suite of parsers, which find reasoning and function calls in the text of a model's reply.

The texts are replies that the suite writes in the format of a description, damaged replies, and prose with tags.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from minivllm.runtime.replies import (
    FIRST_MARK,
    MOST_TAGS,
    Begun,
    DescribedParser,
    Ended,
    Part,
    ReplyContext,
    ReplyParser,
    Said,
    Written,
)
from minivllm.runtime.replies.grammar import FORCED, Function, Spelling, reply_grammar, writes
from minivllm.runtime.replies.write import write_reply

from .base import since
from .kept import Lasting
from .reply_walks import Walker
from .spec import SpecConformance

TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
FIND = {"type": "object", "properties": {"text": TEXT, "most": NUMBER}}
STOP: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTIONS: Mapping[str, Mapping[str, Any]] = {"find": FIND, "stop": STOP}
CLOSED = {name: {**schema, "additionalProperties": False} for name, schema in FUNCTIONS.items()}
WORDS = ("naïve 🙂", "x < y", '[1] "', "{", "\n", "`b`", "<t")
STRINGS = ("", 'a "b" \\ c', "é 中 🙂", "two\nlines <b>", "}{][")
CALLS = [("find", {"text": 'a"}</', "most": 3}), ("stop", {})]
PROSE = "It is so. Two and three are five, as 2 < 3 shows. "
Call = tuple[str, dict[str, Any]]  # name and arguments


def fits(name: str, arguments: Any) -> bool:
    """Return whether the arguments of a call fit the schema of a test function."""
    types = {"string": str, "integer": int}
    declared = FUNCTIONS[name]["properties"]
    if not isinstance(arguments, dict) or not arguments.keys() <= declared.keys():
        return False
    for key, value in arguments.items():
        expected = types[declared[key]["type"]]
        if type(value) is not expected:
            return False
    return True


class ParserConformance(Lasting, SpecConformance):
    """The conformance suite of parsers.

    A parser that is made from a description of a format needs nothing else.  Any other parser overrides ``written``,
    so that the suite can write replies in its format.
    """

    kind = "parser"

    def context(self) -> tuple[Any, ...]:
        """Return the arguments of the plug-in's constructor after its options: none."""
        return ()

    def exercise(self, instance: ReplyParser) -> Any:
        """Return the reasoning, content and calls that the parser finds in a few texts."""
        request = ReplyContext(FUNCTIONS)
        texts = self.texts(instance, 5, 0)
        return [self.read(instance, text, request) for text in texts]

    def once_more(self, instance: ReplyParser, number: int) -> None:
        """Parse a new text."""
        request = ReplyContext(FUNCTIONS)
        for text in self.texts(instance, 3, number):
            self.read(instance, f"{number} {text}", request)

    def written(self, parser: ReplyParser, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Return a reply with reasoning, content and calls; None if the suite cannot write the parser's format."""
        if not isinstance(parser, DescribedParser):
            return None
        thought = "I think" if parser.thinks() else ""
        return write_reply(parser.format, thought, content, calls)

    def texts(self, parser: ReplyParser, count: int, seed: int) -> list[str]:
        """Return replies in the format of the parser, damaged replies, and prose with tags."""
        rng = random.Random(seed)
        found = []
        for number in range(count):
            parts = rng.choices((*WORDS, *parser.tags()), k=8)
            prose = " ".join(parts)
            if number % 4 == 3:
                text = None
            else:
                text = self.written(parser, rng.choice(WORDS), self.calls(rng))
            text = text or prose
            if number % 4 == 1:
                at = rng.randrange(len(text))
                damage = rng.choice("}<x")
                rest = text[at + rng.randrange(3) :]
                text = text[:at] + damage + rest
            found.append(text)
        return found

    def calls(self, rng: random.Random) -> list[Call]:
        """Return one to three random function calls with arguments that fit their schemas."""
        find = {"text": rng.choice(STRINGS), "most": 3}
        made: list[Call] = [("find", find), ("stop", {})]
        number = rng.randrange(1, 4)
        return rng.choices(made, k=number)

    def read(self, parser: ReplyParser, text: str, request: ReplyContext, size: int = 0, cut: bool = False) -> Any:
        """Parse a text in pieces of ``size`` characters, and return its reasoning, its content and its calls.

        Size 0 means one piece.  ``cut`` means that the reply was cut off.  A call is [name, arguments, whether it is
        complete].
        """
        for tag, mark in request.marks.items():
            text = text.replace(tag, mark)
        reply = parser.start(request)
        size = size or max(len(text), 1)
        parts: list[Part] = []
        for at in range(0, len(text), size):
            parts += reply.feed(text[at : at + size])
        if cut:
            parts += reply.cut()
        else:
            parts += reply.feed("", True)
        joined = {"thought": "", "said": ""}
        calls: list[list[Any]] = []
        for part in parts:
            if isinstance(part, Begun):
                calls.append([part.name, "", False])
            elif isinstance(part, Written):
                calls[-1][1] += part.text
            elif isinstance(part, Ended):
                calls[-1][2] = True
            elif isinstance(part, Said):
                joined["said"] += part.text
            else:
                joined["thought"] += part.text
        return joined["thought"], joined["said"], calls

    @since(1, 0)
    def test_every_division_of_a_text_gives_the_same_parts(self) -> None:
        """Check that the parsed reply does not depend on the sizes of the pieces in which the text comes.

        This holds for complete replies and for replies that are cut off.  Tags are tokens, special tokens or text.  No
        mark of a special token stays in the result, and only functions that the request allows are called.
        """
        parser = self.build()
        tags = parser.tags()
        distinct = len(set(tags)) == len(tags)
        assert distinct and len(tags) <= MOST_TAGS, f"{tags}: expected at most {MOST_TAGS} texts"
        marks = {tag: chr(FIRST_MARK + k) for k, tag in enumerate(tags)}
        only = frozenset({"stop"})
        requests = [ReplyContext(FUNCTIONS), ReplyContext(FUNCTIONS, marks=marks)]
        requests.append(ReplyContext(FUNCTIONS, only, marks, frozenset(marks), opened=parser.thinks()))
        number = 400 if self.long else 40
        for text in self.texts(parser, number, 1):
            for request in requests:
                for cut in (False, True):
                    whole = self.read(parser, text, request, cut=cut)
                    left = [char for char in str(whole) if "\ud800" <= char <= "\udfff"]
                    assert not left, f"{text!r}: a mark is left"
                    names = {name for name, _, _ in whole[2]}
                    assert request.only is None or names <= request.only, f"{text!r}: {names} may not be called"
                    for size in (1, 2, 3, 7):
                        found = self.read(parser, text, request, size, cut)
                        assert found == whole, f"{text!r} in pieces of {size}: expected {whole}, found {found}"

    @since(1, 0)
    def test_calls_that_are_written_are_found(self) -> None:
        """Check that the reasoning and the calls of a reply in the parser's format are found."""
        parser = self.build()
        rng = random.Random(2)
        for _ in range(40):
            calls = self.calls(rng)
            text = self.written(parser, "", calls)
            if text is None:
                pytest.skip("the suite cannot write the format: override written")
            thought, reported, found = self.read(parser, text, ReplyContext(FUNCTIONS), 1)
            parsed = [(name, json.loads(arguments)) for name, arguments, ended in found if ended]
            assert parsed == calls, f"{text!r}: found {parsed}"
            assert not reported.strip() and bool(thought) == parser.thinks(), f"{text!r}: {thought!r}, {reported!r}"

    @since(1, 0)
    def test_texts_of_the_grammar_are_calls(self) -> None:
        """Check random texts that the grammar of the description allows: each contains calls with valid arguments.

        Tags are tokens, special tokens or text.
        """
        parser = self.build()
        if not isinstance(parser, DescribedParser):
            pytest.skip("the parser has no description, so calls are forced as a list in JSON")
        pytest.importorskip("llguidance")
        rng = random.Random(3)
        tags = parser.tags()
        number = 100 if self.long else 10
        functions = [Function(name, schema) for name, schema in CLOSED.items()]
        for marked, special in (((), False), (tags, False), (tags, True)):
            walker = Walker(parser.format, marked, special)
            spelling = Spelling(parser.format, walker.ids)
            if not writes(spelling):
                continue
            source = reply_grammar(spelling, functions, FORCED)
            compiled = walker.compiled(source)
            texts = [walker.walk(compiled, rng) for _ in range(number)]
            request = walker.context(CLOSED)
            for text in filter(None, texts):
                _, reported, calls = self.read(parser, text, request, 1)
                assert calls and not reported.strip(), f"{text!r}: found {calls} and the content {reported!r}"
                for name, arguments, ended in calls:
                    assert ended and fits(name, json.loads(arguments)), f"{text!r}: {name}({arguments})"

    @since(1, 0)
    def test_a_cut_answer_has_complete_calls_only(self) -> None:
        """Check replies that are cut off anywhere: complete calls are those of the whole reply, with valid JSON."""
        parser = self.build()
        text = self.written(parser, "", CALLS)
        if text is None:
            pytest.skip("the suite cannot write the format: override written")
        request = ReplyContext(FUNCTIONS)
        for end in range(len(text) + 1):
            _, _, calls = self.read(parser, text[:end], request, cut=True)
            whole = [(name, json.loads(arguments)) for name, arguments, ended in calls if ended]
            assert whole == CALLS[: len(whole)], f"{text[:end]!r}: found {whole}"

    @since(1, 0)
    def test_text_without_tags_is_content(self) -> None:
        """Check that prose without tags is returned unchanged as content, and at once."""
        parser = self.build()
        reply = parser.start(ReplyContext(FUNCTIONS))
        reported = ""
        for piece in PROSE:
            for part in reply.feed(piece):
                if isinstance(part, Said):
                    reported += part.text
        assert reported.strip() == PROSE.strip(), f"found the content {reported!r}"
