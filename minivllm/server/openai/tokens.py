"""Convert text to token ids for the routes, with a cache for each salt.  The worker pool encodes long texts.

Text of a conversation that is spelled like a special token is encoded as plain text, unless the request asks for the
special token: see ``minivllm.runtime.text.literal``.
"""

from __future__ import annotations

import hashlib
import re
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.runtime.tenant_cache import Salt, TenantCache
from minivllm.server.errors import ApiError
from minivllm.server.worker_pool import WorkerPool, to_json

from .prompts import around

if TYPE_CHECKING:
    from minivllm.runtime.text.tokenizer import Tokenizer

LONG = 2048  # number of characters whose encoding takes half a millisecond
MANY = 1024  # number of token ids whose decoding takes half a millisecond
CACHED = 8 << 20  # size in bytes of the cached texts and ids, including Python's overhead
ENTRY = 376  # size in bytes of a cache entry without its text and ids
BYTES_A_TOKEN = 16  # largest number of bytes per token of the context; a text with more is refused without encoding
NO_TEXT = "this server was started without a tokenizer: send token ids to /v1/completions"
PLACES = frozenset({"add_generation_prompt", "continue_final_message"})
FIXED = PLACES | {"tokenize", "chat_template", "messages", "tools", "documents"}
VARYING = re.compile(r"strftime_now|random|lipsum")  # functions that make the output of a template vary
Ids = list[int] | np.ndarray


