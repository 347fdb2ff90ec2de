"""Random replies that the grammar of a reply format allows, chosen token by token.

The suite of parsers and the tests of grammars parse them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from minivllm.core.interfaces.grammar import Compiled, GrammarContext, GrammarSource
from minivllm.runtime.replies import FIRST_MARK, ReplyContext, ReplyFormat

WORDS = (
    "the", " a", "null", "true", "12", "1.5", "None", '{"a": 1}', "[1]", "\u00e9", "\u4e2d", "\n", " ", "</", "<", ">",
    "}", "]", '"', '", "', '": ', "\\n", '\\"', ", ", "a", "b", "x", "k", "<tool_call>x", "</parameter", "/arg_value>",
    "{", "[", ")", "name", '{"name": "f"', "```", "`", "=",
)  # fmt: skip
ENDS = ('"', "}", "]", ")", ", ", "\n", "</")


class Walker:
    """A vocabulary of bytes, words and tags, and random replies over it that a grammar allows.

    ``marked`` are the tags that are single tokens.  With ``special`` these tokens are special tokens, which have no
    bytes.
    """

    def __init__(self, form: ReplyFormat, marked: Collection[str] = (), special: bool = False) -> None:
        from minivllm.plugins.grammar.llguidance_plugin import LLGuidance

        texts = list(WORDS)
        texts += [tag for tag in form.tags if tag not in marked]
        if form.calls and form.calls[0].pairs:
            after = form.calls[0].pairs.after
            texts.append(after)
        self.tokens = [bytes([b]) for b in range(256)]
        self.tokens += [text.encode() for text in texts]
        self.ids: dict[str, int] = {}
        self.marks: dict[str, str] = {}
        for k, tag in enumerate(marked):
            self.ids[tag] = len(self.tokens)
            self.marks[tag] = chr(FIRST_MARK + k)
            self.tokens.append(b"" if special else tag.encode())
        self.eos = len(self.tokens)
        self.tokens += [b"", b""]  # eos and another special token
        self.hidden: frozenset[str] = frozenset()
        if special:
            self.hidden = frozenset(marked)
        size = len(self.tokens)
        ctx = GrammarContext(self.tokens, size, (self.eos,))
        self.plugin = LLGuidance(None, ctx)
        endings = (*ENDS, *texts[len(WORDS) :])
        self._ends = [self.tokens.index(text.encode()) for text in endings]
        self._ends += self.ids.values()
        self._by_id = {token: self.marks[tag] for tag, token in self.ids.items()}

    def context(self, functions: Any, **more: Any) -> ReplyContext:
        """Return the context of a request whose reply is constrained by a grammar, for calls of ``functions``."""
        return ReplyContext(functions, marks=self.marks, hidden=self.hidden, strict=True, **more)

    def compiled(self, source: str) -> Compiled:
        """Compile the source of a reply grammar."""
        return self.plugin.compile(GrammarSource("reply", source))

    def walk(self, compiled: Compiled, rng: random.Random, most: int = 300, end: float = 0.3) -> str | None:
        """Return the text of a random reply with marks for its tags, or None if it is longer than ``most`` tokens.

        ``end`` is the probability to end the reply at a position where it may end; it grows with the length.
        """
        matcher = self.plugin.start(compiled)
        words = -(-len(self.tokens) // 32)
        mask = np.empty((1, words), np.int32)
        ids: list[int] = []
        for number in range(most):
            failed = self.plugin.fill([matcher], mask, [0])
            assert not failed, (failed, self.text(ids))
            octets = mask.view(np.uint8)
            bits = np.unpackbits(octets, bitorder="little")
            bits = bits[: len(self.tokens)]
            share = number / most
            token = self._choose(bits, rng, number, end + share)
            found = self.plugin.accept([matcher], [[token]])
            assert found == [1], (self.text(ids), self.tokens[token])
            if token == self.eos:
                return self.text(ids)
            ids.append(token)
        return None

    def _choose(self, bits: np.ndarray, rng: random.Random, number: int, end: float) -> int:
        """Return a random allowed token; closing tokens become more likely the longer the reply is.

        ``bits`` has a 1 for each allowed token, and ``number`` is the number of earlier tokens.
        """
        if bits[self.eos] and rng.random() < end:
            return self.eos
        ends = [token for token in self._ends if bits[token]]
        hurry = 0.3 + number / 100
        if ends and rng.random() < hurry:
            return rng.choice(ends)
        words = [token for token in range(256, self.eos) if bits[token]]
        if words and rng.random() < 0.5:
            return rng.choice(words)
        allowed = np.flatnonzero(bits)
        assert len(allowed)
        return int(rng.choice(allowed))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, with a mark character in place of each tag token."""
        parts: list[str] = []
        run = b""
        for token in ids:
            mark = self._by_id.get(token)
            if mark is None:
                run += self.tokens[token]
                continue
            parts += [run.decode(errors="replace"), mark]
            run = b""
        return "".join([*parts, run.decode(errors="replace")])
