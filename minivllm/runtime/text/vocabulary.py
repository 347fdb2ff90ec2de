"""The bytes of each token: what a grammar, which knows nothing of tokenizers, has to know of a vocabulary."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, width: int) -> list[bytes]:
    """By id, for ids below ``width``: the bytes that a token adds to a text that has begun.  b"" for special tokens and
    for ids that are no token.  ModelError where tokens have no bytes of their own, as in WordPiece."""
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
        what = ", ".join(sorted(kinds)) or "none"
        raise ModelError(
            f"structured output needs a tokenizer whose tokens stand for bytes (byte-level BPE, or SentencePiece); "
            f"the decoder of this one is {what}"
        )
    silent = tokenizer.special_ids | set(tokenizer.eos_ids)
    found = []
    for i in range(min(tokenizer.vocab_size, width)):
        text = None if i in silent else tokenizer.token(i)
        found.append(b"" if text is None else text.encode() if i in added else spell(text))
    return found + [b""] * (width - len(found))


def _kinds(decoder: Any) -> list[str]:
    """Types of a decoder and of those that it is made of."""
    if not isinstance(decoder, dict):
        return []
    return [decoder["type"], *(kind for part in decoder.get("decoders", ()) for kind in _kinds(part))]


@cache
def _alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: the printable ones of Latin-1 as they are, the others from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(0x100 + i): b for i, b in enumerate(others)}}


def _byte_level(token: str) -> bytes:
    letters = _alphabet()
    try:
        return bytes([letters[c] for c in token])
    except KeyError:  # no spelling of bytes: the decoder gives it as it is
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
