"""The grammar seam: what an answer may look like (a JSON schema, a regular expression, a grammar), as masks of tokens.

A grammar is compiled once, by any thread, and gives one matcher for each sequence.  Before a row draws, the engine
tells its matcher the tokens that were drawn since, and asks for those that may come next; both for all such rows of a
step in one call, so that a library can spread them over its threads.  That happens on the host while the layers run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

API = (1, 1)  # 1.1: neither rollback nor clone


@dataclass(frozen=True)
class GrammarContext:
    """The vocabulary, and what may be spent."""

    # by id, what a token adds to the text; b"" for special tokens and ids that are none
    tokens: Sequence[bytes]
    vocab_size: int  # width of the logits, >= len(tokens)
    eos_ids: tuple[int, ...]  # at least one; their ``tokens`` are b""
    threads: int = 1  # that ``fill`` and ``accept`` may use


@dataclass(frozen=True)
class GrammarSource:
    """What a client asked for."""

    kind: str  # json: a JSON schema; regex; choice: a JSON list of strings; grammar: Lark or GBNF
    text: str
    # json: spaces and line ends are free between tokens of JSON; False: there are none
    any_whitespace: bool = True
    whitespace: str | None = None  # json: a regular expression for them instead


@dataclass(frozen=True)
class Compiled:
    """A grammar that is ready, shared by the sequences that use it; never changed."""

    handle: Any  # the plug-in's
    nbytes: int = 0  # memory that it takes, as far as that is known


class Grammar(ABC):
    """Matchers are the plug-in's own objects: the engine keeps one a sequence and looks at none.

    The text of a sequence is what its tokens add, one after another.  It *fits* if the grammar derives it, and is
    *viable* if it can be continued to a text that fits.
    """

    def __init__(self, options: Any, ctx: GrammarContext) -> None:
        self.options, self.ctx = options, ctx

    @abstractmethod
    def compile(self, source: GrammarSource) -> Compiled:
        """ValueError, whose message is for the client, if it is malformed, asks for what the library does not hold an
        answer to, or nothing can fit it.  Several threads may call it at once, also beside the other methods."""

    @abstractmethod
    def start(self, compiled: Compiled) -> Any:
        """A matcher at the beginning of the text."""

    @abstractmethod
    def accept(self, matchers: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Sequence[int]:
        """Each matcher moves on by its tokens; how many of them it took.  It takes what the mask before it allows; a
        matcher that took fewer than it was given is not used again."""

    @abstractmethod
    def fill(
        self, matchers: Sequence[Any], mask: np.ndarray, rows: Sequence[int]
    ) -> Mapping[int, str]:
        """What may come next: bit t % 32 of ``mask[rows[i], t // 32]``, i32 [n, ceil(vocab_size / 32)], is 1 if the
        text stays viable with token t after it, and the bits of the end-of-sequence ids are 1 if it fits as it is.
        Rows that are not named stay as they are.  Returns i -> message for matchers that cannot go on."""
