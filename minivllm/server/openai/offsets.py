"""The ``text_offset`` of completions: the position in the text of a choice at which each of its tokens begins.

A token may have no text of its own: it may be a part of a character, a special token that the text omits, or follow the
stop string that ended the text.  Positions are therefore counted while the text is made from the tokens one by one, and
no position is beyond the end of the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from minivllm.runtime.text.detokenize import IncrementalDetokenizer

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer
    from minivllm.server.link.scored import ScoredToken

PART = "\ufffd"  # the replacement character, which is the text of an incomplete character


class Places:
    """Positions of successive tokens in a text, in characters, counted from ``at``.

    ``prompt`` is the text that the tokens were encoded from, if the client sent text.  It may lack special tokens that
    the tokenizer added, and its spaces and letters may differ from the text of the tokens."""

    def __init__(self, tokenizer: Tokenizer | None, skip_special: bool, at: int = 0, prompt: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._at = at
        self._prompt = prompt
        self._text = None if tokenizer is None else IncrementalDetokenizer(tokenizer, skip_special)
        self._held = False  # whether an earlier token has no text yet

    def next(self, token: int) -> int:
        """Return the position of the next token.  A part of a character has the position of the character."""
        if self._text is None or self._tokenizer is None:
            return self._at
        start = self._at
        new = self._text.add((token,))
        if self._prompt is not None:
            new = self._shown(new, token, self._prompt)
        self._at += len(new)
        length = self._length(token) if self._held else len(new)
        self._held = not new and (self._held or token not in self._tokenizer.special_ids)
        return start if length is None else self._at - min(length, len(new))

    def _shown(self, new: str, token: int, prompt: str) -> str:
        """Return the part of a token's text that the prompt contains at the current position."""
        assert self._tokenizer is not None
        if prompt.startswith(new, self._at):
            return new
        if new[:1] == " " and prompt.startswith(new[1:], self._at):
            return new[1:]
        if token in self._tokenizer.special_ids:
            return ""
        return prompt[self._at : self._at + len(new)]

    def _length(self, token: int) -> int | None:
        """Return the characters of a token that follows tokens without text.

        None means that the token ends the character that they began."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode((token,), skip_special_tokens=False)
        if text.startswith(PART):
            return None
        # some decoders omit the space at the beginning of a text
        spelled = self._tokenizer.token(token) or ""
        omitted = spelled.startswith("\u2581") and not text.startswith(" ")
        return len(text) + omitted


class Placed:
    """The scored tokens of a choice, with their positions in the known text of the choice.

    A token waits while its text may still be the beginning of a stop string.
    """

    def __init__(self, places: Places, shown: int = 0) -> None:
        self._places = places
        self._shown = shown
        self._waiting: list[tuple[ScoredToken, int]] = []

    def take(self, rows: Iterable[ScoredToken], text: str, final: bool) -> list[tuple[ScoredToken, int]]:
        """Add rows and new text, and return each row whose position is certain, with the position.

        ``final`` returns all rows."""
        self._shown += len(text)
        found = self._waiting + [(row, self._places.next(row.token)) for row in rows]
        count = len(found)
        if not final:
            later = (number for number, (_, at) in enumerate(found) if at > self._shown)
            count = next(later, count)
        self._waiting = found[count:]
        return [(row, min(at, self._shown)) for row, at in found[:count]]
