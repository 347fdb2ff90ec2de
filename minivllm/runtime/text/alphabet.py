"""Spellings of tokens: the characters with which byte-level BPE spells bytes, and the bytes of a spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Return a dict from each character with which byte-level BPE (GPT-2) represents a byte to the byte.

    Printable characters of Latin-1 represent themselves.  The other bytes are represented by characters from U+0100 on,
    in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    alphabet = {chr(b): b for b in plain}
    alphabet.update({chr(256 + i): b for i, b in enumerate(others)})
    return alphabet


ALPHABET = _byte_alphabet()


def speller_of(library: Any) -> Callable[[str], bytes] | None:
    """Return the function that converts tokens of a ``tokenizers.Tokenizer`` to bytes, or None if there is none."""
    kinds = _kinds_of(library)
    if "ByteLevel" in kinds:
        return bytes_of_byte_level
    return bytes_of_sentencepiece if kinds & {"Metaspace", "ByteFallback", "Replace"} else None


def _kinds_of(library: Any) -> set[str]:
    """Return the types of the decoders of a ``tokenizers.Tokenizer``."""
    decoder = library.decoder
    return set() if decoder is None else set(_kinds(json.loads(decoder.__getstate__())))


def names_of_decoders(library: Any) -> str:
    """Return the types of decoders as text."""
    return ", ".join(sorted(_kinds_of(library))) or "none"


def _kinds(decoder: Any) -> list[str]:
    """Return the types of a decoder and of the decoders inside it."""
    if not isinstance(decoder, dict):
        return []
    kinds = [decoder["type"]]
    for part in decoder.get("decoders", ()):
        kinds += _kinds(part)
    return kinds


def bytes_of_byte_level(token: str) -> bytes:
    """Return the bytes of a token of byte-level BPE."""
    try:
        return bytes([ALPHABET[c] for c in token])
    except KeyError:  # the token does not consist of byte characters, so the decoder returns its text
        return token.encode()


def bytes_of_sentencepiece(token: str) -> bytes:
    """Return the bytes of a token of SentencePiece."""
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()
