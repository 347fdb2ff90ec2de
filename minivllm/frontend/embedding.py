"""Embeddings and scores for ``LLM`` and ``AsyncLLM``: prompts to requests that pool, and pooled values to outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minivllm.core.interfaces.params import SamplingParams
from minivllm.errors import PluginError, RequestError, shown, suggest
from minivllm.runtime.text.embeddings import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

from .pooling import PromptPooling, default_pooling
from .prompts import is_one_prompt, read_prompt, tokenized
from .requests import Tracked

if TYPE_CHECKING:
    from .front_door import FrontDoor

KEYWORDS = ("prompts", "pooling", "normalize", "dimensions", "truncate_prompt_tokens", "use_tqdm")
# keywords of vLLM's ``LLM.embed`` and ``LLM.score`` that this engine does not have -> hint
HINTS = {
    "pooling_params": "pass pooling, normalize and dimensions",
    "lora_request": "vectors are the base model's; adapters serve generate and chat",
    "tokenization_kwargs": "use truncate_prompt_tokens, or tokenize the prompt yourself and pass token ids",
}
TOGETHER = 32  # number of vectors that ``cosines`` converts to float64 and multiplies at a time
ALL = -1  # value of truncate_prompt_tokens for as many tokens as the context holds


@dataclass(frozen=True)
class EmbedOptions:
    """The options of a call.

    ``dimensions`` None keeps all values.  ``truncate`` is the number of tokens of a prompt to keep, the last ones; None
    refuses a prompt that is too long."""

    pooling: str
    normalize: bool = True
    dimensions: int | None = None
    truncate: int | None = None

    @classmethod
    def of(cls, door: FrontDoor, pooling: Any, normalize: Any, dimensions: Any, truncate: Any) -> EmbedOptions:
        """Return the checked options of a call.  RequestError names a wrong one."""
        wiring, hidden = door.engine.wiring, door.engine.capacity.hidden
        name = default_pooling(wiring.model_dir).chosen(pooling)
        if not isinstance(normalize, bool):
            raise RequestError(f"normalize={shown(normalize)}: expected True or False", "normalize")
        check_dimensions(dimensions, hidden)
        most = truncate
        if truncate is not None:
            most = read_truncation(truncate, wiring.max_model_len)
        return cls(name, normalize, dimensions, most)


def check_dimensions(dimensions: Any, hidden: int) -> None:
    """Raise RequestError unless ``dimensions`` is None or a number of values that a model of width ``hidden`` has."""
    if dimensions is None:
        return
    whole = isinstance(dimensions, int) and not isinstance(dimensions, bool)
    if not whole or not 1 <= dimensions <= hidden:
        want = f"expected 1 to {hidden}, the width of the model"
        raise RequestError(f"dimensions={shown(dimensions)}: {want}", "dimensions")


def read_truncation(most: Any, limit: int, name: str = "truncate_prompt_tokens") -> int:
    """Return the number of tokens of a prompt to keep, at most ``limit``.  RequestError for a wrong value."""
    whole = isinstance(most, int) and not isinstance(most, bool)
    if whole and most == ALL:
        return limit
    if not whole or not 1 <= most <= limit:
        want = f"expected {ALL} (as many as the context holds) or 1 to {limit}"
        raise RequestError(f"{name}={shown(most)}: {want}", name)
    return int(most)


def check_keywords(method: str, keywords: Mapping[str, Any], accepted: Sequence[str]) -> None:
    """Check the unknown keywords of a method.  Keywords of vLLM are accepted if they are None.  RequestError for any
    other."""
    for name, value in keywords.items():
        if name not in HINTS or value is not None:
            hint = HINTS.get(name) or f"expected {', '.join(accepted)}.{suggest(name, accepted)}"
            raise RequestError(f"{method}: unknown keyword {shown(name)}; {hint}", name)


def vector_of(values: np.ndarray, normalize: bool = True, dimensions: int | None = None) -> np.ndarray:
    """Return the first ``dimensions`` of pooled values f32 [hidden], scaled to length 1 with ``normalize``.

    A vector of zeros stays as it is."""
    vector = values[:dimensions]
    if not normalize:
        return vector
    length = np.linalg.norm(vector.astype(np.float64))
    return vector if length == 0 else (vector / length).astype(np.float32)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the cosine of the angle between two vectors f32 [hidden] of length 1."""
    product = float(one.astype(np.float64) @ other.astype(np.float64))
    return min(max(product, -1.0), 1.0)  # rounding may exceed the range


