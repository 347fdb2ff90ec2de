"""Text to token ids for the routes: cached for each salt, bounded, and off the event loop where it takes long.

What a conversation spells like a special token is encoded as the characters it is, unless the request asks otherwise:
see ``minivllm.runtime.text.literal``.
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

LONG = 2048  # characters: half a millisecond of tokenizing
MANY = 1024  # token ids: half a millisecond of making text of them
CACHED = 8 << 20  # bytes of texts and their ids that are kept, with what Python takes for an entry
ENTRY = 376  # bytes of an entry beside its text and its ids: keys, pair, number, and its places in an OrderedDict
BYTES_A_TOKEN = 16  # a text with more than as many a token of the context is too long without counting
NO_TEXT = "this server was started without a tokenizer: send token ids to /v1/completions"
PLACES = frozenset({"add_generation_prompt", "continue_final_message"})
FIXED = PLACES | {"tokenize", "chat_template", "messages", "tools", "documents"}
VARYING = re.compile(r"strftime_now|random|lipsum")  # with which a template prints something else each time
Ids = list[int] | np.ndarray


class Tokens:
    """A tokenizer for the routes; it is None for an engine of ids only.  ``pool`` does what takes long, for each
    ``who`` in turn (``FairSlots``); what is kept is kept for each salt."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int, pool: WorkerPool | None = None) -> None:
        self.tokenizer, self.most = tokenizer, BYTES_A_TOKEN * max_model_len
        self.max_model_len = max_model_len
        self.pool = WorkerPool(tokenizer) if pool is None else pool
        self._kept: TenantCache[array[int]] = TenantCache(CACHED)

    @property
    def cached_bytes(self) -> int:
        """Of the texts and their ids that are kept; at most ``CACHED``."""
        return self._kept.bytes

    def need(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ApiError(400, NO_TEXT, "prompt")
        return self.tokenizer

    def check_length(self, text: str, param: str) -> None:
        """ApiError (400) for a text that is too long to be worth counting."""
        too_long(text, self.most, param)

    def shorten(self, text: str, side: str | None) -> str:
        """As much of a text that will be truncated as any number of tokens of the context can have."""
        if len(text) <= self.most:
            return text
        return text[: self.most] if side == "right" else text[-self.most :]

    async def encode(self, text: str, special: bool, salt: Salt, param: str = "prompt", who: str = "") -> list[int]:
        """The ids of a text, in which spellings of special tokens count as those.  ``salt``: whose it is."""
        return (await self.encode_all([text], special, salt, param, who))[0]

    async def encode_all(
        self, texts: Sequence[str], special: bool, salt: Salt, param: str = "prompt", who: str = ""
    ) -> list[list[int]]:
        """The ids of each text.  Together they take as little of the event loop's time as one does."""
        tokenizer = self.need()
        found: dict[str, list[int]] = {}
        here, there = LONG, []
        for text in dict.fromkeys(texts):
            self.check_length(text, param)
            if (ids := self._kept.get(salt, (text, special))) is not None:
                found[text] = ids.tolist()
            elif len(text) < here:
                here -= len(text)
                found[text] = tokenizer.encode(text, special)
                self._keep(salt, (text, special), found[text])
            else:
                there.append(text)
        if there:
            for text, made in zip(there, await self.pool.encode(there, special, who), strict=True):
                found[text] = made
                self._keep(salt, (text, special), made)
        return [found[text] for text in texts]

    async def decode(self, ids: Ids, skip: bool = True, who: str = "") -> str:
        """The text of token ids; ``skip``: without special tokens."""
        tokenizer = self.need()
        if len(ids) < MANY:
            return tokenizer.decode(list(map(int, ids)), skip_special_tokens=skip)
        return await self.pool.decode(ids, skip, who)

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        return around(self.need())

    def _keep(self, salt: Salt, key: tuple[Any, ...], ids: list[int]) -> None:
        """Keep the ids of a text, of which the key begins with the text or with its digest."""
        kept = array("i", ids)  # a ninth of what a list takes
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
        who: str = "",
        documents: Any = None,
        template: str | None = None,
    ) -> list[int]:
        """Return the ids of a conversation; ``goes_on``: up to the end of its last message.  ``split``: what is spelled
        like a special token in it stays text; without it such text is the token, as with transformers.  ``template``:
        the name of one of the model's templates.  RequestError or ApiError if it is malformed or refused.

        A chat template is a program, and a conversation is its input: it runs where it can be ended
        (``WorkerPool``)."""
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
        asked = to_json(conversation)
        # the template repeats what it is given: its size bounds the work
        if len(asked) > 2 * self.most:
            self.check_length(" " * (len(asked) // 2), "messages")
        varies = any(map(VARYING.search, tokenizer.chat_templates.values()))
        kept = not varies and len(asked) < CACHED // 16
        key = (hashlib.sha256(asked).digest(), split) if kept else ()
        if kept and (found := self._kept.get(salt, key)) is not None:
            return found.tolist()
        ids = await self.pool.chat(asked, split, self.most, who)
        if kept:
            self._keep(salt, key, ids)
        return ids


def too_long(text: str, most: int, param: str) -> None:
    """ApiError (400) for a text of more than ``most`` characters, which is more than the context can have."""
    if len(text) > most:
        raise ApiError(
            400,
            f"This model's maximum context length is {most // BYTES_A_TOKEN} tokens (max_model_len), but the prompt "
            f"has {len(text)} characters, more than so many tokens can have. Shorten it.",
            param,
        )


def _no_template(tokenizer: Tokenizer) -> str:
    names = ", ".join(sorted(tokenizer.chat_templates)) or "none"
    return f"want the name of one of the model's templates ({names}); a request's own is never used"


def _check_variables(variables: Any) -> None:
    if variables is None:
        return
    if not isinstance(variables, Mapping):
        raise ApiError(400, "chat_template_kwargs: want an object", "chat_template_kwargs")
    for name in variables:
        if name in FIXED:
            raise ApiError(400, f"chat_template_kwargs.{name} is set by the server", "chat_template_kwargs")


def read_prompts(prompt: Any, most: int, vocab: int) -> list[str | Ids]:
    """The prompts of a completion.  ApiError (400) for anything but text, ids, and lists of either; many ids come as
    arrays (``WorkerPool.read``)."""

    def fail(what: str) -> ApiError:
        return ApiError(400, f"prompt: {what}; want text, token ids, or a list of either", "prompt")

    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif isinstance(prompt, np.ndarray):
        prompts = [prompt]
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
        if isinstance(one, (list, np.ndarray)):
            if isinstance(one, list) and not all(type(i) is int for i in one):
                raise fail("a list mixes token ids and other things")
            least, largest = _range(one)
            if not (least >= 0 and largest < vocab):
                bad = least if least < 0 else largest
                raise ApiError(
                    400, f"prompt: token id {str(bad)[:24]} is out of range; want 0 to {vocab - 1}", "prompt"
                )
        elif not isinstance(one, str):
            raise fail(f"a list holds {type(one).__name__}")
        if not len(one):
            raise fail("is empty")
    return prompts


def _range(ids: Ids) -> tuple[int, int]:
    """The least and the largest; (0, 0) of none."""
    if isinstance(ids, np.ndarray):
        return (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    return min(ids, default=0), max(ids, default=0)
