"""Text to token ids for the routes: cached for each salt, bounded, and off the event loop where it takes long.

What a conversation spells like a special token is encoded as the characters it is, unless the request asks otherwise:
see ``minivllm.text.literal``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minivllm.tenant_cache import Salt, TenantCache

from .errors import ApiError
from .prompts import around, cut_at

if TYPE_CHECKING:
    from minivllm.text.tokenizer import Tokenizer

LONG = 8192  # characters: some milliseconds of tokenizing
CACHED = 8 << 20  # bytes of texts and their ids that are kept, with what Python takes for an entry
ENTRY = 376  # bytes of an entry beside its text and its ids: keys, pair, number, and its places in an OrderedDict
BYTES_A_TOKEN = 16  # a text with more than as many a token of the context is too long without counting
NO_TEXT = "this server was started without a tokenizer: send token ids to /v1/completions"
PLACES = frozenset({"add_generation_prompt", "continue_final_message"})
FIXED = PLACES | {"tokenize", "chat_template", "messages", "tools", "documents"}


class Tokens:
    """A tokenizer for the routes; it is None for an engine of ids only."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.tokenizer, self.most = tokenizer, BYTES_A_TOKEN * max_model_len
        self.max_model_len = max_model_len
        self._kept: TenantCache[array[int]] = TenantCache(CACHED)

    def need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, NO_TEXT, "prompt")
        return self.tokenizer

    def check_length(self, text: str, param: str) -> None:
        """ApiError (400) for a text that is too long to be worth counting."""
        if len(text) > self.most:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens (max_model_len), but the prompt "
                f"has {len(text)} characters, more than so many tokens can have. Shorten it.",
                param,
            )

    def shorten(self, text: str, side: str | None) -> str:
        """As much of a text that will be truncated as any number of tokens of the context can have."""
        if len(text) <= self.most:
            return text
        return text[: self.most] if side == "right" else text[-self.most :]

    async def encode(self, text: str, special: bool, salt: Salt, param: str = "prompt") -> list[int]:
        """The ids of a text, in which spellings of special tokens count as those.  ``salt``: whose it is."""
        tokenizer = self.need()
        self.check_length(text, param)
        return await self._ids(salt, (text, special), len(text), lambda: tokenizer.encode(text, special))

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        return around(self.need())

    async def _ids(
        self, salt: Salt, key: tuple[Any, ...], size: int, make: Callable[[], list[int]], long: bool = False
    ) -> list[int]:
        """What was kept for a text of ``size`` characters, or is made now; ``long``: that takes long at any size."""
        if (found := self._kept.get(salt, key)) is not None:
            return found.tolist()
        ids = make() if size < LONG and not long else await asyncio.to_thread(make)
        self._keep(salt, key, ids)
        return ids

    def _keep(self, salt: Salt, key: tuple[Any, ...], ids: list[int]) -> None:
        """Keep the ids of a text, which is in the key as one string or as several."""
        kept = array("i", ids)  # a ninth of what a list takes
        texts = sum(sys.getsizeof(part) for part in key if isinstance(part, str))
        size = texts + sys.getsizeof(kept) + ENTRY
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
        mark: str | None = None,
    ) -> list[int]:
        """The ids of a conversation, up to ``mark`` if that is given.  ``split``: what is spelled like a special token
        in it stays text; without it such text is the token, as with transformers.  RequestError or ApiError if it is
        malformed or refused."""
        tokenizer = self.need()
        _check_variables(variables)
        # the template repeats what it is given: its size bounds the work
        size = len(json.dumps([messages, tools], default=str))
        if size > 2 * self.most:
            self.check_length(" " * (size // 2), "messages")
        asked = {"tools": tools, "variables": variables}

        def render() -> Any:
            if split:
                return tokenizer.chat_prompt(messages, begin, **asked)
            return tokenizer.apply_chat_template(messages, begin, tokenize=False, **asked)

        prompt = render() if size < LONG else await asyncio.to_thread(render)
        if mark is not None:
            prompt = replace(prompt, pieces=cut_at(prompt.pieces, mark)) if split else cut_at((prompt,), mark)[0]
        if not split:
            return await self.encode(prompt, False, salt, "messages")
        self.check_length(prompt.text, "messages")
        # one that is not plain may need a second tokenizer, which is made the first time
        make = lambda: tokenizer.encode_chat(prompt)  # noqa: E731
        return await self._ids(salt, prompt.pieces, len(prompt.text), make, long=not prompt.plain)


def _check_variables(variables: Any) -> None:
    if variables is None:
        return
    if not isinstance(variables, Mapping):
        raise ApiError(400, "chat_template_kwargs: want an object", "chat_template_kwargs")
    for name in variables:
        if name in FIXED:
            raise ApiError(400, f"chat_template_kwargs.{name} is set by the server", "chat_template_kwargs")


def read_prompts(prompt: Any, most: int, vocab: int) -> list[str | list[int]]:
    """The prompts of a completion.  ApiError (400) for anything but text, ids, and lists of either."""

    def fail(what: str) -> ApiError:
        return ApiError(400, f"prompt: {what}; want text, token ids, or a list of either", "prompt")

    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif not isinstance(prompt, list):
        raise fail(f"is {'null' if prompt is None else type(prompt).__name__}")
    elif prompt and all(type(i) is int for i in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts:
        raise fail("is empty")
    if len(prompts) > most:
        raise ApiError(400, f"prompt: a batch of {len(prompts)}; want at most {most}", "prompt")
    for one in prompts:
        if isinstance(one, list):
            if not all(type(i) is int for i in one):
                raise fail("a list mixes token ids and other things")
            if one and not (min(one) >= 0 and max(one) < vocab):
                bad = min(one) if min(one) < 0 else max(one)
                raise ApiError(
                    400, f"prompt: token id {str(bad)[:24]} is out of range; want 0 to {vocab - 1}", "prompt"
                )
        elif not isinstance(one, str):
            raise fail(f"a list holds {type(one).__name__}")
        if not one:
            raise fail("is empty")
    return prompts
