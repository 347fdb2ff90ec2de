"""The grammar seam (plug-in interface): rules for the text of an answer, applied as token masks.

Rules are a JSON schema, a regular expression, a list of texts or a grammar.

A grammar is compiled once, on any thread.  A compiled grammar creates one matcher for each sequence.  Before a row
draws a token, the engine passes the tokens drawn since the last call to the row's matcher (``accept``), and then
requests the mask of allowed next tokens (``fill``).  Each call handles all such rows of a step, so that a library can
use several threads.  The calls run on the host while the device computes the layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

API = (1, 2)  # changes: 1.1: rollback and clone are no longer needed; 1.2: the kind reply


@dataclass(frozen=True)
class GrammarContext:
    """The vocabulary and the number of threads, with which the engine constructs a grammar plug-in."""

    # For each token id, the bytes that it adds to the text; b"" for special tokens and unused ids.
    tokens: Sequence[bytes]
    vocab_size: int  # width of the logits, >= len(tokens)
    eos_ids: tuple[int, ...]  # end-of-sequence ids, at least one; their entry in ``tokens`` is b""
    threads: int = 1  # largest number of threads that ``fill`` and ``accept`` may use


@dataclass(frozen=True)
class GrammarSource:
    """The grammar of a request, as text.

    The kind ``reply`` is an answer with calls, for plug-ins that list it among their features.  Its
    text is a JSON object.  ``behind`` is its first member and means that the text may begin behind
    reasoning.  ``lark`` is a grammar in the notation of llguidance, in which ``<[7]>`` is the token
    with the id 7.  The grammar uses names that the other members define: ``schemas`` has the JSON
    schema of each name, ``patterns`` a ["pattern" or "format", value] of JSON Schema for a text
    without quotes, and ``free`` the ids that a token must not have.  A free token does not end the
    answer either.
    """

    # Kind of the grammar: json (a JSON schema) | regex | choice (a JSON list of strings) | grammar
    # (Lark or GBNF) | reply.
    kind: str
    text: str
    # For the kind json: True allows any whitespace between JSON tokens, False allows none.
    any_whitespace: bool = True
    # For the kind json: a regular expression for the whitespace between JSON tokens.
    whitespace: str | None = None


@dataclass(frozen=True)
class Compiled:
    """A compiled grammar.  All sequences with the grammar use the same object, and nothing changes it."""

    handle: Any  # the grammar in the plug-in's own form
    nbytes: int = 0  # size in memory, or 0 if it is unknown


class Grammar(ABC):
    """Compiles grammars and computes token masks.

    The plug-in defines the type of its matchers.  The engine stores one matcher for each sequence and never looks
    inside.

    The text of a sequence is the concatenation of its tokens' bytes.  A text *fits* if the grammar derives it.  It is
    *viable* if some continuation of it fits.
    """

    def __init__(self, options: Any, ctx: GrammarContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def compile(self, source: GrammarSource) -> Compiled:
        """Return a compiled grammar.  Several threads may call this at once, also while other methods run.

        ValueError, with a message for the client, if the grammar is malformed, uses a construct that the library does
        not support, or derives no text at all.
        """

    @abstractmethod
    def start(self, compiled: Compiled) -> Any:
        """Return a new matcher, at the beginning of the text."""

    @abstractmethod
    def accept(self, matchers: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Sequence[int]:
        """Advance each matcher by its new tokens.  Return the number of accepted tokens for each matcher.

        A matcher accepts each token that the preceding mask allowed.  The engine stops using a matcher that accepted
        fewer tokens than it received.
        """

    @abstractmethod
    def fill(
        self, matchers: Sequence[Any], mask: np.ndarray, rows: Sequence[int]
    ) -> Mapping[int, str]:
        """Write the mask of allowed next tokens of each matcher to row ``rows[i]`` of ``mask``.

        ``mask`` is i32 [n, ceil(vocab_size / 32)].  Bit t % 32 of ``mask[rows[i], t // 32]`` must be 1 if the text
        followed by token t is viable.  The bits of the end-of-sequence ids must be 1 if the text fits as it is.  Do not
        change other rows.  Return a message for each matcher that cannot go on, by its index i.
        """
