"""``text_offset`` of completions: where in the text of a choice each of its tokens begins.

A token is no text of its own: it may be a part of a character, a special token that the text leaves out, or behind the
stop string that ended the text.  So places are counted on the text as it is made of the tokens, one after another, and
none is beyond its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from minivllm.runtime.text.detokenize import IncrementalDetokenizer

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer
    from minivllm.server.link.scored import ScoredToken

PART = "\ufffd"  # what a part of a character is decoded to


class Places:
    """Places of tokens one after another, in characters from ``at`` on.

    ``prompt``: the text that the tokens were made of, where it was text.  It may lack special tokens that the tokenizer
    put round it, and have spaces or letters in another form than its tokens."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special: bool, at: int = 0, prompt: str | None = None) -> None:
        self._tokenizer, self._at, self._prompt = tokenizer, at, prompt
        self._text = None if tokenizer is None else IncrementalDetokenizer(tokenizer, skip_special)
        self._held = False  # a token before has no text yet

    def next(self, token: int) -> int:
        """The place of the next token; of a part of a character that of the character."""
        if self._text is None or self._tokenizer is None:
            return self._at
        new, before = self._text.add((token,)), self._at
        if self._prompt is not None:
            new = self._shown(new, token, self._prompt)
        self._at += len(new)
        own = len(new) if not self._held else self._length(token)
        self._held = not new and (self._held or token not in self._tokenizer.special_ids)
        return before if own is None else self._at - min(own, len(new))

    def _shown(self, new: str, token: int, prompt: str) -> str:
        """What of a token's text is in the prompt."""
        assert self._tokenizer is not None
        if prompt.startswith(new, self._at):
            return new
        if new[:1] == " " and prompt.startswith(new[1:], self._at):
            return new[1:]
        return "" if token in self._tokenizer.special_ids else prompt[self._at : self._at + len(new)]

    def _length(self, token: int) -> int | None:
        """Characters of a token behind others that had no text until it came; None if it ends the character that they
        began."""
        assert self._tokenizer is not None
        own = self._tokenizer.decode((token,), skip_special_tokens=False)
        if own.startswith(PART):
            return None
        # a decoder that leaves out the space at the beginning of a text
        spaced = (self._tokenizer.token(token) or "").startswith("\u2581") and not own.startswith(" ")
        return len(own) + spaced


class Placed:
    """The rows of a choice with their places, as far as its text has come: a token whose text may yet be the beginning
    of a stop string waits until that is known."""

    def __init__(self, places: Places, shown: int = 0) -> None:
        self._places, self._shown = places, shown
        self._waiting: list[tuple[ScoredToken, int]] = []

    def take(self, rows: Iterable[ScoredToken], text: str, final: bool) -> list[tuple[ScoredToken, int]]:
        """(row, place) of those that are settled by new ``text``; with ``final``, of all."""
        self._shown += len(text)
        found = self._waiting + [(row, self._places.next(row.token)) for row in rows]
        count = next((n for n, (_, at) in enumerate(found) if at > self._shown and not final), len(found))
        self._waiting = found[count:]
        return [(row, min(at, self._shown)) for row, at in found[:count]]
