"""The conformance suite of parsers, which find reasoning and calls in the text of a model.

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
    NAME,
    Begun,
    DescribedParser,
    Ended,
    Part,
    ReplyContext,
    ReplyParser,
    Said,
    Thought,
    Written,
)
from minivllm.runtime.replies.write import write_reply

from .base import since
from .kept import Lasting
from .spec import SpecConformance

FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    "find": {"type": "object", "properties": {"text": {"type": "string"}, "most": {"type": "integer"}}},
    "stop": {"type": "object", "properties": {}},
}
WORDS = ("a", "word", "naïve", "中", "🙂", "x < y", "[1]", "{", "}", '"', "\n", "`b`", "</", "<t")
STRINGS = ("", "Paris", 'a "b" \\ c', "é 中 🙂", "two\nlines", "}{][", "<b>")
Summed = tuple[str, str, list[tuple[str, str, bool]]]  # reasoning, content, and (name, arguments, complete) of calls


def summed(parts: Sequence[Part]) -> Summed:
    """Return the joined reasoning, content and calls of parts."""
    thought = said = ""
    calls: list[tuple[str, str, bool]] = []
    for part in parts:
        if isinstance(part, Thought):
            thought += part.text
        elif isinstance(part, Said):
            said += part.text
        elif isinstance(part, Begun):
            calls.append((part.name, "", False))
        else:
            assert calls, f"{part} comes before the first Begun"
            name, arguments, ended = calls[-1]
            assert not ended, f"{part} follows the Ended of its call"
            more = part.text if isinstance(part, Written) else ""
            calls[-1] = (name, arguments + more, isinstance(part, Ended))
    return thought, said, calls


class ParserConformance(Lasting, SpecConformance):
    """The suite of parsers.

    A parser of a description needs nothing else.  Another parser overrides ``written``, so that its calls are tested.
    """

    kind = "parser"
    texts = 40  # number of texts of a test, in the fast profile

    def context(self) -> tuple[Any, ...]:
        """Return the arguments to build the plug-in, which has none besides its options."""
        return ()

    def exercise(self, instance: ReplyParser) -> Any:
        """Return the parts of a few texts."""
        request = ReplyContext(FUNCTIONS)
        return [self.read(instance, text, request) for text in self.some_texts(instance, 5)]

    def once_more(self, instance: ReplyParser, number: int) -> None:
        """Parse a new text."""
        texts = self.some_texts(instance, 3, seed=number)
        for text in texts:
            self.read(instance, f"{number} {text}", ReplyContext(FUNCTIONS))

    def written(
        self, parser: ReplyParser, thought: str, content: str, calls: Sequence[tuple[str, Mapping[str, Any]]]
    ) -> str | None:
        """Return a reply in the format of the parser, or None if the suite cannot write it."""
        if isinstance(parser, DescribedParser):
            return write_reply(parser.format, thought if parser.thinks() else "", content, calls)
        return None

    def some_texts(self, parser: ReplyParser, count: int, seed: int = 0) -> list[str]:
        """Return replies in the format of the parser, damaged replies, and prose with tags."""
        rng = random.Random(seed)
        tags = parser.tags() or ("<tag>",)
        found = []
        for number in range(count):
            prose = " ".join(rng.choice((*WORDS, *tags)) for _ in range(rng.randrange(1, 12)))
            plain = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 6)))
            text = self.written(parser, plain, plain if number % 3 else "", self.some_calls(rng)) or prose
            if number % 4 == 1:
                at = rng.randrange(len(text))
                text = text[:at] + rng.choice(("", "}", "<", '"', "x")) + text[at + rng.randrange(3) :]
            found.append(prose if number % 4 == 3 else text)
        return found

    def some_calls(self, rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
        """Return one to three calls with arguments that fit their schemas."""
        made: list[tuple[str, dict[str, Any]]] = []
        for _ in range(rng.randrange(1, 4)):
            arguments = {"text": rng.choice(STRINGS), "most": rng.randrange(-3, 100)}
            made.append(("find", arguments) if rng.random() < 0.7 else ("stop", {}))
        return made

    def requests(self, parser: ReplyParser) -> list[ReplyContext]:
        """Return requests whose tags are tokens, are special tokens, and are text."""
        marks = {tag: chr(FIRST_MARK + k) for k, tag in enumerate(parser.tags())}
        return [
            ReplyContext(FUNCTIONS),
            ReplyContext(FUNCTIONS, marks=marks),
            ReplyContext(FUNCTIONS, frozenset(FUNCTIONS), marks, frozenset(marks), opened=parser.thinks()),
        ]

    def read(self, parser: ReplyParser, text: str, request: ReplyContext, size: int = 0, cut: bool = False) -> Summed:
        """Return what a parser finds in a text that comes in pieces of ``size`` characters, 0 for one piece."""
        for tag, mark in request.marks.items():
            text = text.replace(tag, mark)
        reply = parser.start(request)
        size = size or max(len(text), 1)
        parts: list[Part] = []
        for at in range(0, len(text), size):
            parts += reply.feed(text[at : at + size])
        parts += reply.cut() if cut else reply.feed("", True)
        return summed(parts)

    @since(1, 0)
    def test_tags_are_texts_that_can_be_marked(self) -> None:
        """Check that ``tags`` returns at most 128 different texts, the same ones in each call."""
        parser = self.build()
        tags = parser.tags()
        assert isinstance(tags, tuple) and len(tags) <= MOST_TAGS and len(set(tags)) == len(tags)
        assert all(isinstance(tag, str) and tag for tag in tags), f"{tags}: expected texts that are not empty"
        assert parser.tags() == tags

    @since(1, 0)
    def test_every_division_of_a_text_gives_the_same_parts(self) -> None:
        """Check that the joined parts do not depend on the pieces of the text, at its end and where it is cut."""
        parser = self.build()
        for text in self.some_texts(parser, self.texts * (10 if self.long else 1)):
            for request in self.requests(parser):
                for cut in (False, True):
                    whole = self.read(parser, text, request, cut=cut)
                    for size in (1, 2, 3, 7):
                        found = self.read(parser, text, request, size, cut)
                        assert found == whole, f"{text!r} in pieces of {size}: expected {whole}, found {found}"

    @since(1, 0)
    def test_no_mark_is_in_a_part(self) -> None:
        """Check that no part has a surrogate, wherever the tokens of tags are in a text."""
        parser = self.build()
        for text in self.some_texts(parser, self.texts, seed=1):
            for request in self.requests(parser)[1:]:
                thought, said, calls = self.read(parser, text, request, 1)
                joined = thought + said + "".join(name + arguments for name, arguments, _ in calls)
                joined.encode()  # UnicodeEncodeError for a surrogate

    @since(1, 0)
    def test_calls_that_are_written_are_found(self) -> None:
        """Check that the calls, reasoning and content of a reply in the parser's format are found."""
        parser = self.build()
        rng = random.Random(2)
        for _ in range(self.texts):
            calls = self.some_calls(rng)
            text = self.written(parser, "I think", "", calls)
            if text is None:
                pytest.skip("the suite cannot write the format: override written")
            for request in self.requests(parser)[:2]:
                thought, said, found = self.read(parser, text, request, 1)
                told = [(name, json.loads(arguments), ended) for name, arguments, ended in found]
                assert told == [(name, arguments, True) for name, arguments in calls], f"{text!r}: found {told}"
                assert not said.strip() and thought == ("I think" if parser.thinks() else ""), f"{text!r}: {said!r}"

    @since(1, 0)
    def test_a_cut_answer_has_complete_calls_only(self) -> None:
        """Check every beginning of a reply: complete calls are the first ones of it, and their arguments are JSON."""
        parser = self.build()
        calls = [("find", {"text": 'a"}</', "most": 3}), ("stop", {})]
        text = self.written(parser, "", "", calls)
        if text is None:
            pytest.skip("the suite cannot write the format: override written")
        for end in range(len(text) + 1):
            _, _, found = self.read(parser, text[:end], ReplyContext(FUNCTIONS), cut=True)
            whole = [(name, json.loads(arguments)) for name, arguments, ended in found if ended]
            assert whole == calls[: len(whole)], f"{text[:end]!r}: found {whole}"

    @since(1, 0)
    def test_names_of_functions_are_those_that_the_request_allows(self) -> None:
        """Check that each call has a valid name that the request allows.  Text of another call is content."""
        parser = self.build()
        request = ReplyContext(FUNCTIONS, only=frozenset({"stop"}))
        for text in self.some_texts(parser, self.texts, seed=3):
            _, _, calls = self.read(parser, text, request, 1)
            for name, _, _ in calls:
                assert NAME.fullmatch(name) and name == "stop", f"{text!r}: a call of {name!r}, which is not allowed"

    @since(1, 0)
    def test_text_without_tags_is_content(self) -> None:
        """Check that prose is content without a change, and that it is not held back."""
        parser = self.build()
        text = "Two and three are five, as 2 < 3 shows. "
        reply = parser.start(ReplyContext(FUNCTIONS))
        parts = [*reply.feed("It is so. "), *reply.feed(text)]
        assert summed(parts)[1].startswith("It is so. Two"), f"text is held back: found {parts}"
        for size in (0, 1):
            _, said, calls = self.read(parser, f"It is so. {text}", ReplyContext(FUNCTIONS), size)
            assert said == f"It is so. {text}" and not calls, f"found the content {said!r} and {calls}"

    @since(1, 0)
    def test_the_replies_of_one_parser_share_no_state(self) -> None:
        """Check that two answers that are parsed in turns give the parts that each gives alone."""
        parser = self.build()
        request = ReplyContext(FUNCTIONS)
        texts = self.some_texts(parser, 12, seed=4)
        alone = [self.read(parser, text, request, 1) for text in texts]
        replies = [parser.start(request) for _ in texts]
        parts: list[list[Part]] = [[] for _ in texts]
        for at in range(max(map(len, texts))):
            for number, text in enumerate(texts):
                parts[number] += replies[number].feed(text[at : at + 1])
        for number, reply in enumerate(replies):
            parts[number] += reply.feed("", True)
            found = summed(parts[number])
            assert found == alone[number], f"{texts[number]!r}: expected {alone[number]}, found {found}"
