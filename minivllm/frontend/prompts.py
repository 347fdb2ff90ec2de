"""Convert the arguments of a call: prompts to token ids, and sampling parameters to one ``SamplingParams`` per
prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from minivllm.core.interfaces.adapters import LoRARequest
from minivllm.core.interfaces.params import SamplingParams
from minivllm.core.interfaces.taps import Tap
from minivllm.errors import RequestError, brief, shown, suggest
from minivllm.runtime.text.thinking import with_thinking_ids

if TYPE_CHECKING:
    from minivllm.core.interfaces.images import PlacedImage, PreparedImage
    from minivllm.runtime.images.reader import ImageReader
    from minivllm.runtime.text.tokenizer import Tokenizer

SCALE, NEGATIVE, NEGATIVE_IDS = "guidance_scale", "negative_prompt", "negative_prompt_token_ids"
# largest number of characters of a negative prompt, because a server encodes it between two steps
MOST_NEGATIVE = 32768
MOST_WORDS = 1024  # largest number of ``bad_words`` that are encoded here; the processor refuses longer lists


TEXT_ONLY = "is not read; expected images in multi_modal_data, and no audio or video"
MULTI_MODAL = "multi_modal_data"
# keys of a prompt in vLLM and other engines that would change the answer -> reason of the refusal
REFUSED = {
    **dict.fromkeys(
        (
            "multi_modal_uuids",
            "mm_processor_kwargs",
            "mm_kwargs",
            "images",
            "image",
            "audio",
            "video",
        ),
        TEXT_ONLY,
    ),
    "prompt_embeds": "embeddings are not read; expected text or token ids",
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "models with an encoder are not served"),
    "token_type_ids": "no model here reads them",
    "messages": "a conversation goes to chat",
    "sampling_params": "they are the second argument of generate",
    "lora_request": "it is an argument of generate",
}
KEYS = ("prompt", "prompt_token_ids", "cache_salt", MULTI_MODAL)
# keywords of vLLM's ``LLM.generate`` that this engine does not have -> hint
CALL_HINTS = {
    "prompt_token_ids": 'pass a prompt {"prompt_token_ids": [...]}, or the list of ids itself',
    "guided_options_request": "use structured_outputs in SamplingParams",
    "prompt_adapter_request": "prompt adapters are not served; lora_request names an adapter of PEFT's LoRA",
    "priority": "use priority in SamplingParams",
    "tokenization_kwargs": "tokenize the prompt yourself and pass token ids",
}


class PromptInput(NamedTuple):
    """A parsed prompt: its text (None if unknown), its token ids i32 [n], the salt of its cached prefixes, and its
    images."""

    text: str | None
    ids: np.ndarray
    cache_salt: str | None = None
    images: tuple[PlacedImage, ...] = ()


def check_call(keywords: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Check the unknown keywords of ``generate``.  Keywords of vLLM are accepted if they are None.  RequestError for
    any other."""
    for name, value in keywords.items():
        if name not in CALL_HINTS or value is not None:
            hint = CALL_HINTS.get(name) or f"expected {', '.join(accepted)}.{suggest(name, accepted)}"
            raise RequestError(f"generate: unknown keyword {shown(name)}; {hint}", name)


def _check_keys(prompt: Mapping[Any, Any]) -> None:
    """Raise RequestError for a key of a prompt that is not read and whose value is not empty."""
    for key, value in prompt.items():
        if key in KEYS or value is None:
            continue
        name = brief(str(key), 64)
        if key in REFUSED:
            if isinstance(value, (str, list, tuple, dict)) and not value:
                continue
            raise RequestError(f"{name} in a prompt: {REFUSED[key]}", name)
        raise RequestError(f"{name} in a prompt: unknown key; expected {', '.join(KEYS)}.{suggest(name, KEYS)}", name)


def images_in(prompt: Mapping[Any, Any]) -> list[Any]:
    """Return the images in ``multi_modal_data`` of a prompt.  RequestError for other media."""
    data = prompt.get(MULTI_MODAL) or {}
    if not isinstance(data, Mapping):
        raise RequestError(f'{MULTI_MODAL}={shown(data)}: expected {{"image": ...}}', MULTI_MODAL)
    for kind, value in data.items():
        if kind != "image" and value is not None:
            raise RequestError(f"{MULTI_MODAL}: {shown(kind)} is not read; expected image", MULTI_MODAL)
    found = data.get("image")
    if found is None:
        return []
    return list(found) if isinstance(found, (list, tuple)) else [found]


