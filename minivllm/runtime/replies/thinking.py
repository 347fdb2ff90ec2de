"""The tags around a model's reasoning, as token ids, and the state of an answer between them.

    prompt  <think> r r r </think> a a a        r: reasoning, a: the answer
            start          end

A request names its tags in ``thinking_tags``.  The front end with a tokenizer converts them to token ids, or uses the
tags of the model.  The processor ``thinking_budget`` bounds the reasoning, and a form begins behind it
(``runtime.structured.gates``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minivllm.errors import RequestError, shown

BUDGET, TAGS = "thinking_token_budget", "thinking_tags"  # parameters of a request
START, END, ANSWER = "start", "end", "answer"  # keys of ``thinking_tags``
MOST_IDS = 16  # largest number of token ids of a tag
WANTED = f"a mapping with start, end and answer, each a text or a list of 1 to {MOST_IDS} token ids"


@dataclass(frozen=True)
class ThinkingTags:
    """The token ids of the tags of reasoning.

    ``answer`` are the ids after which a constrained form applies.  They are usually ``end``; models with channels have
    a header of the answer instead.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]
    answer: tuple[int, ...]

    @classmethod
    def of(cls, tags: Any, vocab_size: int) -> ThinkingTags:
        """Return the tags of a request.  RequestError unless ``start`` and ``end`` are lists of ids of the
        vocabulary."""
        _check(isinstance(tags, Mapping), f"={shown(tags)}")
        for key in (START, END):
            _check(key in tags, f": {key} is missing, and this engine has no tokenizer to find it")
        for key, ids in tags.items():
            _check(key in (START, END, ANSWER), f": unknown key {shown(key)}")
            listed = isinstance(ids, (list, tuple)) and 1 <= len(ids) <= MOST_IDS
            whole = listed and all(type(i) is int and 0 <= i < vocab_size for i in ids)
            _check(whole, f".{key}={shown(ids)}, in a vocabulary of {vocab_size} tokens")
        _check(list(tags[START]) != list(tags[END]), ": start and end are the same")
        return cls(tuple(tags[START]), tuple(tags[END]), tuple(tags.get(ANSWER, tags[END])))

    def opened(self, prompt: Sequence[int] | np.ndarray, eos_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends within the reasoning, which the answer then continues.

        Such a prompt has the start tag, followed neither by the end tag nor by an end-of-sequence token, which ends
        each message of a conversation.
        """
        ids = np.asarray(prompt)
        start = last_place(ids, self.start)
        if start < 0:
            return False
        rest = ids[start + len(self.start) :]
        return last_place(rest, self.end) < 0 and not np.isin(rest, list(eos_ids)).any()


def last_place(ids: np.ndarray, tag: Sequence[int]) -> int:
    """Return the last position at which ``ids`` have the ids of a tag, or -1."""
    last = len(ids) - len(tag)
    if last < 0:
        return -1
    here = np.ones(last + 1, bool)
    for number, token in enumerate(tag):
        here &= ids[number : number + last + 1] == token
    found = np.flatnonzero(here)
    return int(found[-1]) if len(found) else -1


def _check(ok: bool, problem: str) -> None:
    """Raise RequestError with the text ``problem`` unless ``ok``."""
    if not ok:
        raise RequestError(f"{TAGS}{problem}; expected {WANTED}", TAGS)
