"""Token ids to text as they come, and stop strings in that text.

What has been given out is never taken back: the pieces, joined, are byte for byte ``tokenizer.decode`` of all ids.  So
text is held back while the tokens to come may still change it: half a UTF-8 character, a run of byte tokens (which
decodes as a whole or not at all), the beginning of a stop string.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from .tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
CONTEXT = 4  # tokens decoded again in front of new ones, where a decoder looks at neighbours
PATIENCE = 16  # tokens that an unknown decoder's trailing U+FFFD is held back: more than a character has bytes


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE (GPT-2) spells bytes with: printable ones stand for themselves, the others are
    numbered from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


ALPHABET = _byte_alphabet()


class _Bytes(dict):
    """Token id -> its bytes, for byte-level tokenizers; filled as ids occur."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[str]) -> None:
        super().__init__()
        self._token, self._skipped = tokenizer.token, skipped

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


class _Kinds(dict):
    """Token id -> "" without text, "b" byte token, "t" text, for other tokenizers; filled as ids occur."""

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
    """How a tokenizer decodes; one per tokenizer and ``skip_special_tokens``, shared by its sequences."""

    def __init__(self, tokenizer: Tokenizer, skip: bool) -> None:
        # by spelling, as the tokenizers library does it: an ordinary token that is spelled like a special one goes too
        skipped = frozenset(t for i in tokenizer.special_ids if (t := tokenizer.token(i)) is not None) if skip else ()
        steps = _decoder_steps(tokenizer.backend)
        self.byte_level = steps is not None and "ByteLevel" in steps and set(steps) <= {"ByteLevel", "Fuse"}
        if self.byte_level:
            self.bytes = _Bytes(tokenizer, frozenset(skipped))
        else:
            self.kinds = _Kinds(tokenizer, frozenset(skipped), steps is None or "ByteFallback" in steps)
            # may a whole token end in half a character?
            self.partial = steps is None or "ByteLevel" in steps


def _decoder_steps(backend: Any) -> list[str] | None:
    """Names of the steps of a tokenizers decoder; None where there is no way to tell."""
    if backend is None:
        return None
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    return [part["type"] for part in parts]


_schemes: WeakKeyDictionary[Tokenizer, dict[bool, _Scheme]] = WeakKeyDictionary()


class IncrementalDetokenizer:
    """The text of one sequence.  ``add`` gives the text that new ids have settled, ``finish`` what is left.

    Byte-level BPE: ids -> bytes -> incremental UTF-8 decoder, exact and fast.  Other decoders: a window of the last few
    tokens is decoded with and without the new ones, and the difference is the new text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        schemes = _schemes.setdefault(tokenizer, {})
        skip = bool(skip_special_tokens)
        if skip not in schemes:
            schemes[skip] = _Scheme(tokenizer, skip)
        scheme = schemes[skip]
        if scheme.byte_level:
            self._bytes_of = scheme.bytes.__getitem__
            self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            self.add, self.finish = self._add_bytes, self._finish_bytes  # type: ignore[method-assign]
        else:
            self._tokenizer, self._scheme, self._skip = tokenizer, scheme, skip
            self._window: list[int] = []  # ids with text; the first ``_settled`` have been given out
            self._settled = 0
            self._given = ""  # decode(window[:settled])

    def _add_bytes(self, ids: Sequence[int]) -> str:
        return self._decode(b"".join(map(self._bytes_of, ids)))

    def _finish_bytes(self) -> str:
        return self._decode(b"", True)

    def add(self, ids: Sequence[int]) -> str:
        """Text that is settled with these ids; never half a character."""
        pieces = []
        for token_id in ids:
            kind = self._scheme.kinds[token_id]
            if kind:
                self._window.append(token_id)
                if kind == "t":  # a run of byte tokens waits for its end
                    pieces.append(self._advance(final=False))
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back; call once, at the end."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        window = self._window
        if len(window) == self._settled:
            return ""
        text = self._tokenizer.decode(window, self._skip)
        if not text.startswith(self._given):  # a decoder that changes its mind: wait for more
            return ""
        waiting = len(window) - self._settled
        if self._scheme.partial and not final and text.endswith("\ufffd") and waiting < PATIENCE:
            return ""
        new = text[len(self._given) :]
        # the token before the new ones always closes the context: it is "t", so no byte run is cut at its end
        self._window = window[-CONTEXT:] if len(window) > CONTEXT else window
        self._settled = len(self._window)
        self._given = text if self._window is window else self._tokenizer.decode(self._window, self._skip)
        return new


class StopStrings:
    """Finds the first stop string in text that comes in pieces, and holds back what may become one.

    The first match is the one that is complete first, as if the text came character by character; of two that end
    together the longer.  So the outcome does not depend on how the text is cut.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """(text to give out, the stop string that was found or None); nothing may be pushed after a match.

        Matches that are complete before the first armed piece do not count (``min_tokens``).
        """
        if not text:
            return "", None
        old = len(self._held)  # a match ends behind it, or it would have counted (or not have counted) before
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
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _hold_from(self, text: str) -> int:
        """Where the longest end of the text begins that a stop string begins with (and does not end with)."""
        cut = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(len(text) - len(stop) + 1, 0), cut)
            while start >= 0:
                if stop.startswith(text[start:]):
                    cut = start
                    break
                start = text.find(stop[0], start + 1, cut)
        return cut
