"""The bytes of each token of a vocabulary, for grammars, which do not use tokenizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.errors import ModelError

from .alphabet import names_of_decoders

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


def token_bytes(tokenizer: Tokenizer, width: int) -> list[bytes]:
    """Return the bytes of each token by id, for ids below ``width``, as in the middle of a text.

    Special tokens and unused ids have b"".  ModelError for tokenizers whose tokens do not stand for bytes, such as
    WordPiece."""
    silent = tokenizer.special_ids | set(tokenizer.eos_ids)
    plugin = tokenizer.plugin
    found = []
    for i in range(min(tokenizer.vocab_size, width)):
        spelled = b"" if i in silent else plugin.token_bytes(i)
        if spelled is None:
            decoder = (
                "" if plugin.library is None else f"; the decoder of this one is {names_of_decoders(plugin.library)}"
            )
            raise ModelError(
                "structured output needs a tokenizer whose tokens stand for bytes (byte-level BPE, or SentencePiece)"
                + decoder
            )
        found.append(spelled)
    return found + [b""] * (width - len(found))
