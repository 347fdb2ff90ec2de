"""Limits on the output of a tokenizer, checked when it is loaded.

A tokenizer.json is a small program from the model's author.  Steps that replace text can make gigabytes from one token,
for example if they twice replace "a" by 100,000 "a".  So the factor by which each chain of steps can lengthen its
input, and the longest token, are computed from the file.  A tokenizer beyond the limits is refused before it is used.
Published tokenizers stay below a factor of 20 and 300 characters.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minivllm.errors import ModelError, shown

MOST_GROWTH = 100  # largest factor by which a chain of steps may lengthen its input
MOST_STEPS = 200  # largest number of steps of a chain
MOST_TOKEN = 2048  # largest number of characters of a token
MOST_AFFIX = 64  # largest number of characters that are added before or after each word
AFFIXES = ("prepend", "prefix", "suffix", "replacement", "continuing_subword_prefix", "end_of_word_suffix")
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
NESTED = ("normalizers", "pretokenizers", "processors", "decoders")


def check_growth(path: Path, backend: Any) -> None:
    """Raise ModelError if a ``tokenizers.Tokenizer`` has a very long token, or can lengthen text too much."""
    longest = max(backend.get_vocab(with_added_tokens=True), key=len, default="")
    if len(longest) > MOST_TOKEN:
        raise ModelError(
            f"{path}: a token of {len(longest)} characters, {shown(longest[:20])}...: expected at most {MOST_TOKEN}"
        )
    for part in PARTS:
        found = getattr(backend, part)
        if found is not None:
            _check_chain(path, part, json.loads(found.__getstate__()))
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        _check_affix(path, "model", {name: getattr(backend.model, name, None)})


def _check_chain(path: Path, part: str, state: Mapping[str, Any]) -> None:
    """Raise ModelError if a chain of steps can lengthen text by more than MOST_GROWTH, or has more than MOST_STEPS
    steps."""
    factor = 1.0
    for steps, step in enumerate(_steps(state), 1):
        factor *= growth_of(step)
        _check_affix(path, part, step)
        if factor > MOST_GROWTH:
            raise ModelError(
                f"{path}: the {part} can turn one character into {factor:.0f} (up to its step {steps}, "
                f"{shown(step.get('type'))}): expected at most {MOST_GROWTH}"
            )
        if steps > MOST_STEPS:
            raise ModelError(f"{path}: the {part} has more than {MOST_STEPS} steps; expected fewer")


def _check_affix(path: Path, part: str, step: Mapping[str, Any]) -> None:
    """Raise ModelError if a step adds too much text to each word."""
    for name in AFFIXES:
        value = step.get(name)
        if isinstance(value, str) and len(value) > MOST_AFFIX:
            raise ModelError(f"{path}: {part}: {name} of {len(value)} characters: expected at most {MOST_AFFIX}")


def _steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a chain in order, including the steps of chains inside it."""
    inner = next((state[name] for name in NESTED if isinstance(state.get(name), list)), None)
    if inner is None:
        yield state
        return
    for step in inner:
        yield from _steps(step)


def growth_of(step: Mapping[str, Any]) -> float:
    """Return the largest number of characters that a step can make from one character.

    Normal forms of Unicode count as 1, because they change nothing when they are applied again."""
    kind = step.get("type")
    if kind == "Replace":
        content, pattern = len(step.get("content", "")), step.get("pattern", {})
        if isinstance(pattern, dict) and isinstance(pattern.get("String"), str) and pattern["String"]:
            return max(1.0, content / len(pattern["String"]))
        return 1.0 + content  # the pattern may match between any two characters
    if kind == "ByteLevel" and "decoders" not in step:
        return 2.0  # a character of two bytes becomes two characters of two bytes each
    if kind == "TemplateProcessing":
        texts = [piece for form in ("single", "pair") for piece in step.get(form, []) if "Sequence" in piece]
        return max(1.0, len(texts) / 3)  # a normal template has one text for a single text and two for a pair
    if kind == "Precompiled":
        return _longest(step.get("precompiled_charsmap", ""))
    return 1.0


def _longest(charsmap: str) -> float:
    """Return the length of the longest replacement in a table of sentencepiece.

    The table has the size of a trie, the trie, and texts that end with a zero byte."""
    raw = base64.b64decode(charsmap)
    texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return float(max((len(text.decode(errors="replace")) for text in texts), default=1))


@contextlib.contextmanager
def panics_as(error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``error(reason)`` for a panic of the tokenizers library, for example a pattern that backtracks too long.

    A panic is not an Exception, so no handler would catch it, and it would end the engine."""
    try:
        yield
    except BaseException as e:
        if type(e).__name__ != "PanicException":
            raise
        raise error(f"the tokenizers library fails: {str(e)[:200]}") from None
