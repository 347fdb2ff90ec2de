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
            if any(text[i : i + 1] not in self.ids for i in range(len(text))):
                raise ValueError(f"{text.decode()!r} cannot be spelled with this vocabulary, byte by byte")
        return Compiled(texts, sum(map(len, texts)))

    def start(self, compiled: Compiled) -> list[Any]:
        return [compiled.handle, b""]

    def accept(self, matchers: Sequence[list[Any]], tokens: Sequence[Sequence[int]]) -> Sequence[int]:
        return [self.take(m, new) for m, new in zip(matchers, tokens, strict=True)]

    def take(self, matcher: list[Any], tokens: Sequence[int]) -> int:
        """Append tokens to a matcher, and return how many of them fit."""
        for i, token in enumerate(tokens):
            texts, text = matcher[0], matcher[-1]
            if text is END:
                return i
            if token in self.ctx.eos_ids:
                after = END if text in texts else b""
                fits = text in texts
            else:
                piece = self.ctx.tokens[token] if token < len(self.ctx.tokens) else b""
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
            bits[self.next(matcher[0], matcher[-1])] = True
            mask[row] = np.packbits(bits, bitorder="little").view("<i4")
        return failed

    def next(self, texts: Sequence[bytes], text: bytes) -> list[int]:
        """Return the ids of the tokens that may follow a text."""
        found = list(self.ctx.eos_ids) if text in texts else []
        rests = [t[len(text) :] for t in texts if t.startswith(text)]
        pieces = {rest[:n] for rest in rests for n in range(1, min(len(rest), self.longest) + 1)}
        return found + [i for piece in pieces for i in self.ids.get(piece, ())]
