"""The tokenizer in a GGUF file."""

from __future__ import annotations

import logging
from typing import Any

from minivllm.core.interfaces.tokenizer import TokenizerContext
from minivllm.device.loading.gguf_file import read_gguf
from minivllm.runtime.text.chat import DEFAULT
from minivllm.runtime.text.gguf_tokenizer import build, read_vocabulary
from minivllm.runtime.text.growth import check_growth
from minivllm.runtime.text.library import Delegated, LibraryTokenizer
from minivllm.runtime.text.tokenizer_files import named_templates

log = logging.getLogger("minivllm")
PREFIX = "tokenizer.chat_template."


class GgufTokenizer(Delegated):
    """The tokenizer that llama.cpp would read from the file."""

    def __init__(self, options: Any, ctx: TokenizerContext) -> None:
        file = read_gguf(ctx.path)
        vocabulary = read_vocabulary(file)
        found = {}
        for key, value in file.values.items():
            if key.startswith(PREFIX):
                found[key.removeprefix(PREFIX)] = value
        own = file.values.get("tokenizer.chat_template")
        if own is not None:
            found[DEFAULT] = own
        self.chat_templates = named_templates(found, ctx.path)
        library = build(vocabulary, log.warning)
        check_growth(ctx.path, library)
        super().__init__(options, ctx, LibraryTokenizer(library), vocabulary.special_tokens)
