"""Marks: characters that stand for tag tokens (``<think>``, ``<|channel|>``) in the text that a parser reads.

A model writes a tag as one token of its own.  Text that only spells the tag, such as a quoted example, has other
tokens.  In marked text each tag token is one lone surrogate (U+DC80 + k), which no text of a model contains.  So a
parser never takes spelled text for a tag, and it sees special tokens that ``skip_special_tokens`` omits from text.

    ids      <think> ▁Hi </think> ▁Hello        tags of the parser: <think>, </think>
    text     <think> Hi</think> Hello
    marked   U+DC80 Hi U+DC81 Hello             each run between marks is decoded as a text of its own

The rule of a run: its text equals ``tokenizer.decode`` of its ids alone.  A decoder that omits the space at the
beginning of a text (sentencepiece) therefore omits it at the beginning of each run.  A part of a UTF-8 character before
a mark becomes U+FFFD.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from minivllm.errors import ConfigError

from .detokenize import IncrementalDetokenizer, StopStrings
from .tokenizer import Tokenizer

FIRST, MOST = 0xDC80, 128  # the first lone surrogate that is a mark, and the number of marks: U+DC80 to U+DCFF
MARK = re.compile(f"[{chr(FIRST)}-{chr(FIRST + MOST - 1)}]")


@dataclass(frozen=True)
class Marks:
    """The marks of a parser's tags: ``by_token`` maps token ids to marks, ``by_tag`` the texts of tags to marks."""

    by_token: Mapping[int, str]
    by_tag: Mapping[str, str]

    @classmethod
    def of(cls, tags: Iterable[str], tokenizer: Tokenizer | None) -> Marks:
        """Return the marks of the tags that are added tokens of a tokenizer, special or not.

        Other tags have no mark: the model writes them as ordinary text.  ConfigError for more than 128 tags."""
        listed = list(dict.fromkeys(tags))
        if len(listed) > MOST:
            raise ConfigError(f"{len(listed)} tags of a parser: expected at most {MOST}")
        added = {} if tokenizer is None else tokenizer.added_tokens
        by_tag = {tag: chr(FIRST + k) for k, tag in enumerate(listed) if tag in added}
        return cls({added[tag]: mark for tag, mark in by_tag.items()}, by_tag)

    def spell(self, text: str) -> str:
        """Return a text with the tag in place of each mark."""
        if text.isascii() or not self.by_tag:
            return text
        return text.translate({ord(mark): tag for tag, mark in self.by_tag.items()})


NO_MARKS = Marks({}, {})


class MarkedDetokenizer:
    """An ``IncrementalDetokenizer`` that returns the mark of a token instead of the token's text.

    ``marks`` maps token ids to marks.  Each run of tokens between marks is decoded separately.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, marks: Mapping[int, str]) -> None:
        self._tokenizer, self._skip, self._marks = tokenizer, skip_special_tokens, marks
        self._run = IncrementalDetokenizer(tokenizer, skip_special_tokens)

    def add(self, ids: Sequence[int]) -> str:
        """Return the text and the marks that are certain after new ids."""
        marks = self._marks
        if marks.keys().isdisjoint(ids):
            return self._run.add(ids)
        pieces = []
        for token_id in ids:
            mark = marks.get(token_id)
            if mark is None:
                pieces.append(self._run.add((token_id,)))
                continue
            pieces += (self._run.finish(), mark)
            self._run = IncrementalDetokenizer(self._tokenizer, self._skip)
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text that was held back.  Call it once, at the end."""
        return self._run.finish()


class MarkedStops(StopStrings):
    """``StopStrings`` for marked text: a stop string is searched in the text in which each mark is spelled as its tag.

    ``tags`` maps marks to tags.  A stop string may spell a tag, or a part of a tag with the text around it.  Returned
    text has the mark of each whole tag.  A tag that a stop string cuts is returned as far as it is spelled.
    """

    def __init__(self, stops: Sequence[str], include: bool, tags: Mapping[str, str]) -> None:
        super().__init__(stops, include)
        self._tags = tags
        self._spans: list[tuple[int, str]] = []  # the marks in the held text, each with the position of its tag

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Return the marked text that is certain, and the stop string that was found or None."""
        pieces: list[str] = []
        end = len(self._held)
        last = 0
        for found in MARK.finditer(text):
            before, mark = text[last : found.start()], found[0]
            pieces += (before, self._tags[mark])
            self._spans.append((end + len(before), mark))
            end += len(before) + len(self._tags[mark])
            last = found.end()
        if last:
            text = "".join((*pieces, text[last:]))
        certain, stopped = super().push(text, armed)
        return self._marked(certain), stopped

    def finish(self) -> str:
        """Return the held text, which did not become a stop string."""
        return self._marked(super().finish())

    def _hold_from(self, text: str) -> int:
        """Return the start of the held text, which never begins inside a tag."""
        cut = super()._hold_from(text)
        for start, mark in self._spans:
            if start < cut < start + len(self._tags[mark]):
                return start
        return cut

    def _marked(self, spelled: str) -> str:
        """Return a spelled text in which whole tags are replaced by their marks.  The remaining marks belong to later
        text."""
        if not self._spans:
            return spelled
        pieces: list[str] = []
        later: list[tuple[int, str]] = []
        last = 0
        for start, mark in self._spans:
            end = start + len(self._tags[mark])
            if end <= len(spelled):
                pieces += (spelled[last:start], mark)
                last = end
            else:
                later.append((start - len(spelled), mark))
        self._spans = later
        return "".join((*pieces, spelled[last:]))
