"""Log-probabilities in the shapes of answers: chat completions, completions, ``prompt_logprobs``.

Each function takes rows (``scored.Row``: a token with its score and its most likely alternatives) and returns plain
values for JSON, one for each row.  So any part of an answer can be made separately: a few rows on the event loop, many
rows in the worker pool (``answers``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from minivllm.runtime.text.detokenize import ALPHABET

from . import JsonObject

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer
    from minivllm.server.link.scored import ScoredToken

LEAST = -9999.0  # replaces minus infinity, which JSON cannot express; vLLM uses the same value
Score = tuple[int, float]  # (token id, its log-probability)


def _score(value: float) -> float:
    """Return a log-probability that JSON can express."""
    return value if value > LEAST else LEAST


def _all(row: ScoredToken) -> list[Score]:
    """Return the chosen token of a row, then its most likely tokens with a probability above 0."""
    found = [(row.token, row.chosen)]
    for token, value in zip(row.top_ids, row.top, strict=True):
        if not value > -math.inf:  # NaN or minus infinity; the tokens after it have no probability either
            break
        if token != row.token:
            found.append((token, value))
    return found


def _best(row: ScoredToken, top: int) -> list[Score]:
    """Return the ``top`` most likely tokens of a row with a probability above 0, the lower id first among equals."""
    likely = [score for score in _all(row) if score[1] > -math.inf]
    return sorted(likely, key=_order)[:top]


def _order(score: Score) -> tuple[float, int]:
    """Return the sort key that puts the most likely token first, and the lower id first among equals."""
    return -score[1], score[0]


class _Spelled:
    """The cached texts and bytes of the tokens of one tokenizer, at most one entry per token of its vocabulary."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.bytes: dict[int, list[int]] = {}


_SPELLED: WeakKeyDictionary[Tokenizer, _Spelled] = WeakKeyDictionary()


class Speller:
    """Converts tokens to text and bytes.

    ``as_ids`` spells every token as ``token_id:N``, which is unambiguous.  ``detokenize=False`` omits all texts."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False, detokenize: bool = True) -> None:
        self.as_ids, self.detokenize = as_ids, detokenize
        self._tokenizer = tokenizer
        self._spells_ids = as_ids or tokenizer is None
        self._kept = _Spelled() if tokenizer is None else _SPELLED.setdefault(tokenizer, _Spelled())

    def text(self, token: int) -> str:
        """Return the text of a token with a score."""
        return self.alone(token) if self._spells_ids or self.detokenize else ""

    def alone(self, token: int) -> str:
        """Return the text of a token without a score, which ``detokenize`` does not affect."""
        return f"token_id:{token}" if self._spells_ids else self._decoded(token)

    def _decoded(self, token: int) -> str:
        """Return the decoded text of a token, or "" without a tokenizer."""
        text = self._kept.texts.get(token)
        if text is None:
            tokenizer = self._tokenizer
            text = "" if tokenizer is None else tokenizer.decode((token,), skip_special_tokens=False)
            self._kept.texts[token] = text
        return text

    def bytes(self, token: int) -> list[int]:
        """Return the UTF-8 bytes of a token.

        A token that is a part of a character has the text U+FFFD, so only its bytes identify the part.
        """
        if not self.detokenize:
            return []
        found = self._kept.bytes.get(token)
        if found is None:
            found = self._kept.bytes[token] = self._bytes(token)
        return found

    def _bytes(self, token: int) -> list[int]:
        """Return the bytes of a token."""
        text = self._decoded(token)
        if "\ufffd" in text and self._tokenizer is not None:
            spelled = self._tokenizer.token(token) or ""
            if all(c in ALPHABET for c in spelled):
                return [ALPHABET[c] for c in spelled]
        return list(text.encode("utf-8", "replace"))

    def unique(self, token: int) -> str:
        """Return a text that no other token has.  A part of a character is spelled as ``bytes:\\xe2\\x98``."""
        text = self.text(token)
        if self._spells_ids or "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{b:02x}" for b in self.bytes(token))


def chat(rows: Iterable[ScoredToken], top: int, speller: Speller) -> list[JsonObject]:
    """Return the elements of ``logprobs.content`` of a chat, with the ``top`` most likely tokens of each row."""

    def score(token: int, value: float) -> JsonObject:
        return {"token": speller.text(token), "logprob": _score(value), "bytes": speller.bytes(token)}

    content = []
    for row in rows:
        likely = [score(*item) for item in _best(row, top)] if top else []
        content.append({**score(row.token, row.chosen), "top_logprobs": likely})
    return content


def prompt(rows: Iterable[ScoredToken], speller: Speller) -> list[JsonObject | None]:
    """Return ``prompt_logprobs`` in vLLM's shape: for each token a map from token ids to scores, the token's own first.

    The first token of a prompt has no score, so its element is None."""
    return [_prompt_row(row, speller) if row.rank else None for row in rows]


def _prompt_row(row: ScoredToken, speller: Speller) -> JsonObject:
    """Return the scores of one token of a prompt.  Tokens of equal probability have the same rank."""
    scores = {str(row.token): _ranked(row.chosen, row.rank, speller.text(row.token))}
    rank = 0
    previous = math.nan
    for place, (token, value) in enumerate(zip(row.top_ids, row.top, strict=True), 1):
        if not value > -math.inf:
            break
        if value != previous:
            rank = place
            previous = value
        if token != row.token:
            scores[str(token)] = _ranked(value, rank, speller.text(token))
    return scores


def _ranked(value: float, rank: int, text: str) -> JsonObject:
    """Return one score of ``prompt_logprobs``."""
    return {"logprob": _score(value), "rank": rank, "decoded_token": text}


def completion(rows: Iterable[ScoredToken], top: int, speller: Speller) -> dict[str, list[Any]]:
    """Return the ``logprobs`` of a completion without ``text_offset``.

    The first token of a prompt has no score, so its elements are None."""
    tokens: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for row in rows:
        if row.rank <= 0:
            tokens.append(speller.alone(row.token))
            chosen.append(None)
            tops.append(None)
            continue
        tokens.append(speller.unique(row.token))
        chosen.append(_score(row.chosen))
        likely = {**dict(_best(row, top)), row.token: row.chosen} if top else {}
        tops.append({speller.unique(token): _score(value) for token, value in likely.items()} or None)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops}
