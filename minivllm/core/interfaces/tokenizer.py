"""The tokenizer seam (plug-in interface): convert text to token ids, and token ids to text.

The engine adds chat templates, incremental decoding and the search for stop strings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

API = (1, 0)


@dataclass(frozen=True)
class TokenizerContext:
    """The arguments with which the engine constructs a tokenizer."""

    path: Path  # directory of the tokenizer's files, or a GGUF file


class TokenizerBackend(ABC):
    """A tokenizer.  Several threads call it at the same time, and each worker process of a server has its own.

    The constructor raises ModelError for missing or broken files.  It never runs code of the directory.

    ``library`` is a ``tokenizers.Tokenizer`` which gives the same results as the methods, or None.  The engine calls it
    directly, because it also returns the positions of tokens in a text.

    ``bytewise`` promises that the text of token ids is the UTF-8 text of their joined ``token_bytes``, with U+FFFD for
    invalid bytes.  Incremental decoding is faster with it.
    """

    library: Any = None
    bytewise: bool = False
    # Role in transformers, such as "eos_token" -> text of the special token.
    special_tokens: Mapping[str, str] = {}
    # Chat templates: name -> Jinja template, "default" for the one without a name; if empty, the
    # templates of the directory are used.
    chat_templates: Mapping[str, str] = {}

    def __init__(self, options: Any, ctx: TokenizerContext) -> None:
        self.options, self.ctx = options, ctx

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return the number of tokens, including special ones.  Every id that ``encode`` returns is smaller."""

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens, which ``decode`` can leave out."""

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Return the ids of the tokens that are never a part of other text, special or not, by their texts."""
        found = {self.token(i): i for i in self.special_ids}
        return {text: i for text, i in found.items() if text is not None}

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text.  Text that is spelled like a special token becomes this token.

        ``add_special_tokens`` adds the special tokens of a prompt, such as the one that begins a text.  Raise
        UnicodeEncodeError or TypeError for text with lone surrogates."""

    @abstractmethod
    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens.  Text that is spelled like a special token is divided into
        ordinary tokens.  Raise ``ValueError`` if the vocabulary cannot spell it without the special token."""

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids.  Ids outside the vocabulary have no text.  Spaces are not changed."""

    @abstractmethod
    def token(self, token_id: int) -> str | None:
        """Return the spelling of a token in the vocabulary, or None for an unknown id."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its spelling, or None."""

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes that a token adds in the middle of a text, or None if tokens do not stand for bytes.

        Special tokens have the bytes of their spelling, and unknown ids have none: b"".  Grammars need these bytes."""
        return None