class Tokens:
    """A tokenizer for the routes, or None for an engine that serves token ids only.

    ``pool`` processes long texts, for each client ``owner`` in turn (``FairSlots``).  Cached ids are shared only
    between requests with the same salt."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, pool: WorkerPool | None = None) -> None:
        self.tokenizer = tokenizer
        self.most = BYTES_A_TOKEN * max_model_len
        self.max_model_len = max_model_len
        self.pool = WorkerPool(tokenizer) if pool is None else pool
        self._kept: TenantCache[array[int]] = TenantCache(CACHED)

    @property
    def cached_bytes(self) -> int:
        """Return the bytes of the cached texts and their ids, at most ``CACHED``."""
        return self._kept.bytes

    def need(self) -> Tokenizer:
        """Return the tokenizer.  ApiError (400) if there is none."""
        if self.tokenizer is None:
            raise ApiError(400, NO_TEXT, "prompt")
        return self.tokenizer

    def check_length(self, text: str, param: str) -> None:
        """Raise ApiError (400) for a text that cannot fit into the context."""
        too_long(text, self.most, param)

    def shorten(self, text: str, side: str | None) -> str:
        """Return the part of a text that truncation may keep: as many characters as the context can hold."""
        if len(text) <= self.most:
            return text
        return text[: self.most] if side == "right" else text[-self.most :]

    async def encode(self, text: str, special: bool, salt: Salt, param: str = "prompt", owner: str = "") -> list[int]:
        """Return the ids of a text, in which spellings of special tokens are special tokens.

        ``special`` adds the tokenizer's special tokens around the text.  ``salt`` limits the sharing of cached ids."""
        return (await self.encode_all([text], special, salt, param, owner))[0]

    async def encode_all(
        self, texts: Sequence[str], special: bool, salt: Salt, param: str = "prompt", owner: str = ""
    ) -> list[list[int]]:
        """Return the ids of each text, as ``encode`` does.

        The event loop encodes at most ``LONG`` characters of all texts together; the pool encodes the others."""
        tokenizer = self.need()
        found: dict[str, list[int]] = {}
        left = LONG  # characters that the event loop may still encode
        pooled = []
        for text in dict.fromkeys(texts):
            self.check_length(text, param)
            cached = self._kept.get(salt, (text, special))
            if cached is not None:
                found[text] = cached.tolist()
            elif len(text) < left:
                left -= len(text)
                found[text] = tokenizer.encode(text, special)
                self._keep(salt, (text, special), found[text])
            else:
                pooled.append(text)
        if pooled:
            for text, ids in zip(pooled, await self.pool.encode(pooled, special, owner), strict=True):
                found[text] = ids
                self._keep(salt, (text, special), ids)
        return [found[text] for text in texts]

    async def decode(self, ids: Ids, skip: bool = True, owner: str = "") -> str:
        """Return the text of token ids.  ``skip`` omits special tokens."""
        tokenizer = self.need()
        if len(ids) < MANY:
            return tokenizer.decode(list(map(int, ids)), skip_special_tokens=skip)
        return await self.pool.decode(ids, skip, owner)

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer adds before a text and after it."""
        return around(self.need())

    def _keep(self, salt: Salt, key: tuple[Any, ...], ids: list[int]) -> None:
        """Add the ids of a text to the cache.  The first part of ``key`` is the text or its digest."""
        kept = array("i", ids)  # an array takes a ninth of the memory of a list
        size = sys.getsizeof(key[0]) + sys.getsizeof(kept) + ENTRY
        if size <= CACHED // 16:
            self._kept.put(salt, key, kept, size)

    async def chat(
        self,
        messages: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        begin: bool,
        variables: Any,
        salt: Salt,
        split: bool = True,
        goes_on: bool = False,
        owner: str = "",
        documents: Any = None,
        template: str | None = None,
    ) -> list[int]:
        """Return the ids of a conversation.

        ``begin`` begins a message of the assistant, and ``goes_on`` ends the text with the last message.  ``split``
        encodes spellings of special tokens as plain text; without it they are special tokens, as in transformers.
        ``template`` is the name of one of the model's templates.  RequestError or ApiError for a wrong conversation.

        A chat template is a program whose input is the conversation, so the worker pool runs it and can end it."""
        tokenizer = self.need()
        _check_variables(variables)
        if template is not None and template not in tokenizer.chat_templates:
            raise ApiError(400, f"chat_template: {_no_template(tokenizer)}", "chat_template")
        conversation = {
            "messages": messages,
            "add_generation_prompt": begin,
            "continue_final_message": goes_on,
            "tools": tools,
            "documents": documents,
            "chat_template": template,
            "variables": variables,
        }
        data = to_json(conversation)
        # the template copies its input, so the size of the input limits the work
        if len(data) > 2 * self.most:
            self.check_length(" " * (len(data) // 2), "messages")
        varies = any(map(VARYING.search, tokenizer.chat_templates.values()))
        if varies or len(data) >= CACHED // 16:
            return await self.pool.chat(data, split, self.most, owner)
        key = (hashlib.sha256(data).digest(), split)
        cached = self._kept.get(salt, key)
        if cached is not None:
            return cached.tolist()
        ids = await self.pool.chat(data, split, self.most, owner)
        self._keep(salt, key, ids)
        return ids


def too_long(text: str, most: int, param: str) -> None:
    """Raise ApiError (400) for a text of more than ``most`` characters, which exceed the context."""
    if len(text) > most:
        raise ApiError(
            400,
            f"This model's maximum context length is {most // BYTES_A_TOKEN} tokens (max_model_len), but the prompt "
            f"has {len(text)} characters, and {most} are the most that the context can hold. Shorten it.",
            param,
        )


def _no_template(tokenizer: Tokenizer) -> str:
    """Return the error about a template that the model does not have."""
    names = ", ".join(sorted(tokenizer.chat_templates)) or "none"
    return f"expected the name of one of the model's templates ({names}); the text of a template is never accepted"


def _check_variables(variables: Any) -> None:
    """Raise ApiError (400) for variables that are no object, or that the server sets itself."""
    if variables is None:
        return
    if not isinstance(variables, Mapping):
        raise ApiError(400, "chat_template_kwargs: expected an object", "chat_template_kwargs")
    for name in variables:
        if name in FIXED:
            raise ApiError(400, f"chat_template_kwargs.{name} is set by the server", "chat_template_kwargs")


def read_prompts(prompt: Any, most: int, vocab: int) -> list[str | Ids]:
    """Return the prompts of a completion, at most ``most``.

    ApiError (400) unless they are text, token ids below ``vocab``, or lists of either.  Long lists of ids arrive as
    arrays (``WorkerPool.read``).
    """
    prompts = _listed(prompt)
    if not prompts:
        raise _bad_prompt("is empty")
    if len(prompts) > most:
        raise ApiError(400, f"prompt: a batch of {len(prompts)}; expected at most {most}", "prompt")
    for part in prompts:
        if isinstance(part, (list, np.ndarray)):
            _check_ids(part, vocab)
        elif not isinstance(part, str):
            raise _bad_prompt(f"a list contains {type(part).__name__}")
        if not len(part):
            raise _bad_prompt("is empty")
    return prompts


def _listed(prompt: Any) -> list[Any]:
    """Return a list with a prompt, or the list of prompts.  ApiError (400) for another type."""
    if isinstance(prompt, (str, np.ndarray)):
        return [prompt]
    if not isinstance(prompt, list):
        raise _bad_prompt(f"is {'null' if prompt is None else type(prompt).__name__}")
    if prompt and all(type(token) is int for token in prompt):
        return [prompt]
    return prompt


def _check_ids(ids: Ids, vocab: int) -> None:
    """Raise ApiError (400) unless all elements of a prompt are token ids from 0 to ``vocab`` - 1."""
    if isinstance(ids, list) and not all(type(token) is int for token in ids):
        raise _bad_prompt("a list mixes token ids and other values")
    least, largest = _range(ids)
    if least < 0 or largest >= vocab:
        bad = least if least < 0 else largest
        text = f"prompt: token id {str(bad)[:24]} is out of range; expected 0 to {vocab - 1}"
        raise ApiError(400, text, "prompt")


def _bad_prompt(fault: str) -> ApiError:
    """Return the error about a prompt of a wrong type."""
    return ApiError(400, f"prompt: {fault}; expected text, token ids, or a list of either", "prompt")


def _range(ids: Ids) -> tuple[int, int]:
    """Return the least and the largest of the ids, (0, 0) for no ids."""
    if not len(ids):
        return 0, 0
    if isinstance(ids, np.ndarray):
        return int(ids.min()), int(ids.max())
    return min(ids), max(ids)