def cosines(one: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Return the cosines f64 [n] of the angles between a vector f32 [hidden] and others, all of length 1."""
    column = one.astype(np.float64)
    products = np.empty(len(others))
    # in parts of ``TOGETHER`` vectors, because the float64 copy of a part fits into a processor's cache
    for at in range(0, len(others), TOGETHER):
        block = np.array(others[at : at + TOGETHER], np.float64)
        products[at : at + TOGETHER] = block @ column
    return products.clip(-1.0, 1.0)  # rounding may exceed the range


def listed(prompts: Any) -> list[Any]:
    """Return the prompts of a call as a list.  RequestError for a value that is no list of prompts."""
    if hasattr(prompts, "tolist"):  # a tensor or an array is converted to lists
        prompts = prompts.tolist()
    if is_one_prompt(prompts):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts of {type(prompts).__name__}; expected a string, token ids, or a list", "prompt")
    return list(prompts)


def embed_requests(
    door: FrontDoor, prompts: Sequence[Any], options: EmbedOptions, done: Callable[[Tracked], None] | None = None
) -> list[Tracked]:
    """Return a request for each prompt.  ``done`` is called with each request once it has ended.  RequestError gives
    the number of the first prompt that is refused."""
    params = SamplingParams(max_tokens=1, detokenize=False)
    made = []
    for number, prompt in enumerate(tokenized(prompts, door.tokenizer), 1):
        try:
            made.append(_request(door, prompt, params, options, done))
        except RequestError as e:
            if len(prompts) == 1:
                raise
            raise RequestError(f"prompt {number} of {len(prompts)}: {e}", e.param) from e
    return made


def _request(door: FrontDoor, prompt: Any, params: SamplingParams, options: EmbedOptions, done: Any) -> Tracked:
    """Return the request of the engine that embeds one prompt."""
    text, ids, salt, _ = read_prompt(prompt, door.tokenizer)
    if options.truncate is not None:
        ids = ids[-options.truncate :]
    whole = {"prompt": text, "prompt_token_ids": ids, "cache_salt": salt}
    tracked = Tracked(whole, params, door.tokenizer, done=done)
    tracked.request.pooling = PromptPooling(options.pooling)
    return tracked


def embedding_output(tracked: Tracked, options: EmbedOptions) -> EmbeddingRequestOutput:
    """Return the output of a request that has ended.  If it failed or was aborted, the output has an ``error``."""
    request = tracked.request
    seq = tracked.sequences[0]
    values: list[float] = []
    vector = request.pooling.embedding
    if vector is not None:
        values = vector_of(vector, options.normalize, options.dimensions).tolist()
    error = seq.error or ("the request was aborted" if vector is None else None)
    ids = request.prompt.tolist()
    output = EmbeddingOutput(values)
    return EmbeddingRequestOutput(request.id, request.text, ids, output, True, tracked.metrics, error)


def paired(text_1: Any, text_2: Any) -> tuple[list[Any], list[Any]]:
    """Return the texts of each pair of ``score``.

    One text in ``text_1`` is compared with each in ``text_2``.  RequestError for other lists of unequal length."""
    first, second = listed(text_1), listed(text_2)
    if not first or not second:
        name = "text_2" if first else "text_1"
        raise RequestError(f"{name} is an empty list; expected at least one text", name)
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        problem = f"{len(first)} texts in text_1 and {len(second)} in text_2"
        raise RequestError(f"{problem}; expected one in text_1, or as many as in text_2", "text_2")
    return first, second


def unique_texts(first: Sequence[Any], second: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the prompts to embed for pairs, and the index of each prompt of ``first`` and then of ``second``.

    A text that occurs several times is embedded once."""
    prompts: list[Any] = []
    places: dict[Any, int] = {}
    index = []
    for prompt in (*first, *second):
        key = prompt if isinstance(prompt, str) else id(prompt)
        if key not in places:
            places[key] = len(prompts)
            prompts.append(prompt)
        index.append(places[key])
    return prompts, index


def score_outputs(outputs: Sequence[EmbeddingRequestOutput], index: Sequence[int]) -> list[ScoringRequestOutput]:
    """Return the scores of pairs, from the outputs and the ``index`` of ``unique_texts``.

    PluginError if an embedding failed."""
    for output in outputs:
        if output.error is not None:
            raise PluginError(f"score: an embedding failed: {output.error}")
    vectors = [np.array(output.outputs.embedding, np.float32) for output in outputs]
    scores = []
    pairs = len(index) // 2
    for one, other in zip(index[:pairs], index[pairs:], strict=True):
        ids = outputs[one].prompt_token_ids + outputs[other].prompt_token_ids
        score = ScoringOutput(cosine(vectors[one], vectors[other]))
        name = f"{outputs[one].request_id}-{outputs[other].request_id}"
        scores.append(ScoringRequestOutput(name, score, ids))
    return scores
