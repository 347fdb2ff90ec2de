"""Random requests from a pool that all cases with the same model and sampler share.

So the answer of a request alone is computed once and compared often.
"""

from __future__ import annotations

import random
from typing import Any, TypeVar

from . import adapters, pictures
from .configs import VOCAB
from .functions import GRAMMARS

POOL = 120  # requests for each (model, sampler, logprobs_mode)
FAMILIES = 10  # groups of prompts with a common beginning
T = TypeVar("T")
Params = dict[str, Any]


def weighted(rng: random.Random, weights: dict[T, float]) -> T:
    return rng.choices(list(weights), list(weights.values()))[0]


UNGUIDED = {"beam_width", "choose_fn", "logits_processors"}  # parameters that cannot be combined with guidance


def width(params: Params) -> int:
    """Return the largest number of branches that the request has at once."""
    return params.get("beam_width") or max(params.get("n", 1), params.get("best_of") or 1)


def draw(rng: random.Random, engine: dict[str, Any], cap: int | None = None) -> tuple[list[int], Params]:
    """Draw the prompt and the parameters of a request that the engine accepts.

    ``cap`` is the largest number of tokens of prompt and answer in all branches; at least half as many are drawn.
    """
    while True:
        number = rng.randrange(POOL)
        prompt, params = pooled(engine["model"], engine["sampler"], engine["logprobs_mode"], number)
        methods = adapters.methods_of(engine)
        if "adapter" in params and not methods:
            params.pop("adapter")
        elif "adapter" in params:
            method = random.Random(f"method {number}").choice(methods)
            params["adapter"] = adapters.number_of(method, params["adapter"])
        if engine.get("compressor", "none") == "none":
            params.pop("kv_budget", None)
        prompt, params = pictures.draw(random.Random(f"pictures {number}"), engine, prompt, params)
        fits = len(prompt) + 8 < engine["max_model_len"] and rows(params) <= engine["max_num_seqs"]
        size = len(prompt) + width(params) * params["max_tokens"]
        if fits and (cap is None or cap / 2 <= size <= cap):
            return prompt, params


def pooled(model: str, sampler: str, mode: str, i: int) -> tuple[list[int], Params]:
    rng = random.Random(f"ask {model} {sampler} {mode} {i}")
    prompt, params = draw_prompt(rng, model), draw_params(rng, model, sampler, mode)
    if rng.random() < 0.15 and not UNGUIDED & params.keys():
        params["guidance_scale"] = rng.choice([0.0, 0.5, 1.5, 3.0])
        if rng.random() < 0.7:  # at most as long as the prompt, so that it does not determine the size of the context
            params["negative_prompt_token_ids"] = draw_prompt(rng, model)[: len(prompt)]
    # a separate generator, so that other draws do not depend on it
    tapped = random.Random(f"taps {model} {sampler} {mode} {i}")
    if tapped.random() < 0.2:
        add, beams = tapped.random() < 0.6, "beam_width" in params
        params["taps"] = {"seed": i, "add": add or beams, "read": not beams and (not add or tapped.random() < 0.5)}
    adapted = random.Random(f"adapter {model} {sampler} {mode} {i}")
    if adapted.random() < 0.5:
        params["adapter"] = adapted.randint(1, adapters.COUNT)
    compressed = random.Random(f"compression {model} {sampler} {mode} {i}")
    if compressed.random() < 0.6 and not {"beam_width", "guidance_scale"} & params.keys():
        params["kv_budget"] = compressed.choice([1, 5, 16, 33, 0.1, 0.25, 0.5, 0.9])
    return prompt, params


def rows(params: Params) -> int:
    """Return the number of rows that the request needs, for its branches, or for one branch and its guide."""
    return max(width(params), 2 if "guidance_scale" in params else 1)


def draw_prompt(rng: random.Random, model: str) -> list[int]:
    """Draw token ids with the beginning of a family and some own tokens, at least one token."""
    vocab = VOCAB[model]
    family = random.Random(f"family {model} {rng.randrange(FAMILIES)}")
    common = [family.randrange(3, vocab) for _ in range(400)]
    shared = rng.choice([0, 0, 5, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 150])
    if rng.random() < 0.06:
        shared = rng.choice([200, 260, 350])
    own = [rng.randrange(3, vocab) for _ in range(rng.choice([0, 1, 1, 2, 7, 16, 30]))]
    if rng.random() < 0.25:  # a repeated part, so that lookups find something
        own = (own[:5] or [5]) * rng.choice([2, 4, 8])
    return (common[:shared] + own) or [rng.randrange(3, vocab)]


