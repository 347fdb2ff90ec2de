"""Restrict the output to one of several texts.

A matcher is a list of the accepted text after each token, so that tokens can be removed from its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from minivllm.plugin import Compiled, Grammar, GrammarContext, GrammarSource

END = None  # in place of a text, after the end of the sequence


class MyPlugin(Grammar):
    def __init__(self, options: Any, ctx: GrammarContext) -> None:
        super().__init__(options, ctx)
        self.ids: dict[bytes, list[int]] = {}  # bytes -> tokens, as several may have the same bytes
        for i, token in enumerate(ctx.tokens):
            if token:
                self.ids.setdefault(token, []).append(i)
        self.longest = max(map(len, self.ids))

    def compile(self, source: GrammarSource) -> Compiled:
        if source.kind != "choice":
            raise ValueError(f"my-plugin compiles lists of texts, not {source.kind}")
        texts = tuple(text.encode() for text in json.loads(source.text))
        for text in texts:
            letters = [text[i : i + 1] for i in range(len(text))]
            if any(letter not in self.ids for letter in letters):
                raise ValueError(f"{text.decode()!r} cannot be spelled with this vocabulary, byte by byte")
        return Compiled(texts, sum(map(len, texts)))

    def start(self, compiled: Compiled) -> list[Any]:
        return [compiled.handle, b""]

    def accept(self, matchers: Sequence[list[Any]], tokens: Sequence[Sequence[int]]) -> Sequence[int]:
        return [self.take(m, new) for m, new in zip(matchers, tokens, strict=True)]

    def take(self, matcher: list[Any], tokens: Sequence[int]) -> int:
        """Append tokens to a matcher, and return how many of them fit."""
        for i, token in enumerate(tokens):
            texts = matcher[0]
            text = matcher[-1]
            if text is END:
                return i
            if token in self.ctx.eos_ids:
                after = END if text in texts else b""
                fits = text in texts
            else:
                if token < len(self.ctx.tokens):
                    piece = self.ctx.tokens[token]
                else:
                    piece = b""
                after = text + piece
                fits = bool(piece) and any(t.startswith(after) for t in texts)
            if not fits:
                return i
            matcher.append(after)
        return len(tokens)

    def fill(self, matchers: Sequence[list[Any]], mask: np.ndarray, rows: Sequence[int]) -> Mapping[int, str]:
        failed = {}
        for i, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            if matcher[-1] is END:
                failed[i] = "its text has ended"
                continue
            bits = np.zeros(mask.shape[1] * 32, bool)
            allowed = self.next(matcher[0], matcher[-1])
            bits[allowed] = True
            mask[row] = np.packbits(bits, bitorder="little").view("<i4")
        return failed

    def next(self, texts: Sequence[bytes], text: bytes) -> list[int]:
        """Return the ids of the tokens that may follow a text."""
        if text in texts:
            found = list(self.ctx.eos_ids)
        else:
            found = []
        rests = [t[len(text) :] for t in texts if t.startswith(text)]
        pieces = set()
        for rest in rests:
            longest = min(len(rest), self.longest)
            pieces |= {rest[:n] for n in range(1, longest + 1)}
        for piece in pieces:
            found += self.ids.get(piece, ())
        return found
