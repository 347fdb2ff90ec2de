"""Gates of sequences whose constrained form (such as a grammar) begins behind the reasoning, so that the matcher gets
no tokens of the reasoning.

    <think> r r r </think> { "a" : 1 }
    free                   form

While a gate is free, the mask allows every token that does not end the answer.  The first token may be the start tag,
which makes the gate free; any other token is the first one of the form.  A gate depends only on the tokens, so a
branch, or a sequence after a preemption, gets a new gate and a new matcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from minivllm.core.interfaces.structured import StructuredOutputsParams
from minivllm.runtime.replies.grammar_rules import BEHIND
from minivllm.runtime.replies.thinking import ThinkingTags

if TYPE_CHECKING:
    from minivllm.core.engine.request import Request, Seq

BITS = 32  # number of bits of a word of a mask


class Gate:
    """The gate of one sequence, which passes only tokens after the reasoning to its matcher.

    ``free`` means that the next token is reasoning.  ``first`` means that the answer has no token yet, and that its
    first token may be the start tag.  ``ends`` are the ids that end an answer.
    """

    def __init__(self, tags: ThinkingTags, opened: bool, ends: Sequence[int]) -> None:
        self.free = opened
        self.first = not opened
        self._tags = tags
        self._ends = ends
        self._tail: list[int] = []  # last tokens of the reasoning

    def rest(self, ids: Sequence[int]) -> Sequence[int]:
        """Take new tokens, and return the tokens that belong to the constrained form: those after the end tag of free
        text, or all if there is no free text."""
        answer = self._tags.answer
        for number, token in enumerate(ids):
            if self.first:
                self.first = False
                self.free = token == self._tags.start[0]
            if not self.free:
                return ids[number:]
            self._tail = [*self._tail, token][-len(answer) :]
            self.free = tuple(self._tail) != answer
        return []

    def widen(self, row: np.ndarray) -> None:
        """Add to a mask row i32, in place, the tokens that the reasoning allows."""
        if self.free:
            row[:] = -1
            for token in self._ends:
                row[token // BITS] &= ~_bit(token)
        elif self.first:
            token = self._tags.start[0]
            row[token // BITS] |= _bit(token)


def _bit(token: int) -> np.int32:
    """Return the bit of a token in its word of a mask."""
    return np.array([1 << token % BITS], np.uint32).view(np.int32)[0]


class Gates:
    """The gates of an engine.  Sequences of requests that were not added have no gate.

    A gate is stored with the matcher that it belongs to, and a new matcher gets a new gate."""

    def __init__(self) -> None:
        self._makers: WeakKeyDictionary[Request, Callable[[], Gate]] = WeakKeyDictionary()
        self._gates: WeakKeyDictionary[Request, dict[int, tuple[Any, Gate]]] = WeakKeyDictionary()

    def add(self, request: Request, ends: Sequence[int], vocab_size: int) -> None:
        """Add a request whose constrained form begins after its reasoning.  Other requests have no gate.

        ``ends`` are the end-of-sequence ids.  RequestError for malformed ``thinking_tags``.
        """
        params = request.params
        form = StructuredOutputsParams.of(params.structured_outputs)
        if form is None or params.thinking_tags is None:
            return
        if form.source.kind == "reply" and not form.source.text.startswith(BEHIND):
            return  # the grammar itself describes the reasoning, so no gate is needed
        tags = ThinkingTags.of(params.thinking_tags, vocab_size)
        opened = tags.opened(request.prompt, ends)
        self._makers[request] = lambda: Gate(tags, opened, ends)

    def passed(
        self, seqs: Sequence[Seq], behind: Sequence[int], new: Sequence[Sequence[int]]
    ) -> tuple[Sequence[int], Sequence[Sequence[int]]]:
        """Return ``behind`` and ``new`` without the tokens of reasoning.

        ``behind`` are the indices in ``seqs`` of the sequences with new tokens, and ``new`` has their tokens.
        """
        if not self._makers:
            return behind, new
        kept = []
        for index, ids in zip(behind, new, strict=True):
            gate = self._gate(seqs[index])
            rest = ids if gate is None else gate.rest(ids)
            if rest:
                kept.append((index, rest))
        return [index for index, _ in kept], [ids for _, ids in kept]

    def widen(self, seqs: Sequence[Seq], mask: np.ndarray, rows: Sequence[int]) -> None:
        """Add the tokens that the reasoning allows to the mask i32 [n, words], whose row ``rows[i]`` belongs to
        ``seqs[i]``."""
        if not self._makers:
            return
        for seq, row in zip(seqs, rows, strict=True):
            gate = self._gate(seq)
            if gate is not None:
                gate.widen(mask[row])

    def _gate(self, seq: Seq) -> Gate | None:
        """Return the gate of a sequence's matcher, or None."""
        make = self._makers.get(seq.request)
        if make is None:
            return None
        gates = self._gates.setdefault(seq.request, {})
        matcher, gate = gates.get(seq.id, (None, None))
        if gate is None or matcher is not seq.matcher:
            gate = make()
            gates[seq.id] = (seq.matcher, gate)
        return gate
