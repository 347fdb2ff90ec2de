"""XGrammar (https://github.com/mlc-ai/xgrammar), which uses pushdown automata and precomputes most masks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xgrammar

from minivllm.core.interfaces.grammar import Compiled, Grammar, GrammarContext, GrammarSource

from .code_points import tables
from .ecma_regex import whole, write
from .formats import ONE_EACH
from .json_schema import prepare
from .xgrammar_schema import Patterns, unheld

# largest number of whitespace characters between two JSON tokens; without a limit a model may write whitespace for ever
MOST_WHITESPACE = 40
# Characters that the library wrongly allows in strings: control characters (if the length is bounded), and the UTF-8 of
# surrogates, which is ED followed by A0 to BF.
CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
HALF = re.compile(rb"[\xa0-\xbf]")


class _XGrammarMatcher:
    """The state of a row's answer under a grammar.  ``taken`` are the ids of its tokens; the last one may end inside a
    character.
    """

    __slots__ = ("json", "taken", "xg")

    def __init__(self, xg: Any, json: bool, taken: list[int]) -> None:
        self.xg = xg
        self.json = json
        self.taken = taken


class XGrammar(Grammar):
    """Grammars compiled and matched by XGrammar."""

    def __init__(self, options: Any, ctx: GrammarContext) -> None:
        super().__init__(options, ctx)
        tokens = list(ctx.tokens)
        vocabulary = xgrammar.TokenizerInfo(tokens, vocab_size=ctx.vocab_size, stop_token_ids=list(ctx.eos_ids))
        threads = getattr(options, "threads", 0) or ctx.threads
        tables()
        self._compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=threads, cache_enabled=False)
        self._batch = xgrammar.BatchGrammarMatcher(threads)
        self._anywhere = self._without(SURROGATE.search)
        self._in_json = self._anywhere & self._without(CONTROL.search)
        self._after_ed = self._without(HALF.match)

    def _without(self, found: Callable[[bytes], Any]) -> np.ndarray:
        """Return a bit mask of the tokens whose bytes do not match the pattern ``found``."""
        words = -(-self.ctx.vocab_size // 32)
        tokens = self.ctx.tokens
        bits = np.ones(words * 32, bool)
        bits[: len(tokens)] = [found(token) is None for token in tokens]
        return np.packbits(bits, bitorder="little").view("<i4")

    def compile(self, source: GrammarSource) -> Compiled:
        try:
            made = self._compile(source)
        except ValueError:
            raise
        except RuntimeError as e:  # errors of the library
            message = " ".join(str(e).split())
            raise ValueError(message[:300]) from None
        return Compiled((made, source.kind == "json"), made.memory_size_bytes)

    def _compile(self, source: GrammarSource) -> Any:
        text = source.text
        compiler = self._compiler
        if source.kind == "json":
            if source.whitespace is not None:
                raise ValueError("whitespace_pattern: xgrammar has none; leave it out, or choose grammar=llguidance")
            patterns = Patterns()
            schema = prepare(json.loads(text), patterns.name, ONE_EACH)
            if missing := list(dict.fromkeys(unheld(schema))):
                raise ValueError(f"xgrammar cannot restrict answers by {', '.join(missing)}; choose grammar=llguidance")
            spaces: dict[str, Any] = {"separators": (",", ":"), "max_whitespace_cnt": None}
            if source.any_whitespace:
                spaces = {"separators": None, "max_whitespace_cnt": MOST_WHITESPACE}
            made = xgrammar.Grammar.from_json_schema(
                json.dumps(schema), any_whitespace=source.any_whitespace, strict_mode=False, **spaces
            )
            return compiler.compile_grammar(patterns.exactly(str(made)))
        if source.kind == "regex":
            return compiler.compile_regex(f"(?:{write(whole(text))})")
        if source.kind == "choice":
            options = [json.dumps(option, ensure_ascii=False) for option in json.loads(text)]
            return compiler.compile_grammar(f"root ::= {' | '.join(options)}\n")
        if "::=" in text:
            return compiler.compile_grammar(text)
        return compiler.compile_lark(text)

    def start(self, compiled: Compiled) -> _XGrammarMatcher:
        made, is_json = compiled.handle
        return _XGrammarMatcher(xgrammar.GrammarMatcher(made), is_json, [])

    def accept(self, matchers: Sequence[Any], tokens: Sequence[Sequence[int]]) -> Sequence[int]:
        return [self._take(m, new) for m, new in zip(matchers, tokens, strict=True)]

    def _take(self, matcher: _XGrammarMatcher, tokens: Sequence[int]) -> int:
        for i, token in enumerate(tokens):
            if not matcher.xg.accept_token(int(token)):
                return i
            matcher.taken.append(token)
        return len(tokens)

    def fill(self, matchers: Sequence[Any], mask: np.ndarray, rows: Sequence[int]) -> Mapping[int, str]:
        failed = {}
        open_matchers = []
        open_rows = []
        for i, (matcher, row) in enumerate(zip(matchers, rows, strict=True)):
            if matcher.xg.is_terminated():
                failed[i] = "its text has ended"
            else:
                open_matchers.append(matcher)
                open_rows.append(row)
        if open_matchers:
            self._batch.batch_fill_next_token_bitmask([m.xg for m in open_matchers], mask, open_rows)
        for matcher, row in zip(open_matchers, open_rows, strict=True):
            mask[row] &= self._in_json if matcher.json else self._anywhere
            if matcher.taken and self.ctx.tokens[matcher.taken[-1]].endswith(b"\xed"):
                mask[row] &= self._after_ed
        return failed
