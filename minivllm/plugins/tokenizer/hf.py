"""The tokenizer of a Hugging Face directory: tokenizer.json, or older files that transformers converts.

The ``tokenizers`` library reads tokenizer.json, so transformers, whose import takes a second, is not needed for it.
This module adds the tokens of tokenizer_config.json, as transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm import files
from minivllm.core.interfaces.tokenizer import TokenizerContext
from minivllm.errors import ModelError, brief, describe_error
from minivllm.runtime.text.class_tokens import class_tokens
from minivllm.runtime.text.converted import convert
from minivllm.runtime.text.growth import check_growth, panics_as
from minivllm.runtime.text.library import Delegated, LibraryTokenizer, SlowTokenizer
from minivllm.runtime.text.tokenizer_files import NAMED, OTHER_FILES, content_of, read_object

READ = ("*.json", "*.model", "*.txt", "*.jinja")  # files that transformers may open
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # properties of an added token


class HfTokenizer(Delegated):
    """The tokenizer that transformers would load.  Code of the directory is never run (``trust_remote_code`` is
    off)."""

    def __init__(self, options: Any, ctx: TokenizerContext) -> None:
        folder = ctx.path
        config = read_object(folder / "tokenizer_config.json")
        named = read_object(folder / "special_tokens_map.json") | config
        file = folder / "tokenizer.json"
        library = _read_library(file) if files.is_there(file) else None
        slow = None
        try:
            special = {name: content_of(named[name]) for name in NAMED if named.get(name)}
            if library is not None:
                _configure(library, named, special)
        except (AttributeError, TypeError, ValueError, OverflowError) as e:
            at = folder / "tokenizer_config.json"
            raise ModelError(f"{at}: malformed added or special tokens ({describe_error(e)}); download it again") from e
        if library is None:
            library, slow, found = _converted(folder)
            special = found | special
        if library is not None:  # truncation and padding in the file are for training
            library.no_truncation()
            library.no_padding()
            check_growth(folder, library)
        inner = LibraryTokenizer(library) if library is not None else SlowTokenizer(slow)
        super().__init__(options, ctx, inner, special)


def _read_library(path: Path) -> Any:
    """Return the ``tokenizers.Tokenizer`` of a tokenizer.json.  Raise ModelError if the library cannot read it."""
    from tokenizers import Tokenizer as Backend

    files.check(path, files.LARGE, ModelError)
    try:
        with panics_as(ValueError):
            return Backend.from_file(str(path))
    except Exception as e:  # the library raises plain Exception
        why = brief(str(e), 300)  # the library quotes values of the file, of any length
        raise ModelError(f"{path}: not a tokenizer that the tokenizers library reads: {why}") from e


def _added(token: Any, special: bool) -> Any:
    """Return the ``tokenizers.AddedToken`` of a token in a file.  ``special`` is the default of the flag."""
    from tokenizers import AddedToken

    if not isinstance(token, dict):
        return AddedToken(content_of(token), special=special)
    flags = {"special": special}
    for name in FLAGS:
        if name in token:
            flags[name] = bool(token[name])
    return AddedToken(content_of(token), **flags)


def _configure(backend: Any, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add the tokens of tokenizer_config.json to those of tokenizer.json, as transformers 5 does.

    add_bos_token and add_eos_token are ignored, because they apply to vocabularies without a tokenizer.json.
    """
    added = backend.get_added_tokens_decoder()
    there = {repr(token) for token in added.values()}
    listed = config.get("added_tokens_decoder") or {}
    tokens = listed.items()
    in_order = sorted(tokens, key=lambda item: int(item[0]))
    listed_tokens = [_added(token, False) for _, token in in_order]
    new = [t for t in listed_tokens if repr(t) not in there]
    backend.add_tokens(new)
    added = backend.get_added_tokens_decoder()
    known = {token.content for token in added.values() if token.special}
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = more.values() if isinstance(more, dict) else more
    named = [config[name] for name in special]
    named += [token for token in class_tokens(config) if backend.token_to_id(token) is not None]
    named += [token for token in extra if token is not None]
    unknown = [token for token in named if content_of(token) not in known]
    special_tokens = [_added(token, True) for token in unknown]
    backend.add_special_tokens(special_tokens)


def _converted(folder: Path) -> tuple[Any, Any, dict[str, str]]:
    """Return the tokenizer that transformers makes from other files.

    The result has a ``tokenizers.Tokenizer`` or None, a slow tokenizer if there is no other, and the special tokens."""
    if not any(files.is_there(folder / name) for name in OTHER_FILES):
        raise ModelError(f"{folder} has no tokenizer: expected tokenizer.json, or set skip_tokenizer_init=True")
    for pattern in READ:
        for path in sorted(folder.glob(pattern)):
            files.check(path, files.LARGE, ModelError)
    found = convert(folder, NAMED)
    if found["backend"] is not None:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(found["backend"])
        special = set(found["special"].values())
        if backend.get_vocab().keys() <= special:
            raise ModelError(f"{folder}: transformers finds no vocabulary in its files; download them again")
        return backend, None, found["special"]
    from transformers import AutoTokenizer

    slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return None, slow, found["special"]
