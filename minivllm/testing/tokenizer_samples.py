"""Write small tokenizer files, with which the kit tests the built-in tokenizers."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest

POCKET = Path(__file__).parents[1] / "pocket" / "model"
WORDS = ("th", "the", " t", " th", " the", "in", "er", " a", "an", " an", "and", " and", "é", "日", "\n\n", "  ")
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>")
PATTERN = r"\p{L}+| ?[^\s\p{L}]+|\s+(?!\S)|\s"


@cache
def temporary() -> tempfile.TemporaryDirectory[str]:
    """Return the temporary directory of all samples, which is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="minivllm-tokenizers-")


@cache
def directory() -> Path:
    """Return a directory with the tokenizer.json of pocket (the packaged tiny model), and a tekken.json."""
    folder = Path(temporary().name) / "folder"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(POCKET / name, folder / name)
    spelled = [bytes([i]) for i in range(256)]
    spelled += [word.encode() for word in WORDS if len(word.encode()) > 1]
    vocab = []
    for rank, token in enumerate(spelled):
        vocab.append({"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None})
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    size = len(vocab) + len(special)
    config = {"pattern": PATTERN, "num_vocab_tokens": len(vocab), "default_vocab_size": size, "version": "v11"}
    config["default_num_special_tokens"] = len(special)
    tekken = {"config": config, "vocab": vocab, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(tekken))
    return folder


@cache
def gguf_file() -> Path:
    """Return a GGUF file with the vocabulary of pocket (the packaged tiny model).

    Skip the test without the package gguf.
    """
    gguf = pytest.importorskip("gguf")
    data = json.loads((POCKET / "tokenizer.json").read_text())
    tokens: dict[str, int] = data["model"]["vocab"]
    added = {token["content"]: token["id"] for token in data["added_tokens"]}
    names = {i: token for token, i in (tokens | added).items()}
    control = {token["id"] for token in data["added_tokens"] if token["special"]}
    kinds = []
    for i in range(len(names)):
        kinds.append(gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL)
    merges = []
    for m in data["model"]["merges"]:
        merges.append(m if isinstance(m, str) else " ".join(m))
    path = Path(temporary().name) / "sample.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names[i] for i in range(len(names))])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(min(control))
    writer.add_eos_token_id(min(control))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
