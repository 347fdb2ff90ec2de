"""Log-probabilities in OpenAI's two shapes: that of chat completions and that of completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from minivllm.text.detokenize import ALPHABET

if TYPE_CHECKING:
    from minivllm.text.outputs import Logprob
    from minivllm.text.tokenizer import Tokenizer

NO_SCORE = (("token_logprobs", None), ("top_logprobs", None))
LEAST = -9999.0  # JSON has no infinity; vLLM's value for it


def _score(entry: Logprob) -> float:
    return entry.logprob if entry.logprob > LEAST else LEAST


def _best(row: Mapping[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` likeliest of a row, of equal ones the lower id first; not what has no probability."""
    able = [item for item in row.items() if item[1].logprob > -math.inf]
    return sorted(able, key=lambda item: (-item[1].logprob, item[0]))[:top]


class Speller:
    """Tokens as text and bytes.  ``as_ids``: ``token_id:N``, which is unambiguous."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids or tokenizer is None

    def text(self, token: int, entry: Logprob) -> str:
        return f"token_id:{token}" if self._as_ids else entry.decoded_token or ""

    def alone(self, token: int) -> str:
        """A token without a score."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.decode((token,), skip_special_tokens=False)

    def bytes(self, token: int, entry: Logprob) -> list[int]:
        """A token may be a part of a character: its text is then U+FFFD, its bytes say which part."""
        text = entry.decoded_token or ""
        if "\ufffd" in text and self._tokenizer is not None:
            spelled = self._tokenizer.token(token) or ""
            if all(c in ALPHABET for c in spelled):
                return [ALPHABET[c] for c in spelled]
        return list(text.encode("utf-8", "replace"))

    def unique(self, token: int, entry: Logprob) -> str:
        """A text that no other token has: parts of characters as ``bytes:\\xe2\\x98``."""
        text = self.text(token, entry)
        if self._as_ids or "\ufffd" not in text:
            return text
        return "bytes:" + "".join(f"\\x{b:02x}" for b in self.bytes(token, entry))


def chat(rows: Sequence[Mapping[int, Logprob]], top: int, speller: Speller) -> dict[str, Any]:
    """``rows``: for each token, the chosen one first and then the likeliest."""
    return {"content": [_chat_row(row, top, speller) for row in rows], "refusal": None}


def _chat_row(row: Mapping[int, Logprob], top: int, speller: Speller) -> dict[str, Any]:
    def one(token: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": speller.text(token, entry), "logprob": _score(entry),
            "bytes": speller.bytes(token, entry),
        }  # fmt: skip

    token, entry = next(iter(row.items()))
    return {**one(token, entry), "top_logprobs": [one(*item) for item in _best(row, top)]}


def prompt(rows: Sequence[Mapping[int, Logprob] | None] | None, speller: Speller) -> list[Any] | None:
    """``prompt_logprobs`` in vLLM's shape: for each token null (the first) or token id -> score, the token's own
    first."""
    if rows is None:
        return None

    def one(token: int, entry: Logprob) -> dict[str, Any]:
        return {
            "logprob": _score(entry), "rank": entry.rank, "decoded_token": speller.text(token, entry),
        }  # fmt: skip

    return [None if row is None else {str(token): one(token, entry) for token, entry in row.items()} for row in rows]


def completion(rows: Sequence[tuple[Mapping[int, Logprob] | int, int]], top: int, speller: Speller) -> dict[str, Any]:
    """The shape of completions of (row, place in the text).  A row is a token id where there is no score: the first of
    a prompt, which nothing came before."""
    out: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for row, place in rows:
        out["text_offset"].append(place)
        if isinstance(row, int):
            for name, value in (("tokens", speller.alone(row)), *NO_SCORE):
                out[name].append(value)
            continue
        token, entry = next(iter(row.items()))
        out["tokens"].append(speller.unique(token, entry))
        out["token_logprobs"].append(_score(entry))
        likely = {**dict(_best(row, top)), token: entry} if top else {}
        out["top_logprobs"].append({speller.unique(t, e): _score(e) for t, e in likely.items()} if likely else None)
    return out
