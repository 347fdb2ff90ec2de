"""Drafts by suffix matching (after SuffixDecoding, arXiv:2411.04975): the longest end of a row that occurred before.

history      ... a b c d e ... a b c x y ...  a b c     the last tokens, a b c, occurred twice before
earlier outputs  ... z a b c d f ... a b c d g          and twice in earlier outputs of the same owner
drafts                                              d   3 of the 4 places continue with d; then e, f and g are equal

SuffixDecoding keeps its texts in suffix trees.  Here the places are found by comparing whole arrays, which takes
from 0.1 to a few milliseconds for a text of 64K tokens and needs no memory besides the texts.  Text that repeats has
a place at most of its tokens, so only the newest ``PLACES`` that share two tokens are compared further.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from torch import Tensor

from minivllm.core.interfaces.drafter import Ask, Drafter, DrafterContext

PLACES = 2048  # largest number of occurrences of the last two tokens, the newest ones, that are compared further
END = -1  # value after each stored text; it differs from every token id
NOWHERE, NOTHING = np.empty(0, np.int64), np.empty(0, np.int32)


def places(text: np.ndarray, history: np.ndarray, most: int, stop: int) -> tuple[int, np.ndarray]:
    """Find the longest end of ``history`` i32 [n] that occurs in ``text`` i32 [m] and ends before index ``stop``.

    Return its length, up to ``most`` tokens, and the ascending indices i64 of the last token of each occurrence.  Of
    more than ``PLACES`` occurrences of the last two tokens, older ones are left out."""
    length = 0
    found = NOWHERE
    ends = np.flatnonzero(text[:stop] == history[-1])
    while len(ends):
        length += 1
        if length > 1:
            ends = ends[-PLACES:]
        found = ends
        if length >= min(most, len(history)):
            break
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == history[-1 - length]]
    return length, found[-PLACES:]


class Texts:
    """Stores the token ids of earlier outputs by owner, ``most`` tokens in total. The oldest texts are dropped."""

    def __init__(self, most: int) -> None:
        self.most, self.total = most, 0
        self.texts: deque[tuple[int, np.ndarray]] = deque()
        self.joined: dict[int, np.ndarray] = {}

    def add(self, owner: int, tokens: np.ndarray) -> None:
        """Append a text, of which the last ``most`` tokens are kept."""
        if self.most < 2:
            return
        last = tokens[-(self.most - 1) :]
        text = np.append(last, END).astype(np.int32)
        self.texts.append((owner, text))
        self.total += len(text)
        self.joined.pop(owner, None)
        while self.total > self.most:
            oldest, dropped = self.texts.popleft()
            self.total -= len(dropped)
            self.joined.pop(oldest, None)

    def of(self, owner: int) -> np.ndarray:
        """Return the texts of an owner, one after another."""
        if owner in self.joined:
            return self.joined[owner]
        found = [text for whose, text in self.texts if whose == owner]
        if not found:
            return NOTHING
        joined = self.joined[owner] = np.concatenate(found)
        return joined


class Suffix(Drafter):
    """A drafter that proposes the most frequent continuation of the last tokens of a row, in the row's own history and
    in earlier outputs.

    It uses the longest sequence of last tokens that has occurred before.  After each draft only the occurrences that
    continue with this draft remain.  Drafting stops where the share of the occurrences that support all drafts so far
    falls below ``min_share``, or at ``drafts_per_match`` drafts for each matching token.  Of equally frequent tokens,
    the one that occurred last in the history wins, then in earlier outputs."""

    def __init__(self, options: object, ctx: DrafterContext) -> None:
        super().__init__(options, ctx)
        self.texts = Texts(self.options.kept_tokens)

    def learn(self, owner: int, tokens: np.ndarray, prompt: int) -> None:
        if len(tokens) <= prompt:
            return
        # The text is stored with the last tokens of the prompt, which precede the first output token in a match.
        first = max(prompt - self.options.max_match, 0)
        self.texts.add(owner, tokens[first:])

    def propose(self, ask: Ask) -> tuple[Tensor, Tensor]:
        assert ask.owner is not None
        found = np.zeros((len(ask.slots), ask.k + 1), np.int64)  # for each row, its drafts and then their number
        for row, history in enumerate(ask.history):
            texts = self.texts.of(int(ask.owner[row]))
            drafts = self.continued(history, texts, ask.k)
            found[row, : len(drafts)] = drafts
            found[row, ask.k] = len(drafts)
        device = ask.rows.slots.device
        both = torch.from_numpy(found)
        if device.type == "cuda":
            both = both.pin_memory().to(device, non_blocking=True)
        return both[:, : ask.k], both[:, ask.k]

    def continued(self, history: np.ndarray, texts: np.ndarray, k: int) -> list[int]:
        """Return up to ``k`` drafts after ``history`` i32 [n]; ``texts`` i32 [m] are earlier outputs."""
        options = self.options
        n = len(history)
        own, ends = places(history, history, options.max_match, n - 1)
        other, there = places(texts, history, options.max_match, len(texts))
        length = max(own, other)
        if length < options.min_match:
            return []
        if own < length:
            ends = NOWHERE
        if other < length:
            there = NOWHERE
        most = max(1, int(options.drafts_per_match * length))
        # matches may extend into the drafts, because these continue the history
        whole = np.append(history, np.zeros(k, history.dtype))
        drafts: list[int] = []
        share = 1.0
        for step in range(1, min(k, most) + 1):
            after, follows = whole[ends + step], texts[there + step]
            token, support = _most_frequent(np.concatenate([follows, after]))
            share *= support
            if token == END or share < options.min_share:
                break
            whole[n + step - 1] = token
            ends, there = ends[after == token], there[follows == token]
            drafts.append(token)
        return drafts


def _most_frequent(tokens: np.ndarray) -> tuple[int, float]:
    """Return the most frequent of ``tokens`` i32 [n] and its share.

    Return END if that is the most frequent, or if there is no token.  Of equally frequent ones the last wins."""
    if not len(tokens):
        return END, 0.0
    counts = np.bincount(tokens + 1)  # END is -1
    often = counts[tokens + 1]
    most = often.max()
    return int(tokens[often == most][-1]), float(most / len(tokens))
