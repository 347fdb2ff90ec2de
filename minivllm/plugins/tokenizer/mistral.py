"""The tokenizer in a tekken.json, which mistral-common reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from minivllm import files
from minivllm.core.interfaces.tokenizer import TokenizerBackend, TokenizerContext
from minivllm.errors import ModelError, describe_error
from minivllm.runtime.text.alphabet import ALPHABET
from minivllm.runtime.text.literal import Spellings

CHARACTERS = {byte: char for char, byte in ALPHABET.items()}
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class MistralTokenizer(TokenizerBackend):
    """The tokenizer of a tekken.json.

    Ordinary tokens are spelled with the characters of byte-level BPE ("Ġthe"), so that each has its own spelling.
    """

    bytewise = True

    def __init__(self, options: Any, ctx: TokenizerContext) -> None:
        super().__init__(options, ctx)
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        file = ctx.path / "tekken.json"
        if not files.is_there(file):
            raise ModelError(f"{ctx.path} has no tekken.json: use tokenizer_mode=auto, or a directory with this file")
        files.check(file, files.LARGE, ModelError)
        try:
            self._tekken = Tekkenizer.from_file(file)
        except Exception as e:  # the library raises AssertionError, KeyError, ValueError
            raise ModelError(f"{file}: mistral-common cannot read it: {describe_error(e)}; download it again") from e
        self._keep: Any = SpecialTokenPolicy.KEEP
        self._special = self._tekken.num_special_tokens
        texts = {i: self._tekken.id_to_piece(i) for i in range(self._special)}
        self._ids = {text: i for i, text in texts.items()}
        self._spellings = Spellings(self._ids)
        self.special_tokens = {role: text for role, text in ROLES.items() if text in self._ids}
        self._first = [self._ids["<s>"]] if "<s>" in self._ids else []

    @property
    def vocab_size(self) -> int:
        return self._tekken.n_words

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(range(self._special))

    @property
    def added_tokens(self) -> Mapping[str, int]:
        return self._ids

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = list(self._first) if add_special_tokens else []
        for n, piece in enumerate(self._spellings.split(text)):
            if n % 2:
                ids.append(self._ids[piece])
            elif piece:
                ids += self.encode_plain(piece)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        text.encode()  # the library would replace lone surrogates
        return self._tekken.encode(text, bos=False, eos=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        first = self._special if skip_special_tokens else 0
        spelled = [self.token_bytes(i) for i in ids if i >= first]
        return b"".join(spelled).decode("utf-8", "replace")

    def token(self, token_id: int) -> str | None:
        if not 0 <= token_id < self.vocab_size:
            return None
        spelled = self.token_bytes(token_id)
        if token_id < self._special:
            return spelled.decode()
        characters = [CHARACTERS[byte] for byte in spelled]
        return "".join(characters)

    @cached_property
    def _by_spelling(self) -> dict[str, int]:
        """Return the ids of ordinary tokens by their spellings."""
        return {str(self.token(i)): i for i in range(self._special, self.vocab_size)}

    def token_id(self, token: str) -> int | None:
        found = self._ids.get(token)
        return self._by_spelling.get(token) if found is None else found

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            return b""
        return self._tekken.id_to_byte_piece(token_id, self._keep)