def draw_params(rng: random.Random, model: str, sampler: str, mode: str) -> Params:
    kinds = {"free": 46, "function": 16, "choose": 7, "processors": 7, "beam": 7, "best_of": 5}
    if model == "pocket":
        kinds["structured"] = 20
    kind = weighted(rng, kinds)
    most = rng.choice([1, 2, 3, 6, 10, 16, 20, 33, 40, 60])
    params: Params = {"seed": rng.getrandbits(48) - (1 << 47), "max_tokens": most}
    _service(rng, params)
    if kind == "beam":
        return _beam(rng, params, model, mode)
    _temperature(rng, params, kind, sampler)
    _processed(rng, params, model)
    _ends(rng, params, model)
    if kind not in ("choose", "processors"):
        if rng.random() < 0.4:
            params["logprobs"] = rng.randint(0, 5)
        if rng.random() < 0.12:
            params["prompt_logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        params["n"] = rng.choice([2, 2, 3, 4])
    if kind == "best_of":
        params["n"] = rng.choice([1, 2])
        params["best_of"] = rng.choice([2, 3, 4])
    elif kind == "function":
        params["allowed_tokens_fn"] = [rng.choice(["residue", "chain", "span", "slow"]), rng.choice([2, 3, 5, 17])]
    elif kind == "choose":
        params["choose_fn"] = [rng.choice(["argmax", "second", "hashed"]), 0]
    elif kind == "processors":
        names = ["same", "ban_last", "boost", "scale", "ban_first"]
        params["logits_processors"] = [[rng.choice(names), rng.randrange(200)] for _ in range(rng.choice([1, 1, 2]))]
    elif kind == "structured":
        params["structured_outputs"] = rng.choice(GRAMMARS)["asked"]
        params["max_tokens"] = max(most, 10)
        params.pop("allowed_token_ids", None)  # otherwise almost no token would be allowed
        params.pop("no_repeat_ngram_size", None)
    return params


def _service(rng: random.Random, params: Params) -> None:
    """Draw parameters that affect scheduling and sharing, and no token."""
    if rng.random() < 0.2:
        params["priority"] = rng.choice([-3, 1, 5])
    if rng.random() < 0.15:
        params["tenant"] = rng.choice(["a", "b"])
    if rng.random() < 0.1:
        params["cache_salt"] = rng.choice(["x", "y"])
    if rng.random() < 0.15:
        params["ttft_ms"] = rng.choice([1.0, 100.0])
    if rng.random() < 0.15:
        params["tpot_ms"] = rng.choice([0.1, 20.0])
    if rng.random() < 0.15:
        params["expected_tokens"] = rng.choice([1, 30])


def _beam(rng: random.Random, params: Params, model: str, mode: str) -> Params:
    params["beam_width"] = rng.choice([1, 2, 3, 4])
    params["n"] = rng.randint(1, params["beam_width"])
    if rng.random() < 0.5:
        params["length_penalty"] = rng.choice([0.0, 0.5, 1.5, -1.0])
    if rng.random() < 0.4:
        params["early_stopping"] = rng.choice([True, "never"])
    if rng.random() < 0.5:
        params["temperature"] = 0.0
    if mode == "processed_logprobs" and rng.random() < 0.5:
        params["temperature"] = 0.7
        _processed(rng, params, model)
    if rng.random() < 0.4:
        params["logprobs"] = rng.randint(0, 5)
    _ends(rng, params, model)
    params.pop("stop", None)
    return params


def _temperature(rng: random.Random, params: Params, kind: str, sampler: str) -> None:
    params["temperature"] = 0.0 if rng.random() < 0.35 else rng.choice([0.3, 0.7, 1.0, 1.0, 1.5])
    if params["temperature"] == 0.0:
        return
    special = kind != "choose" and rng.random() < 0.6
    if sampler == "mirostat" and special:
        params["mirostat_tau"] = rng.choice([1.0, 3.0, 5.0])
        if rng.random() < 0.5:
            params["mirostat_eta"] = 0.5
    elif sampler == "typical" and special:
        params["typical_p"] = rng.choice([0.2, 0.5, 0.9])
    if "mirostat_tau" not in params:
        if rng.random() < 0.3:
            params["top_k"] = rng.choice([1, 3, 9, 40, 200])
        if rng.random() < 0.3:
            params["top_p"] = rng.choice([0.3, 0.8, 0.95])
        if rng.random() < 0.2:
            params["min_p"] = rng.choice([0.02, 0.2])
    if rng.random() < 0.1:
        params["temperature_schedule"] = rng.choice(
            [
                {"kind": "linear", "start": 0.5, "end": 1.5, "tokens": 10},
                {"kind": "cosine", "start": 1.5, "end": 0.3, "tokens": 20},
                {"kind": "entropy", "low": 0.4, "high": 1.4},
            ]
        )


def _processed(rng: random.Random, params: Params, model: str) -> None:
    vocab = VOCAB[model]
    some = lambda count: sorted(rng.sample(range(vocab), count))  # noqa: E731
    if rng.random() < 0.15:
        params["repetition_penalty"] = rng.choice([0.7, 1.3, 2.0])
    if rng.random() < 0.12:
        params["presence_penalty"] = rng.choice([-1.0, 0.5, 2.0])
    if rng.random() < 0.12:
        params["frequency_penalty"] = rng.choice([-0.5, 0.4, 1.5])
    if rng.random() < 0.12:
        params["logit_bias"] = [[i, rng.choice([-100.0, -3.0, 2.0, 9.0])] for i in some(rng.choice([1, 4, 40]))]
    if rng.random() < 0.1:
        params["bad_words"] = [[i] for i in some(rng.choice([1, 20]))] + [[i, i] for i in some(10)]
    if rng.random() < 0.1:
        params["allowed_token_ids"] = some(rng.choice([4, 33, vocab // 2]))
    if rng.random() < 0.1:
        params["no_repeat_ngram_size"] = rng.choice([1, 2, 2, 3])


def _ends(rng: random.Random, params: Params, model: str) -> None:
    params["ignore_eos"] = rng.random() < 0.5
    if rng.random() < 0.3:
        params["stop_token_ids"] = sorted(rng.sample(range(VOCAB[model]), rng.choice([1, 3, 12])))
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(0, params["max_tokens"])
    if model == "pocket" and rng.random() < 0.15:
        params["stop"] = rng.choice([["the"], ["e", ". "], ["\n"]])
        params["include_stop_str_in_output"] = rng.random() < 0.3
