"""Tokenizers of the ``tokenizers`` library and of transformers as tokenizer plug-ins (``TokenizerBackend``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from minivllm.core.interfaces.tokenizer import TokenizerBackend, TokenizerContext

from .alphabet import bytes_of_sentencepiece, speller_of
from .literal import without_spellings

NOWHERE = TokenizerContext(Path())


class LibraryTokenizer(TokenizerBackend):
    """A ``tokenizers.Tokenizer``."""

    def __init__(self, library: Any) -> None:
        super().__init__(None, NOWHERE)
        self.library = library

    @cached_property
    def vocab_size(self) -> int:
        return self.library.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        added = self.library.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        return {token.content: i for i, token in self.library.get_added_tokens_decoder().items()}

    @cached_property
    def _plain(self) -> Any:
        """Return the library's tokenizer without spellings of special tokens."""
        spellings = [self.token(i) for i in self.special_ids]
        return without_spellings(self.library, [text for text in spellings if text is not None])[0]

    @cached_property
    def _spell(self) -> Callable[[str], bytes] | None:
        return speller_of(self.library)

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self.added_tokens.values())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self.library.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_plain(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self.library.decode(ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self.library.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self.library.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes | None:
        if self._spell is None:
            return None
        text = self.token(token_id)
        if text is None:
            return b""
        return text.encode() if token_id in self._added_ids else self._spell(text)


class SlowTokenizer(TokenizerBackend):
    """A tokenizer of transformers that is written in Python."""

    def __init__(self, slow: Any) -> None:
        super().__init__(None, NOWHERE)
        self._slow = slow

    @cached_property
    def vocab_size(self) -> int:
        return len(self._slow)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._slow.all_special_ids)

    @cached_property
    def added_tokens(self) -> Mapping[str, int]:
        return {token.content: i for i, token in self._slow.added_tokens_decoder.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._slow.encode(text, add_special_tokens=add_special_tokens))

    def encode_plain(self, text: str) -> list[int]:
        ids = list(self._slow.encode(text, add_special_tokens=False, split_special_tokens=True))
        unknown = self._slow.unk_token_id  # unknown characters are replaced by this token
        if not (self.special_ids - {unknown}).isdisjoint(ids):
            raise ValueError("this tokenizer cannot tell apart a special token and text that spells it")
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._slow.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token(self, token_id: int) -> str | None:
        return self._slow.convert_ids_to_tokens(token_id) if token_id < self.vocab_size else None

    def token_id(self, token: str) -> int | None:
        return self._slow.get_vocab().get(token)

    def token_bytes(self, token_id: int) -> bytes | None:
        text = self.token(token_id)
        return b"" if text is None else bytes_of_sentencepiece(text)


class Delegated(TokenizerBackend):
    """A tokenizer whose constructor chooses the class that does the work."""

    def __init__(
        self,
        options: Any,
        ctx: TokenizerContext,
        inner: TokenizerBackend,
        special_tokens: Mapping[str, str],
    ) -> None:
        super().__init__(options, ctx)
        self._inner = inner
        self.library = inner.library
        self.special_tokens = dict(special_tokens)

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        return self._inner.special_ids

    @property
    def added_tokens(self) -> Mapping[str, int]:
        return self._inner.added_tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._inner.encode(text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        return self._inner.encode_plain(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return self._inner.decode(ids, skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        return self._inner.token(token_id)

    def token_id(self, token: str) -> int | None:
        return self._inner.token_id(token)

    def token_bytes(self, token_id: int) -> bytes | None:
        return self._inner.token_bytes(token_id)
