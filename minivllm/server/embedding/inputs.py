"""The texts and token ids in a body for embeddings, checked within the limits of the server."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from minivllm.server.errors import ApiError
from minivllm.server.openai.tokens import Ids

Input = str | Ids


def read_inputs(value: Any, name: str, most: int, vocab: int) -> list[Input]:
    """Return the texts and token ids of a field, at most ``most``.

    The field has a text, token ids below ``vocab``, or a list of either.  Long lists of ids arrive as arrays.  ApiError
    (400) names the wrong element."""
    if isinstance(value, (str, np.ndarray)) or _are_ids(value):
        _check(value, name, name, vocab)
        return [value]
    if not isinstance(value, list):
        _refuse(name, name, "text, token ids, or a list of either")
    check_count(value, name, most)
    for number, part in enumerate(value):
        _check(part, f"{name}[{number}]", name, vocab)
    return value


def read_documents(value: Any, name: str, most: int) -> list[str]:
    """Return the texts of a list of documents, each a text or an object with a text.  ApiError (400) names the wrong
    element."""
    if not isinstance(value, list):
        _refuse(name, name, 'a list of texts, or of objects {"text": ...}')
    check_count(value, name, most)
    texts = []
    for number, document in enumerate(value):
        at = f"{name}[{number}]"
        text = read_text(document, at, name)
        texts.append(text)
    return texts


def read_text(value: Any, at: str, name: str) -> str:
    """Return a text, which may be in an object with the key ``text``.  ApiError (400) for anything else."""
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        _refuse(at, name, 'text that is not empty, or an object {"text": ...}')
    return text


def check_count(inputs: list[Any], name: str, most: int) -> None:
    """Raise ApiError (400) for an empty list, or one of more than ``most`` elements."""
    if not inputs:
        raise ApiError(400, f"{name}: the list is empty; expected at least one text", name)
    if len(inputs) > most:
        text = f"{name}: {len(inputs)} texts; expected at most {most} in a request (max_inputs)"
        raise ApiError(400, text, name)


def _check(part: Any, at: str, name: str, vocab: int) -> None:
    """Raise ApiError (400) unless a part of a field is a text or a list of token ids."""
    if isinstance(part, (str, list, np.ndarray)) and not len(part):
        raise ApiError(400, f"{at}: empty; expected at least one token", name)
    if isinstance(part, str):
        return
    if isinstance(part, np.ndarray):
        low, high = int(part.min()), int(part.max())
    elif _are_ids(part):
        low, high = min(part), max(part)
    else:
        _refuse(at, name, "text or a list of token ids")
    if low < 0 or high >= vocab:
        bad = str(low if low < 0 else high)[:24]
        text = f"{at}: token id {bad} is out of range; expected 0 to {vocab - 1}"
        raise ApiError(400, text, name)


def _are_ids(value: Any) -> bool:
    """Return whether a value is a list of whole numbers with at least one element."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int for token in value)


def _refuse(at: str, name: str, expected: str) -> NoReturn:
    """Raise the error about a value of a wrong type."""
    raise ApiError(400, f"{at}: expected {expected}", name)
