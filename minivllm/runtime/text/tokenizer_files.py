"""Read the files of a tokenizer: JSON objects and chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.device.loading.gguf_file import is_gguf
from minivllm.errors import ModelError, shown

from .chat import DEFAULT

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
MORE_TEMPLATES, MOST_TEMPLATES = "additional_chat_templates", 64


def describe_files(path: Path) -> dict[str, str]:
    """Return the facts by which a tokenizer is chosen: ``format``, and ``tokenizer_class`` ("" if no file has it)."""
    if is_gguf(path):
        return {"format": "gguf", "tokenizer_class": ""}
    try:
        name = read_object(path / "tokenizer_config.json").get("tokenizer_class")
    except ModelError:  # the tokenizer that reads the file reports the error
        name = ""
    return {"format": "folder", "tokenizer_class": name if isinstance(name, str) else ""}


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or {} without a file.  ModelError for other content."""
    found = files.read_json(path, files.PART, ModelError) if files.is_there(path) else {}
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(found).__name__}")
    return found


def content_of(token: Any) -> str:
    """Return the text of a token, which a file has as text or as an object.  TypeError for another value."""
    text = token.get("content", "") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TypeError(f"{shown(token)} is not a token")
    return text


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a model directory by name.

    Files *.jinja take precedence over chat_template.json, and chat_template.json over tokenizer_config.json.  In JSON
    the templates are one text, a list of {"name", "template"}, or a mapping."""
    found = named_templates(config.get("chat_template"), folder)
    found |= named_templates(read_object(folder / "chat_template.json").get("chat_template"), folder)
    more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))[:MOST_TEMPLATES]
    paths = {DEFAULT: folder / "chat_template.jinja", **{path.stem: path for path in more}}
    there = {name: path for name, path in paths.items() if files.is_there(path)}
    named = {name: files.read_text(path, error=ModelError) for name, path in there.items()}
    if not named:
        return found
    return {name: found[name] for name in (DEFAULT,) if name in found} | named


def named_templates(value: Any, where: Path) -> dict[str, str]:
    """Return the chat templates in a value of JSON, by name; a single text has the name ``default``.  ModelError for
    another form."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    if isinstance(value, list) and all(isinstance(one, dict) for one in value):
        value = {one.get("name"): one.get("template") for one in value}
    texts = [text for pair in value.items() for text in pair] if isinstance(value, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        expected = 'a text, or a list of {"name": ..., "template": ...}'
        raise ModelError(f"{where}: chat_template={shown(value)}: expected {expected}")
    return dict(value)
