"""Log-probabilities in the shapes of answers: chat completions, completions, ``prompt_logprobs``.

All take rows as the columns have them (``scored.Row``) and give plain values for JSON, a value a row, so that any part
of an answer can be made by itself: a few rows on the event loop, many where it takes long (``answers``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from minivllm.runtime.text.detokenize import ALPHABET

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer
    from minivllm.server.link.scored import ScoredToken

LEAST = -9999.0  # JSON has no infinity; vLLM's value for it
Score = tuple[int, float]  # a token and its log-probability


def _score(value: float) -> float:
    return value if value > LEAST else LEAST


def _all(row: ScoredToken) -> list[Score]:
    """The token's own first, then the best that have any probability."""
    found = [(row.token, row.chosen)]
    for token, value in zip(row.top_ids, row.top, strict=True):
        if not value > -math.inf:  # nor has what follows; of a NaN nothing can be said
            break
        if token != row.token:
            found.append((token, value))
    return found


def _best(row: ScoredToken, top: int) -> list[Score]:
    """The ``top`` likeliest of a row, of equal ones the lower id first; not what has no probability."""
    return sorted((one for one in _all(row) if one[1] > -math.inf), key=_order)[:top]


def _order(one: Score) -> tuple[float, int]:
    return -one[1], one[0]


class _Spelled:
    """What was made of a tokenizer's tokens: at most an entry for each of its vocabulary."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.bytes: dict[int, list[int]] = {}


_SPELLED: WeakKeyDictionary[Tokenizer, _Spelled] = WeakKeyDictionary()


class Speller:
    """Tokens as text and bytes.  ``as_ids``: ``token_id:N``, which is unambiguous.  ``detokenize`` False: no token has
    a text."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False, detokenize: bool = True) -> None:
        self.as_ids, self.detokenize = as_ids, detokenize
        self._tokenizer, self._as_ids, self._spells = tokenizer, as_ids or tokenizer is None, detokenize
        self._kept = _Spelled() if tokenizer is None else _SPELLED.setdefault(tokenizer, _Spelled())

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._decoded(token) if self._spells else ""

    def _decoded(self, token: int) -> str:
        """ "" without a tokenizer."""
        if (text := self._kept.texts.get(token)) is None:
            tokenizer = self._tokenizer
            text = "" if tokenizer is None else tokenizer.decode((token,), skip_special_tokens=False)
            self._kept.texts[token] = text
        return text

    def alone(self, token: int) -> str:
        """A token without a score."""
        return f"token_id:{token}" if self._as_ids else self._decoded(token)

    def bytes(self, token: int) -> list[int]:
        """A token may be a part of a character: its text is then U+FFFD, its bytes say which part."""
        if not self._spells:
            return []
        if (found := self._kept.bytes.get(token)) is None:
            found = self._kept.bytes[token] = self._bytes(token)
        return found

    def _bytes(self, token: int) -> list[int]:
        text = self._decoded(token)
        if "\ufffd" in text and self._tokenizer is not None:
            spelled = self._tokenizer.token(token) or ""
            if all(c in ALPHABET for c in spelled):
                return [ALPHABET[c] for c in spelled]
        return list(text.encode("utf-8", "replace"))

    def unique(self, token: int) -> str:
        """A text that no other token has: parts of characters as ``bytes:\\xe2\\x98``."""
        text = self.text(token)
        if self._as_ids or "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{b:02x}" for b in self.bytes(token))


def chat(rows: Iterable[ScoredToken], top: int, speller: Speller) -> list[dict[str, Any]]:
    """What ``content`` holds."""

    def one(token: int, value: float) -> dict[str, Any]:
        return {"token": speller.text(token), "logprob": _score(value), "bytes": speller.bytes(token)}

    return [
        {**one(row.token, row.chosen), "top_logprobs": [one(*item) for item in _best(row, top)] if top else []}
        for row in rows
    ]


def prompt(rows: Iterable[ScoredToken], speller: Speller) -> list[dict[str, Any] | None]:
    """``prompt_logprobs`` in vLLM's shape: for each token null (the first) or token id -> score, the token's own
    first."""
    return [_prompt_row(row, speller) if row.rank else None for row in rows]


def _prompt_row(row: ScoredToken, speller: Speller) -> dict[str, Any]:
    text = speller.text(row.token)
    found = {str(row.token): {"logprob": _score(row.chosen), "rank": row.rank, "decoded_token": text}}
    rank, before = 0, math.nan
    for place, (token, value) in enumerate(zip(row.top_ids, row.top, strict=True), 1):
        if not value > -math.inf:
            break
        if value != before:
            rank, before = place, value
        if token != row.token:
            found[str(token)] = {"logprob": _score(value), "rank": rank, "decoded_token": speller.text(token)}
    return found


def completion(rows: Iterable[ScoredToken], top: int, speller: Speller) -> dict[str, list[Any]]:
    """The shape of completions but for the places in the text.  The first of a prompt has no score: nothing came before
    it."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for row in rows:
        scored = row.rank > 0
        tokens.append(speller.unique(row.token) if scored else speller.alone(row.token))
        chosen.append(_score(row.chosen) if scored else None)
        likely = {**dict(_best(row, top)), row.token: row.chosen} if top and scored else {}
        tops.append({speller.unique(token): _score(value) for token, value in likely.items()} or None)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops}
