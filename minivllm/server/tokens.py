"""Text to token ids for the routes: cached, bounded, and off the event loop where it takes long.

A message's text never becomes a special token: what is spelled like one in it is encoded as the characters it is.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import ApiError

if TYPE_CHECKING:
    from minivllm.text.tokenizer import Tokenizer

LONG = 8192  # characters: some milliseconds of tokenizing
CACHED = 1 << 24  # characters of the texts whose ids are kept
BYTES_A_TOKEN = 16  # a text with more than as many a token of the context is too long without counting
NO_TEXT = "this server was started without a tokenizer: send token ids to /v1/completions"
FIXED = frozenset({"tokenize", "chat_template", "messages", "tools", "documents", "add_generation_prompt"})


class Tokens:
    """A tokenizer for the routes; it is None for an engine of ids only."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.tokenizer, self.most = tokenizer, BYTES_A_TOKEN * max_model_len
        self.max_model_len = max_model_len
        self._kept: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._size = 0
        self._special: re.Pattern[str] | None = None
        self._plain: Any = None
        if tokenizer is not None:
            names = sorted(filter(None, map(tokenizer.token, tokenizer.special_ids)), key=len, reverse=True)
            self._special = re.compile("|".join(map(re.escape, names))) if names else None

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

    async def encode(self, text: str, special: bool = True, param: str = "prompt") -> list[int]:
        """The ids of a text, in which spellings of special tokens count as those."""
        tokenizer = self.need()
        self.check_length(text, param)
        key = (text, special)
        if (found := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return found.tolist()
        if len(text) < LONG:
            ids = tokenizer.encode(text, special)
        else:
            ids = await asyncio.to_thread(tokenizer.encode, text, special)
        self._keep(key, ids)
        return ids

    def _keep(self, key: tuple[str, bool], ids: list[int]) -> None:
        if key in self._kept or len(key[0]) > CACHED // 16:
            return
        self._kept[key] = array("i", ids)  # a ninth of what a list takes
        self._size += len(key[0])
        while self._size > CACHED:
            (text, _), _ = self._kept.popitem(last=False)
            self._size -= len(text)

    async def chat(
        self, messages: Any, tools: Sequence[Mapping[str, Any]] | None, begin: bool, variables: Any
    ) -> list[int]:
        """The ids of a conversation.  RequestError or ApiError if the messages are malformed or refused."""
        tokenizer = self.need()
        _check_variables(variables)
        # the template repeats what it is given: its size bounds the work
        size = len(json.dumps([messages, tools], default=str))
        if size > 2 * self.most:
            self.check_length(" " * (size // 2), "messages")
        mark = f"\ue000{secrets.token_hex(4)}\ue000"
        hidden = False

        def hide(match: re.Match[str]) -> str:
            nonlocal hidden
            hidden = True
            return f"{mark}{match[0]}{mark}"

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return self._special.sub(hide, value) if self._special is not None else value
            if isinstance(value, Mapping):
                return {key: inner if key in ("role", "type") else walk(inner) for key, inner in value.items()}
            return [walk(inner) for inner in value] if isinstance(value, list) else value

        def render() -> str:
            shown = walk(messages), walk(tools)
            return str(
                tokenizer.apply_chat_template(shown[0], begin, tokenize=False, tools=shown[1], variables=variables)
            )

        text = render() if size < LONG else await asyncio.to_thread(render)
        if not hidden:
            return await self.encode(text, False, "messages")
        self.check_length(text, "messages")
        ids: list[int] = []
        for number, part in enumerate(text.split(mark)):  # every second one is spelled like a special token
            ids += self._literal(part) if number % 2 else tokenizer.encode(part, False)
        return ids

    def _literal(self, text: str) -> list[int]:
        """The ids of a text as characters, whatever it spells."""
        tokenizer = self.need()
        if tokenizer.backend is None:
            return [i for c in text for i in tokenizer.encode(c, False)]
        if self._plain is None:
            self._plain = copy.deepcopy(tokenizer.backend)
            self._plain.encode_special_tokens = True
        return self._plain.encode(text, add_special_tokens=False).ids


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
