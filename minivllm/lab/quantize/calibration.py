"""A file of text to the token ids that a model is calibrated with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm import files
from minivllm.errors import ModelError, shown

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer

AT_ONCE = 1 << 18  # characters that are made tokens together
WANT = 'want {"text": "..."}, {"messages": [...]} or {"ids": [...]}'


def read_samples(path: str, folder: Path, vocabulary: int, samples: int, length: int) -> tuple[Tensor, str]:
    """(i64 [samples, length], a checksum of them): the first tokens of the file, cut into samples.  Text is made tokens
    by the tokenizer of ``folder``.  ModelError if the file has too few, or what is no text of this model."""
    ids: list[int] = []
    for document in _documents(path, folder):
        ids += document
        if len(ids) >= samples * length:
            break
    if not ids:
        raise ModelError(f"{path}: no text to calibrate with; want at least {samples * length} tokens")
    if len(ids) < samples * length:
        fits = len(ids) // samples
        smaller = f"--samples {len(ids) // length}" if len(ids) >= length else f"--samples 1 --length {len(ids)}"
        smaller = smaller if fits or len(ids) >= length else "a longer one"
        raise ModelError(
            f"{path}: {len(ids)} tokens, want {samples * length} for {samples} samples of {length}: a longer text, or "
            f"{smaller}"
        )
    made = torch.tensor(ids[: samples * length], dtype=torch.int64).view(samples, length)
    if int(made.max()) >= vocabulary or int(made.min()) < 0:
        wrong = int(made.max() if int(made.max()) >= vocabulary else made.min())
        raise ModelError(f"{path}: token {wrong} is none of this model, which has 0 to {vocabulary - 1}")
    return made, hashlib.sha256(made.numpy().tobytes()).hexdigest()


def _documents(path: str, folder: Path) -> Iterator[Sequence[int]]:
    """The tokens of one part of the file after another."""
    made: list[Tokenizer] = []

    def tokenizer() -> Tokenizer:
        if not made:
            from minivllm.runtime.text.tokenizer import load_tokenizer

            made.append(load_tokenizer(folder))
        return made[0]

    if not path.endswith((".jsonl", ".json")):
        first = True
        for text in _pieces(path):
            yield tokenizer().encode(text, add_special_tokens=first)
            first = False
        return
    for number, line in enumerate(files.read_lines(path, error=ModelError), 1):
        if line.strip():
            yield _tokens_of(files.parse_json(line, path, ModelError, number), f"{path}:{number}", tokenizer)


def _pieces(path: str) -> Iterator[str]:
    """The text, some lines at a time."""
    lines: list[str] = []
    size = 0
    for line in files.read_lines(path, error=ModelError):
        lines.append(line)
        size += len(line)
        if size >= AT_ONCE:
            yield "".join(lines)
            lines, size = [], 0
    if "".join(lines).strip():
        yield "".join(lines)


def _tokens_of(value: Any, where: str, tokenizer: Any) -> Sequence[int]:
    if not isinstance(value, dict):
        raise ModelError(f"{where}: {shown(value)}: {WANT}")
    ids, text, messages = value.get("ids"), value.get("text"), value.get("messages")
    if isinstance(ids, list) and all(type(one) is int and abs(one) < 1 << 31 for one in ids):
        return ids
    if isinstance(text, str):
        return tokenizer().encode(text)
    if isinstance(messages, list) and messages:
        try:
            return tokenizer().apply_chat_template(messages, add_generation_prompt=False)
        except (TypeError, ValueError) as e:
            raise ModelError(f"{where}: messages={shown(messages)}: {e}") from None
    raise ModelError(f"{where}: {shown(value)}: {WANT}")
