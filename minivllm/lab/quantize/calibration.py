"""Convert a file of text to the token ids that a model is calibrated with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm import files
from minivllm.errors import ModelError, shown

AT_ONCE = 1 << 18  # number of characters that are tokenized in one call
EXPECTED = 'expected {"text": "..."}, {"messages": [...]} or {"ids": [...]}'


def read_samples(path: str, folder: Path, vocabulary: int, samples: int, length: int) -> tuple[Tensor, str]:
    """Return the first tokens of a file, i64 [samples, length], and their SHA-256.

    A text is tokenized by the tokenizer of the model directory ``folder``; ``vocabulary`` is the model's number of
    tokens.  Raise ModelError for a file with too few tokens, a line in no known form, or a token outside the
    vocabulary.
    """
    wanted = samples * length
    ids: list[int] = []
    for document in _documents(path, folder):
        ids += document
        if len(ids) >= wanted:
            break
    if not ids:
        raise ModelError(f"{path}: no text to calibrate with; expected at least {wanted} tokens")
    if len(ids) < wanted:
        hint = f", or --samples 1 --length {len(ids)}" if len(ids) >= samples else ""
        if len(ids) >= length:
            hint = f", or --samples {len(ids) // length}"
        needed = f"{wanted} for {samples} samples of {length}"
        raise ModelError(f"{path}: {len(ids)} tokens, expected {needed}; use a longer text{hint}")
    tokens = torch.tensor(ids[:wanted], dtype=torch.int64).view(samples, length)
    for token in (int(tokens.max()), int(tokens.min())):
        if not 0 <= token < vocabulary:
            raise ModelError(f"{path}: token {token} is not in the model's vocabulary, expected 0 to {vocabulary - 1}")
    return tokens, hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def _documents(path: str, folder: Path) -> Iterator[Sequence[int]]:
    """Yield the token ids of each part of a file: some lines of a text, or one line of JSON."""

    @cache  # a file of token ids needs no tokenizer
    def tokenizer() -> Any:
        from minivllm.runtime.text.tokenizer import load_tokenizer

        return load_tokenizer(folder)

    if not path.endswith((".jsonl", ".json")):
        first = True
        for text in _pieces(path):
            yield tokenizer().encode(text, add_special_tokens=first)
            first = False
        return
    for number, line in enumerate(files.read_lines(path, error=ModelError), 1):
        if line.strip():
            value = files.parse_json(line, path, ModelError, number)
            yield _tokens_of(value, f"{path}:{number}", tokenizer)


def _pieces(path: str) -> Iterator[str]:
    """Yield a text file in pieces of whole lines, each of about ``AT_ONCE`` characters."""
    lines: list[str] = []
    size = 0
    for line in files.read_lines(path, error=ModelError):
        lines.append(line)
        size += len(line)
        if size >= AT_ONCE:
            yield "".join(lines)
            lines = []
            size = 0
    rest = "".join(lines)
    if rest.strip():
        yield rest


def _tokens_of(value: Any, where: str, tokenizer: Any) -> Sequence[int]:
    """Return the token ids of a JSON line at ``where``; ``tokenizer()`` loads the tokenizer.  Raise ModelError."""
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {shown(value)}: {EXPECTED}")
    ids = value.get("ids")
    if isinstance(ids, list) and all(type(token) is int and abs(token) < 1 << 31 for token in ids):
        return ids
    text = value.get("text")
    if isinstance(text, str):
        return tokenizer().encode(text)
    messages = value.get("messages")
    if isinstance(messages, list) and messages:
        try:
            return tokenizer().apply_chat_template(messages, add_generation_prompt=False)
        except (TypeError, ValueError) as e:
            raise ModelError(f"{where}: messages={shown(messages)}: {e}") from None
    raise ModelError(f"{where}: {shown(value)}: {EXPECTED}")