def with_images(read: PromptInput, sources: Sequence[Any], reader: ImageReader | None) -> PromptInput:
    """Return a prompt with its images: each placeholder becomes as many as its image has tokens.  RequestError if an
    image is refused, or if the prompt does not have a placeholder for each image."""
    if reader is None or (reader.why_not and not sources):
        if sources:
            raise RequestError(f"{MULTI_MODAL}: this call reads text only", MULTI_MODAL)
        return read
    from minivllm.runtime.images.placing import check_placeholders, place

    if sources:
        reader.check(len(sources))
    check_placeholders(read.ids, len(sources), reader.wiring.facts)
    if not sources:
        return read
    images: list[PreparedImage] = []
    for source in sources:
        try:
            images.append(reader.prepare(source, read.cache_salt or ""))
        except MemoryError:
            wanted = "a smaller image, or another size in preprocessor_config.json"
            raise RequestError(f"image: there is no memory to prepare it; expected {wanted}", "images") from None
        reader.check_tokens(images)
    ids, placed = place(read.ids, images, reader.wiring.facts)
    return read._replace(ids=ids, images=placed)


def read_prompt(prompt: Any, tokenizer: Tokenizer | None, reader: ImageReader | None = None) -> PromptInput:
    """Return a prompt from a string, token ids, or a mapping with ``prompt`` or ``prompt_token_ids`` and optionally
    ``cache_salt`` and ``multi_modal_data``.  RequestError names the wrong key."""
    sources = images_in(prompt) if isinstance(prompt, Mapping) else []
    return with_images(_read_text(prompt, tokenizer), sources, reader)


def _read_text(prompt: Any, tokenizer: Tokenizer | None) -> PromptInput:
    """Return the text and token ids of a prompt, without its images.  RequestError if it is malformed, or if it is a
    text and there is no tokenizer."""
    text, salt = None, None
    if isinstance(prompt, Mapping):
        _check_keys(prompt)
        salt = prompt.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"cache_salt={shown(salt)} in a prompt: expected a string", "cache_salt")
        ids = prompt.get("prompt_token_ids")
        if ids is not None:
            if isinstance(ids, (str, bytes, Mapping)):
                raise RequestError(f"prompt_token_ids={shown(ids)}: expected a list of token ids", "prompt_token_ids")
            text, prompt = prompt.get("prompt"), ids
            if text is not None and not isinstance(text, str):
                raise RequestError(
                    f"prompt={shown(text)} with prompt_token_ids: expected the text of these ids", "prompt"
                )
        elif prompt.get("prompt") is not None:
            prompt = prompt["prompt"]
        else:
            raise RequestError(
                f"a prompt with the keys {sorted(map(str, prompt))}; expected 'prompt' or 'prompt_token_ids'", "prompt"
            )
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("a text prompt needs a tokenizer; pass token ids or drop skip_tokenizer_init", "prompt")
        text, prompt = prompt, tokenizer.encode(prompt)
    try:
        array = np.asarray(prompt)
    except ValueError:  # numpy refuses lists of unequal length
        array = np.empty(1, object)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise RequestError(
            f"a prompt of {type(prompt).__name__}; expected a string or a list of whole token ids", "prompt"
        )
    if array.size and (array.max() >= 2**31 or array.min() < -(2**31)):
        raise RequestError("prompt: a token id does not fit 32 bits; expected ids of the vocabulary", "prompt")
    return PromptInput(text, array.astype(np.int32), salt)


