"""A tokenizer with a token for each byte.  Read the files of your tokenizer in the constructor, from ``ctx.path``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from minivllm.plugin import TokenizerBackend, TokenizerContext

SPECIAL = {"<s>": 256, "</s>": 257}
SPELLED = re.compile("|".join(map(re.escape, SPECIAL)))


class MyPlugin(TokenizerBackend):
    """A tokenizer of bytes.  It changes nothing after its constructor, so any thread may call it."""

    bytewise = True
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}

    def __init__(self, options: Any, ctx: TokenizerContext) -> None:
        super().__init__(options, ctx)
        self.bytes = [bytes([i]) for i in range(256)]
        self.bytes += [text.encode() for text in SPECIAL]
        self.spellings = [f"<0x{i:02X}>" for i in range(256)]
        self.spellings += SPECIAL
        self.ids = {text: i for i, text in enumerate(self.spellings)}

    @property
    def vocab_size(self) -> int:
        return len(self.bytes)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(SPECIAL.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = [SPECIAL["<s>"]] if add_special_tokens else []
        end = 0
        for match in SPELLED.finditer(text):
            ids += self.encode_plain(text[end : match.start()])
            ids.append(SPECIAL[match[0]])
            end = match.end()
        return ids + self.encode_plain(text[end:])

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        skipped = self.special_ids if skip_special_tokens else ()
        pieces = [self.token_bytes(i) for i in ids if i not in skipped]
        return b"".join(pieces).decode("utf-8", "replace")

    def token(self, token_id: int) -> str | None:
        if 0 <= token_id < len(self.spellings):
            return self.spellings[token_id]
        return None

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token)

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < len(self.bytes):
            return self.bytes[token_id]
        return b""
