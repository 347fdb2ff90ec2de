"""llguidance (https://github.com/guidance-ai/llguidance): Lark grammars, JSON schemas and regular expressions.

Every source becomes a Lark grammar in which the library forces no tokens.  Otherwise the library would allow a single
spelling of a text that the grammar determines, and would need a tokenizer for it.  So masks are exact: a token is
allowed if and only if its bytes can continue the text.
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
from .ecma_regex import pattern, search, whole, within, write
from .formats import ANNOTATIONS, FORMATS, unknown_format
from .json_schema import prepare
from .threads import Threads

HEAD = '%llguidance {"no_forcing": true}\n'
# largest number of whitespace characters between two tokens of JSON, because a model may write whitespace without end
MOST_WHITESPACE = 40
JSON_SPACE = ((9, 10), (13, 13), (32, 32))
# The allowed escapes, without \u, so that a string has only one spelling, and a name cannot be another spelling of a
# declared name.
ESCAPES = 'nrbtf\\"'
SPACED = {  # options of the library for JSON in calls of functions, with or without a space after commas and colons
    "json_allowed_escapes": ESCAPES, "whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?",
}  # fmt: skip
# advice of the library about an option that requests cannot set
ADVICE = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
MOST = 300  # largest number of characters of an error message
NOTHING = "no text that fits begins like this"
QUOTED = re.compile(r"\d+ \||\^+$")  # a line that quotes the grammar or points into it
POSITION = re.compile(r"at (\d+)\((\d+)\): ")  # line and column of an error, in the grammar that the library reads
# largest number of items of the Earley parser at one position; each option of a ``choice`` is one item, and each
# optional property four
ITEMS = 20_000
# Measured memory in bytes: of a small grammar with its lexer, per character of the source, and per character of the
# Lark grammar, in which a class such as \p{L} has thousands of characters.
BYTES, SOURCE_BYTES, LARK_BYTES = 64 << 10, 64, 8


class _LLGuidanceMatcher:
    """The state of one text under a grammar.

    ``ended`` means that an end-of-sequence token was accepted, which is not passed to the library.  ``names_tokens``
    means that the grammar names tokens by their ids.
    """

    __slots__ = ("ended", "ll", "names_tokens")

    def __init__(self, ll: Any, names_tokens: bool = False) -> None:
        self.ll, self.names_tokens = ll, names_tokens
        self.ended = False


class _Vocabulary:
    """The tokens of the model for ``llguidance.TokenizerWrapper``, which reads the attributes of this class."""

    def __init__(self, ctx: GrammarContext) -> None:
        unnamed = ctx.vocab_size - len(ctx.tokens)
        self.tokens = [*ctx.tokens, *[b""] * unnamed]
        self.eos_token_id = ctx.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = list(ctx.eos_ids)

    def __call__(self, text: bytes) -> list[int]:
        # the library calls this function to tokenize forced text, which HEAD disables
        raise NotImplementedError("no token is forced, so no text has to be cut into tokens")


class LLGuidance(Grammar):
    """Grammars compiled and matched by llguidance."""

    def __init__(self, options: Any, ctx: GrammarContext) -> None:
        super().__init__(options, ctx)
        vocabulary = llguidance.TokenizerWrapper(_Vocabulary(ctx))
        slices = llguidance.LLTokenizer.json_slices()
        self._tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=list(ctx.eos_ids), slices=slices)
        tables()
        threads = getattr(options, "threads", 0) or ctx.threads
        self.threads = Threads(threads, llguidance.LLExecutor)
        self._limits = llguidance.LLParserLimits(max_items_in_row=ITEMS, verbose_errors=False)
        self._eos = frozenset(ctx.eos_ids)

    def compile(self, source: GrammarSource) -> Compiled:
        text = reply(source, self.ctx.eos_ids) if source.kind == "reply" else lark(source)
        made = llguidance.LLMatcher(self._tokenizer, HEAD + text, log_level=0, limits=self._limits)
        if made.is_error():
            raise ValueError(_first(made.get_error(), text == source.text))
        handle = made, source.kind == "reply"
        size = BYTES + SOURCE_BYTES * len(source.text) + LARK_BYTES * len(text)
        return Compiled(handle, size)

    def start(self, compiled: Compiled) -> _LLGuidanceMatcher:
        made, names_tokens = compiled.handle
        return _LLGuidanceMatcher(made.deep_copy(), names_tokens)

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
            if m.names_tokens and not m.ll.is_accepting():
                self._forbid_end(mask[rows[i]])
            if m.ended:
                failed[i] = "its text has ended"
            elif m.ll.is_stopped() and not m.ll.is_accepting():
                failed[i] = _first(m.ll.get_error()) or NOTHING
        return failed

    def _forbid_end(self, row: np.ndarray) -> None:
        """Clear the end-of-sequence ids in a mask row i32, because the library allows them wherever it allows a
        token by id."""
        words = row.view(np.uint32)
        for token in self._eos:
            words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)


def _consume(pool: Any, pairs: list[tuple[Any, int]]) -> list[int]:
    """Return 1 for each matcher that accepts its token, else 0.  ``pool`` None means that this thread does the work."""
    if pool is None:
        # one call per token, because ``try_consume_tokens`` processes each token twice
        return [int(ll.consume_token(token)) for ll, token in pairs]
    return list(map(int, pool.consume_token_par(pairs)))


def _fill(pool: Any, pairs: list[tuple[Any, int]], mask: np.ndarray) -> None:
    stride, at = mask.strides[0], mask.ctypes.data
    if pool is not None:
        pool.unsafe_compute_mask_ptr(pairs, at, stride, len(mask))
        return
    for ll, row in pairs:
        ll.unsafe_compute_mask_ptr(at + row * stride, stride)


def lark(source: GrammarSource) -> str:
    """Return a source as a Lark grammar.  ValueError for a text that is no grammar of its kind."""
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
    except Exception as e:  # errors of the library, and RecursionError
        raise ValueError(f"neither Lark nor GBNF: {type(e).__name__}: {e}"[:MOST]) from None


def reply(source: GrammarSource, eos_ids: Sequence[int]) -> str:
    """Return the complete grammar of an answer with calls from the source that ``runtime.replies.grammar_rules`` has
    written.

    The schemas, the string patterns, and the rules for any other token are added to the source.
    """
    parts = json.loads(source.text)
    lines = [parts["lark"]]
    for name, schema in parts["schemas"].items():
        made = prepare(schema, pattern)
        lines.append(f"{name}: %json " + json.dumps({**made, "x-guidance": SPACED}))
    for name, (kind, text) in parts["patterns"].items():
        lines.append(f"{name}: {_string(kind, text)}")
    for name, ids in parts["free"].items():
        excluded = ",".join(map(str, sorted({*ids, *eos_ids})))
        lines.append(f"{name}: <[^{excluded}]>")
    return "\n".join(lines)


def _string(kind: str, text: str) -> str:
    """Return the expression of a ``pattern`` or a ``format`` of JSON Schema, for a string without quotes."""
    if kind == "pattern":
        return f"/(?:{write(search(text))})/"
    if text in ANNOTATIONS:
        return "ANY"
    if text not in FORMATS:
        raise unknown_format(text)
    return " & ".join(f"/(?:{write(whole(expression))})/" for expression in FORMATS[text])


def _whitespace(pattern: str) -> str:
    """Return an expression for the JSON whitespace that the expression ``pattern`` matches.  ValueError if none."""
    kept = within(whole(pattern), JSON_SPACE)
    if kept is None:
        raise ValueError("whitespace_pattern: expected an expression for spaces, tabs and line ends, which JSON allows")
    return write(kept)


def _first(error: str, as_given: bool = False) -> str:
    """Return the first part of an error, without the parser's state and the lines of the grammar.

    ``as_given`` means that the library read the source of the request behind ``HEAD``, so that the position of the
    error is a position in it.  Positions in another grammar are removed.
    """
    if error.startswith("NoExtension"):
        return NOTHING
    lines = [line.strip() for line in error.partition("<state>")[0].split("\n")]
    text = " ".join(line for line in lines if line and not QUOTED.match(line))
    text = text.replace(ADVICE, "Use anyOf")
    if position := POSITION.match(text):
        text = text[position.end() :]
        if as_given:
            line = int(position[1]) - HEAD.count("\n")
            text = f"line {line}, column {position[2]}: {text}"
    return text[:MOST]