def tokenized(prompts: Sequence[Any], tokenizer: Tokenizer | None) -> list[Any]:
    """Return the prompts with texts replaced by token ids, which the tokenizer's pool converts together.

    Prompts are returned unchanged if one of the texts is refused, so that ``read_prompt`` reports it.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if tokenizer is None or len(texts) < 2:
        return list(prompts)
    try:
        rows = iter(tokenizer.batch_encode(texts))
    except RequestError:
        return list(prompts)
    found = []
    for prompt in prompts:
        if isinstance(prompt, str):
            found.append({"prompt": prompt, "prompt_token_ids": next(rows)})
        else:
            found.append(prompt)
    return found


def with_salt(params: SamplingParams, salt: str | None) -> SamplingParams:
    """Return the parameters with the salt of a prompt.  RequestError if they have a different salt."""
    if salt is None or params.cache_salt == salt:
        return params
    if params.cache_salt is not None:
        raise RequestError(
            "cache_salt differs between the prompt and its sampling parameters: set only one of them", "cache_salt"
        )
    return replace(params, cache_salt=salt)


def with_token_ids(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return the parameters with token ids instead of texts: a negative prompt, ``bad_words``, ``thinking_tags``.

    A bad word is encoded both as the beginning of a text and after a space, because most vocabularies distinguish
    these.

    RequestError if a text is too long or malformed, or if there is no tokenizer."""
    # A negative prompt without a scale, or in both forms, remains and is refused later by its name.
    if {NEGATIVE, SCALE} <= params.extra.keys() and NEGATIVE_IDS not in params.extra and tokenizer is not None:
        text = params.extra[NEGATIVE]
        if len(text) > MOST_NEGATIVE:
            expected = f"expected at most {MOST_NEGATIVE}, or {NEGATIVE_IDS}"
            raise RequestError(f"{NEGATIVE} has {len(text)} characters; {expected}", NEGATIVE)
        kept = {name: value for name, value in params.extra.items() if name != NEGATIVE}
        params = replace(params, extra={**kept, NEGATIVE_IDS: tokenizer.encode(text)})
    params = with_thinking_ids(params, tokenizer)
    words = params.bad_words
    if not isinstance(words, (list, tuple)) or not any(isinstance(word, str) for word in words[:MOST_WORDS]):
        return params
    if tokenizer is None:
        raise RequestError(
            "bad_words: words need a tokenizer; give token ids, or drop skip_tokenizer_init", "bad_words"
        )
    found: dict[tuple[Any, ...], None] = {}
    for word in words[:MOST_WORDS]:
        if not isinstance(word, str):
            found[tuple(word) if isinstance(word, (list, tuple, np.ndarray)) else (word,)] = None
            continue
        if not word.strip() or len(word) > 256:
            raise RequestError(
                f"bad_words: the word {shown(word)}: expected text of at most 256 characters", "bad_words"
            )
        try:
            for text in (word, " " + word.lstrip()):
                found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        except RequestError as e:
            raise RequestError(f"bad_words: the word {shown(word)}: {e}", "bad_words") from e
    return replace(params, bad_words=(*found, *words[MOST_WORDS:]))


def is_one_prompt(prompts: Any) -> bool:
    """Return whether the value is a single prompt and not a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return bool(prompts) and isinstance(prompts, Sequence) and all(isinstance(p, (int, np.integer)) for p in prompts)


def params_for(params: Any, n: int) -> list[SamplingParams]:
    """Return one SamplingParams for each of ``n`` prompts, made from a SamplingParams, a list of them, a mapping, or
    None for the defaults.  RequestError for another type, or for a list of another length."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, Mapping):
        params = SamplingParams.make(**{str(name): value for name, value in params.items()})
    if isinstance(params, SamplingParams):
        return [params] * n
    if isinstance(params, str) or not isinstance(params, Sequence):
        raise RequestError(
            f"sampling_params of {type(params).__name__}; expected SamplingParams or a list", "sampling_params"
        )
    converted = [p if isinstance(p, SamplingParams) else SamplingParams.make(**(p or {})) for p in params]
    if len(converted) != n:
        count = len(converted)
        raise RequestError(
            f"{count} sampling_params for {n} prompts; expected one, or one for each prompt", "sampling_params"
        )
    return converted


def taps_for(taps: Any, n: int) -> list[tuple[Tap, ...]]:
    """Return the taps of each of ``n`` prompts, from a list of ``Tap`` for all of them, a list of such lists, or None.
    RequestError for anything else, or if the number of lists is not ``n``."""
    if taps is None:
        return [()] * n
    expected = "expected a list of Tap, or one for each prompt"
    if not isinstance(taps, (list, tuple)):
        raise RequestError(f"taps of {type(taps).__name__}; {expected}", "taps")
    if _are_taps(taps):
        return [tuple(taps)] * n
    if not all(isinstance(element, (list, tuple)) and _are_taps(element) for element in taps):
        raise RequestError(f"taps={shown(taps)}: {expected}", "taps")
    if len(taps) != n:
        raise RequestError(
            f"{len(taps)} lists of taps for {n} prompts; expected one list, or one for each prompt", "taps"
        )
    return [tuple(element) for element in taps]


def adapters_for(lora: Any, n: int) -> list[LoRARequest | None]:
    """Return the adapter of each of ``n`` prompts, from a LoRARequest for all of them, a list of LoRARequests, or None.
    RequestError for anything else, or if the length of the list is not ``n``."""
    if lora is None or isinstance(lora, LoRARequest):
        return [lora] * n
    if not isinstance(lora, (list, tuple)) or not all(one is None or isinstance(one, LoRARequest) for one in lora):
        raise RequestError(
            f"lora_request={shown(lora)}: expected a LoRARequest, or a list with one or None for each prompt",
            "lora_request",
        )
    if len(lora) != n:
        raise RequestError(f"{len(lora)} adapters for {n} prompts; expected one for each prompt", "lora_request")
    return list(lora)


def _are_taps(values: Sequence[Any]) -> bool:
    """Return whether all values are taps."""
    return all(isinstance(value, Tap) for value in values)
