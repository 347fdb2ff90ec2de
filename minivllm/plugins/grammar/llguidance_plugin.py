"""llguidance (https://github.com/guidance-ai/llguidance): Lark grammars, JSON schemas and regular expressions.

Everything is written as a Lark grammar in which the library forces no tokens: it would else allow one way only to spell
what a grammar leaves no choice in, and ask a tokenizer for it.  So masks are exact: a token is allowed if and only if
its bytes can go on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from minivllm.core.interfaces.grammar import Compiled, Grammar, GrammarContext, GrammarSource

from .code_points import tables
from .ecma_regex import pattern, whole, within, write
from .json_schema import prepare
from .threads import Threads

HEAD = '%llguidance {"no_forcing": true}\n'
MOST_WHITESPACE = 40  # between two tokens of JSON: who may write more of it can write it for ever
JSON_SPACE = ((9, 10), (13, 13), (32, 32))
ESCAPES = 'nrbtf\\"'  # without u: each string is spelled in one way, so that no name is a declared one in disguise
MOST = 300  # characters of a message
NOTHING = "no text that fits begins like this"
QUOTED = re.compile(r"\d+ \|")
ITEMS = 20_000  # of the Earley parser at one place: each option of a ``choice`` is one, each optional property four
# As measured: a small grammar with its lexer, and what a character adds of the source and of the grammar made of it, in
# which a class such as \p{L} is thousands.
BYTES, SOURCE_BYTES, LARK_BYTES = 64 << 10, 64, 8


class _LLGuidanceMatcher:
    """``ended``: an end-of-sequence token was taken, of which the library is not told."""

    __slots__ = ("ended", "ll")

    def __init__(self, ll: Any, ended: bool = False) -> None:
        self.ll, self.ended = ll, ended


class _Vocabulary:
    """The tokens as the library wants them."""

    def __init__(self, ctx: GrammarContext) -> None:
        self.tokens = [*ctx.tokens, *[b""] * (ctx.vocab_size - len(ctx.tokens))]
        self.eos_token_id, self.bos_token_id = ctx.eos_ids[0], None
        self.special_token_ids = list(ctx.eos_ids)

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("no token is forced, so no text has to be cut into tokens")


class LLGuidance(Grammar):
    def __init__(self, options: Any, ctx: GrammarContext) -> None:
        super().__init__(options, ctx)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(ctx)),
            eos_token=list(ctx.eos_ids),
            slices=llguidance.LLTokenizer.json_slices(),
        )
        tables()
        self.threads = Threads(getattr(options, "threads", 0) or ctx.threads, llguidance.LLExecutor)
        self._limits = llguidance.LLParserLimits(max_items_in_row=ITEMS, verbose_errors=False)
        self._eos = frozenset(ctx.eos_ids)

    def compile(self, source: GrammarSource) -> Compiled:
        text = lark(source)
        made = llguidance.LLMatcher(self._tokenizer, HEAD + text, log_level=0, limits=self._limits)
        if made.is_error():
            raise ValueError(_first(made.get_error()))
        return Compiled(made, BYTES + SOURCE_BYTES * len(source.text) + LARK_BYTES * len(text))

    def start(self, compiled: Compiled) -> _LLGuidanceMatcher:
        return _LLGuidanceMatcher(compiled.handle.deep_copy())

    def accept(self, matchers: Sequence[_LLGuidanceMatcher], tokens: Sequence[Sequence[int]]) -> Sequence[int]:
        eos = self._eos
        pairs = [
            (m.ll, new[0])
            for m, new in zip(matchers, tokens, strict=True)
            if len(new) == 1 and new[0] not in eos and not m.ended
        ]
        if len(pairs) == len(matchers):
            return self.threads.run("accept", len(pairs), lambda pool: _consume(pool, pairs))
        return [self._take(m, new) for m, new in zip(matchers, tokens, strict=True)]

    def _take(self, matcher: _LLGuidanceMatcher, tokens: Sequence[int]) -> int:
        for i, token in enumerate(tokens):
            if matcher.ended:
                return i
            if token in self._eos:
                matcher.ended = matcher.ll.is_accepting()
                if not matcher.ended:
                    return i
            elif matcher.ll.try_consume_tokens([token]) != 1:
                return i
        return len(tokens)

    def fill(self, matchers: Sequence[_LLGuidanceMatcher], mask: np.ndarray, rows: Sequence[int]) -> Mapping[int, str]:
        if not matchers:
            return {}
        pairs = [(m.ll, row) for m, row in zip(matchers, rows, strict=True)]
        self.threads.run("fill", len(pairs), lambda pool: _fill(pool, pairs, mask))
        failed = {}
        for i, m in enumerate(matchers):
            if m.ended:
                failed[i] = "its text has ended"
            elif m.ll.is_stopped() and not m.ll.is_accepting():
                failed[i] = _first(m.ll.get_error()) or NOTHING
        return failed


def _consume(pool: Any, pairs: list[tuple[Any, int]]) -> list[int]:
    """1 for each matcher that took its token, else 0; ``pool`` None: on this thread."""
    if pool is None:
        return [int(ll.consume_token(token)) for ll, token in pairs]  # ``try_consume_tokens`` goes over each twice
    return list(map(int, pool.consume_token_par(pairs)))


def _fill(pool: Any, pairs: list[tuple[Any, int]], mask: np.ndarray) -> None:
    stride, at = mask.strides[0], mask.ctypes.data
    if pool is not None:
        pool.unsafe_compute_mask_ptr(pairs, at, stride, len(mask))
        return
    for ll, row in pairs:
        ll.unsafe_compute_mask_ptr(at + row * stride, stride)


def lark(source: GrammarSource) -> str:
    """What was asked for, as a Lark grammar."""
    if source.kind == "json":
        schema = prepare(json.loads(source.text), pattern)
        own: dict[str, Any] = {"json_allowed_escapes": ESCAPES, "whitespace_flexible": False}
        if source.whitespace is not None:
            own["whitespace_pattern"] = _whitespace(source.whitespace)
        elif source.any_whitespace:
            own["whitespace_pattern"] = rf"[\x20\n\r\t]{{1,{MOST_WHITESPACE}}}"
        return "start: %json " + json.dumps({**schema, "x-guidance": own})
    if source.kind == "regex":
        return f"start: /(?:{write(whole(source.text))})/"
    if source.kind == "choice":
        return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(source.text))
    try:
        return any_to_lark(source.text)
    except Exception as e:  # its own errors, and RecursionError
        raise ValueError(f"neither Lark nor GBNF: {type(e).__name__}: {e}"[:MOST]) from None


def _whitespace(asked: str) -> str:
    """What an expression matches of what JSON takes for whitespace."""
    kept = within(whole(asked), JSON_SPACE)
    if kept is None:
        raise ValueError("whitespace_pattern: expected an expression for spaces, tabs and line ends, which JSON allows")
    return write(kept)


def _first(error: str) -> str:
    """What went wrong, without what follows it: the parser's state, or the grammar as it was written for it."""
    if error.startswith("NoExtension"):
        return NOTHING
    lines = [line.strip() for line in error.partition("<state>")[0].split("\n")]
    return " ".join(line for line in lines if line and not QUOTED.match(line))[:MOST]
