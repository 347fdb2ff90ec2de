"""Sampling defaults and end-of-sequence ids of generation_config.json, as in vLLM (option ``generation_config``).

Six fields become defaults of requests.  ``do_sample`` is not read, because the temperature alone makes a request
greedy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.device.loading.gguf_file import is_gguf
from minivllm.errors import ConfigError, ModelError, RequestError, shown

NAME = "generation_config.json"
NONE = ("none", "vllm")  # option values by which no file is read; "vllm" is the spelling of vLLM
APPLIED = {  # field of generation_config.json -> sampling parameter
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
ELSEWHERE = {  # fields of generation_config.json that other code reads, or that have no effect
    "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version", "use_cache", "cache_implementation",
}  # fmt: skip


@dataclass(frozen=True)
class GenerationDefaults:
    """The sampling defaults of a model: ``values`` by the name of the parameter, the ``path`` of their file, and the
    names ``left`` of its fields without effect."""

    values: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    left: tuple[str, ...] = ()

    def in_words(self) -> str:
        """Return the defaults as the text that the command ``explain`` prints; "" without defaults."""
        if not self.values and not self.left:
            return ""
        given = ", ".join(f"{name}={value}" for name, value in self.values.items()) or "no defaults"
        return f"{given} ({self.path}{'; without effect: ' + ', '.join(self.left) if self.left else ''})"


def generation_file(option: str, folder: Path) -> Path | None:
    """Return the file that the option selects for a model in ``folder``, None if there is none.

    ConfigError for a path without such a file.
    """
    if option in NONE or (option == "auto" and is_gguf(folder)):
        return None
    if option == "auto":
        return path if files.is_there(path := folder / NAME) else None
    path = files.expanded(option)
    path = path / NAME if os.path.isdir(path) else path
    if not files.is_there(path):
        raise ConfigError(
            f"generation_config={shown(option)}: no such file as {path}; expected auto (the model's), none, or the "
            f"path of a {NAME} or its folder"
        )
    return path


def read_generation(option: str, folder: Path) -> GenerationDefaults:
    """Return the defaults of a model in ``folder``.

    ConfigError as in ``generation_file``.  ModelError for a file that is no JSON object, or has a value that requests
    may not have.
    """
    from minivllm.core.interfaces.params import SamplingParams

    path = generation_file(option, folder)
    if path is None:
        return GenerationDefaults()
    found = files.read_json(path, files.PART, ModelError)
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, found a {type(found).__name__}")
    values: dict[str, Any] = {}
    for key, name in APPLIED.items():
        if (value := found.get(key)) is None:
            continue
        try:
            if isinstance(value, float) and not math.isfinite(value):
                raise RequestError(f"{name}={value}: expected a finite number", name)
            SamplingParams.make(**{name: value})
        except RequestError as exc:
            message = f"{key}{str(exc).removeprefix(name)}"
            raise ModelError(f"{path}: {message}; set another value, or generation_config=none") from exc
        values[name] = value
    known = {*APPLIED, *ELSEWHERE}
    left = tuple(
        f"{name}={shown(value)}"
        for name, value in found.items()
        if name not in known and name[:1] != "_" and value is not None and (name, value) != ("do_sample", True)
    )
    return GenerationDefaults(values, path, left)
