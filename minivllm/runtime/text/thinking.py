"""The tags of reasoning of a model, found in its tokenizer, and their token ids in the parameters of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from minivllm.errors import RequestError, shown
from minivllm.runtime.replies.thinking import ANSWER, BUDGET, END, MOST_IDS, START, TAGS, WANTED

if TYPE_CHECKING:
    from minivllm.core.interfaces.params import SamplingParams

    from .tokenizer import Tokenizer

# (start, end) of reasoning; a model has a pair if both are added tokens
PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>", "<channel|>"),
)
CHANNELS = ("<|channel|>", "<|message|>", "<|end|>")  # tokens of models that write in channels, such as gpt-oss
OF_CHANNELS = {
    START: "<|channel|>analysis<|message|>",
    END: "<|end|>",
    ANSWER: "<|channel|>final<|message|>",
}
MOST_TEXT = 256  # largest number of characters of a tag


def tags_of(tokenizer: Tokenizer) -> dict[str, str] | None:
    """Return the tags of reasoning of a model, by their keys in ``thinking_tags``, or None if it has none."""
    added = tokenizer.added_tokens
    for start, end in PAIRS:
        if start in added and end in added:
            return {START: start, END: end}
    return dict(OF_CHANNELS) if all(token in added for token in CHANNELS) else None


def with_thinking_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with the token ids of the tags of reasoning, if the request sets a budget or tags.

    RequestError if the request names no tags and the model has none, or if tags are malformed."""
    limit, given = params.extra.get(BUDGET), params.extra.get(TAGS)
    if tokenizer is None or (limit in (None, -1) and given is None):
        return params
    tags: dict[str, Any] = {}
    if not (isinstance(given, Mapping) and START in given and END in given):
        own = tags_of(tokenizer)
        if own is None:
            name = BUDGET if given is None else TAGS
            problem = f"{name}: the tokenizer of this model has no tags of reasoning, such as <think> and </think>"
            raise RequestError(f'{problem}; name them: {TAGS}={{"start": ..., "end": ...}}', name)
        tags.update(own)
    if given is not None:
        if not isinstance(given, Mapping):
            raise RequestError(f"{TAGS}={shown(given)}; expected {WANTED}", TAGS)
        tags.update(given)
    ids = {key: _ids(str(key), tag, tokenizer) for key, tag in tags.items()}
    return params if ids == given else replace(params, extra={**params.extra, TAGS: ids})


def _ids(key: str, tag: Any, tokenizer: Tokenizer) -> Any:
    """Return the token ids of a tag.  Anything but text is returned unchanged, for a later check."""
    if not isinstance(tag, str):
        return tag
    ids = tokenizer.encode(tag, add_special_tokens=False) if len(tag) <= MOST_TEXT else []
    if not 1 <= len(ids) <= MOST_IDS:
        raise RequestError(f"{TAGS}.{key}={shown(tag)}: expected a text of 1 to {MOST_IDS} tokens", TAGS)
    return ids
