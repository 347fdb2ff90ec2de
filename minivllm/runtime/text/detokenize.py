"""Incremental conversion of token ids to text, and the search for stop strings in the text.

Returned text never changes later: the joined pieces equal ``tokenizer.decode`` of all ids, byte for byte.  So text is
held back while later tokens may still change it.  This applies to a part of a UTF-8 character, a run of byte tokens
(which decodes as a whole or not at all), and the beginning of a stop string.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from minivllm.core.interfaces.tokenizer import TokenizerBackend

from .alphabet import ALPHABET
from .tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CONTEXT = 4  # number of earlier tokens that are decoded again with new tokens, for decoders that look at neighbours
# number of tokens for which a trailing U+FFFD of an unknown decoder is held back; a character has fewer bytes
PATIENCE = 16


class _Bytes(dict):
    """Map from token ids to bytes, for byte-level tokenizers.  An entry is computed when it is first used."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[str]) -> None:
        super().__init__()
        self._token = tokenizer.token
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None or token in self._skipped:
            value = b""
        else:
            try:
                value = bytes([ALPHABET[c] for c in token])
            except KeyError:  # an added token with a character outside the alphabet is plain text
                value = token.encode()
        self[token_id] = value
        return value


class _PluginBytes(dict):
    """Map from token ids to bytes, for plug-ins whose text is the joined bytes of tokens."""

    def __init__(self, plugin: TokenizerBackend, skipped: frozenset[int]) -> None:
        super().__init__()
        self._bytes_of, self._skipped = plugin.token_bytes, skipped

    def __missing__(self, token_id: int) -> bytes:
        value = b"" if token_id in self._skipped else self._bytes_of(token_id) or b""
        self[token_id] = value
        return value


class _Kinds(dict):
    """Map from token ids to kinds, for other tokenizers: "" (no text), "b" (byte token) or "t" (text).

    An entry is computed when it is first used."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[str], byte_runs: bool) -> None:
        super().__init__()
        self._token, self._skipped, self._byte_runs = tokenizer.token, skipped, byte_runs

    def __missing__(self, token_id: int) -> str:
        token = self._token(token_id)
        if token is None or token in self._skipped:
            kind = ""
        else:
            kind = "b" if self._byte_runs and BYTE_TOKEN.fullmatch(token) else "t"
        self[token_id] = kind
        return kind


class _Scheme:
    """The decoding rules of a tokenizer, shared by all sequences with the same ``skip_special_tokens``."""

    def __init__(self, tokenizer: Tokenizer, skip: bool) -> None:
        plugin = tokenizer.plugin
        self.byte_level = plugin.library is None and plugin.bytewise
        if self.byte_level:
            self.bytes: dict[int, bytes] = _PluginBytes(plugin, plugin.special_ids if skip else frozenset())
            return
        # tokens are skipped by their spelling, as in the tokenizers library, so ordinary tokens with such a spelling
        # are skipped too
        special = [tokenizer.token(i) for i in tokenizer.special_ids] if skip else []
        skipped = frozenset(token for token in special if token is not None)
        steps = _decoder_steps(tokenizer.backend)
        self.byte_level = steps is not None and "ByteLevel" in steps and set(steps) <= {"ByteLevel", "Fuse"}
        if self.byte_level:
            self.bytes = _Bytes(tokenizer, skipped)
        else:
            self.kinds = _Kinds(tokenizer, skipped, steps is None or "ByteFallback" in steps)
            # a token of text may end with a part of a character
            self.partial = steps is None or "ByteLevel" in steps


def _decoder_steps(backend: Any) -> list[str] | None:
    """Return the names of the steps of a decoder of the tokenizers library, or None if they are unknown."""
    if backend is None:
        return None
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


_schemes: WeakKeyDictionary[Tokenizer, dict[bool, _Scheme]] = WeakKeyDictionary()


class IncrementalDetokenizer:
    """The text of one sequence.  ``add`` returns the text that is certain after new ids, ``finish`` the rest.

    For byte-level BPE, an incremental UTF-8 decoder converts the bytes of the tokens, which is exact and fast.  For
    other decoders, a window of the last tokens is decoded with and without the new ones, and the difference is the new
    text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        schemes = _schemes.setdefault(tokenizer, {})
        skip = bool(skip_special_tokens)
        if skip not in schemes:
            schemes[skip] = _Scheme(tokenizer, skip)
        self._scheme = scheme = schemes[skip]
        if scheme.byte_level:
            self._bytes_of = scheme.bytes.__getitem__
            self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        else:
            self._tokenizer, self._skip = tokenizer, skip
            self._window: list[int] = []  # ids with text; the text of the first ``_settled`` has been returned
            self._settled = 0
            self._given = ""  # decode(window[:settled])

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that is certain after new ids.  It never ends with a part of a character."""
        if self._scheme.byte_level:
            return self._decode(b"".join(map(self._bytes_of, ids)))
        pieces = []
        for token_id in ids:
            kind = self._scheme.kinds[token_id]
            if kind:
                self._window.append(token_id)
                if kind == "t":  # a run of byte tokens waits for its end
                    pieces.append(self._advance(final=False))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text that was held back.  Call it once, at the end."""
        return self._decode(b"", True) if self._scheme.byte_level else self._advance(final=True)

    def _advance(self, final: bool) -> str:
        """Return the new text of the window, or "" while later tokens may change it."""
        window = self._window
        if len(window) == self._settled:
            return ""
        text = self._tokenizer.decode(window, self._skip)
        if not text.startswith(self._given):  # the decoder has changed earlier text, so wait for more tokens
            return ""
        waiting = len(window) - self._settled
        if self._scheme.partial and not final and text.endswith("\ufffd") and waiting < PATIENCE:
            return ""
        new = text[len(self._given) :]
        # the context ends with a token of text, so it cannot cut a run of byte tokens
        self._window = window[-CONTEXT:] if len(window) > CONTEXT else window
        self._settled = len(self._window)
        self._given = text if self._window is window else self._tokenizer.decode(self._window, self._skip)
        return new


class StopStrings:
    """Searches for the first stop string in text that arrives in pieces.  Text that may begin a stop string is held
    back.

    The first match is the match that ends first, and of two that end together the longer one.  So the result does not
    depend on the division of the text into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Return the text that is certain, and the stop string that was found or None.  Push nothing after a match.

        Matches that end before the first ``armed`` piece do not count (``min_tokens``).
        """
        if not text:
            return "", None
        old = len(self._held)  # a match within the held text has been judged before
        text = self._held + text
        best: tuple[int, int, str] | None = None
        if armed:
            for stop in self._stops:
                start = text.find(stop, max(old - len(stop) + 1, 0))
                if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                    best = (start + len(stop), start, stop)
        if best is not None:
            self._held = ""
            return text[: best[0] if self._include else best[1]], best[2]
        cut = self._hold_from(text)
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """Return the held text, which did not become a stop string."""
        held = self._held
        self._held = ""
        return held

    def _hold_from(self, text: str) -> int:
        """Return the start of the longest end of a text that is the beginning of a stop string, but not all of it."""
        cut = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(len(text) - len(stop) + 1, 0), cut)
            while start >= 0:
                if stop.startswith(text[start:]):
                    cut = start
                    break
                start = text.find(stop[0], start + 1, cut)
        return cut
