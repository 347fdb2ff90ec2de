"""The bytes of each token of a vocabulary, for grammars, which do not use tokenizers."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError

from .detokenize import ALPHABET

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, width: int) -> list[bytes]:
    """Return the bytes of each token by id, for ids below ``width``, as in the middle of a text.

    Special tokens and unused ids have b"".  ModelError for tokenizers whose tokens do not stand for bytes, such as
    WordPiece."""
    added: dict[int, Any] = {}
    kinds = {"Metaspace"}
    if tokenizer.backend is not None:
        added = tokenizer.backend.get_added_tokens_decoder()
        kinds = set(_kinds(json.loads(tokenizer.backend.to_str()).get("decoder")))
    if "ByteLevel" in kinds:
        spell = _byte_level
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        spell = _sentencepiece
    else:
        names = ", ".join(sorted(kinds)) or "none"
        raise ModelError(
            f"structured output needs a tokenizer whose tokens stand for bytes (byte-level BPE, or SentencePiece); "
            f"the decoder of this one is {names}"
        )
    silent = tokenizer.special_ids | set(tokenizer.eos_ids)
    found = []
    for i in range(min(tokenizer.vocab_size, width)):
        text = None if i in silent else tokenizer.token(i)
        if text is None:
            found.append(b"")
        else:
            found.append(text.encode() if i in added else spell(text))
    return found + [b""] * (width - len(found))


def _kinds(decoder: Any) -> list[str]:
    """Return the types of a decoder and of the decoders inside it."""
    if not isinstance(decoder, dict):
        return []
    kinds = [decoder["type"]]
    for part in decoder.get("decoders", ()):
        kinds += _kinds(part)
    return kinds


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE."""
    try:
        return bytes([ALPHABET[c] for c in token])
    except KeyError:  # the token does not spell bytes, so the decoder returns its text
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    """Return the bytes of a token of SentencePiece."""
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
