"""Python functions of requests by name, and forms of answers with their checks, which JSON cannot store."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

GRAMMARS: list[dict[str, Any]] = [  # "name" selects the check
    {"name": "digits", "asked": {"regex": "[0-9]{3}-[0-9]{4}"}},
    {"name": "letters", "asked": {"regex": "(ab|c)*d?"}},
    {"name": "words", "asked": {"regex": "[A-Z][a-z]{1,8}( [a-z]{1,8}){0,6}[.]"}},
    {"name": "choice", "asked": {"choice": ["yes", "no", "perhaps"]}},
    {"name": "integer", "asked": {"json": {"type": "integer", "minimum": 0, "maximum": 99}}},
    {"name": "object", "asked": {"json": {
        "type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
        "required": ["name", "old"], "additionalProperties": False}, "disable_any_whitespace": True}},
    {"name": "array", "asked": {"json": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4}}},
]  # fmt: skip


def _object(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"name", "old"} and isinstance(value["old"], bool) and len(value["name"]) <= 8


def _array(text: str) -> bool:
    value = json.loads(text)
    return isinstance(value, list) and len(value) <= 4 and set(value) <= {"a", "b"}


JSON_CHECKS: dict[str, Callable[[str], bool]] = {
    "integer": lambda text: 0 <= int(json.loads(text)) <= 99, "object": _object, "array": _array,
}  # fmt: skip


def fits(requested: dict[str, Any], text: str, ended: bool) -> bool:
    """Return whether an answer has the requested form.  An answer that was cut off is mostly accepted."""
    if "choice" in requested:
        return text in requested["choice"] if ended else any(c.startswith(text) for c in requested["choice"])
    if not ended:
        return True
    if "regex" in requested:
        return re.fullmatch(requested["regex"], text) is not None
    name = next(g["name"] for g in GRAMMARS if g["asked"] == requested)
    try:
        return JSON_CHECKS[name](text)
    except (ValueError, AttributeError, KeyError, TypeError):
        return False


def allowed(name: str, number: int, vocab: int) -> Callable[[Sequence[int]], Any]:
    """Return an ``allowed_tokens_fn`` that returns a range, a list or an array of tokens for some ids."""

    def residue(ids: Sequence[int]) -> Any:
        return range(len(ids) % number, vocab, number)

    def chain(ids: Sequence[int]) -> Any:
        return sorted({(int(ids[-1]) * 31 + 7 * j + len(ids)) % vocab for j in range(number)})

    def span(ids: Sequence[int]) -> Any:
        first = (int(sum(ids[-3:])) * 13) % (vocab - number)
        return np.arange(first, first + number)

    def slow(ids: Sequence[int]) -> Any:
        time.sleep(0.001 * (len(ids) % 3))  # the device has then computed everything that does not need the mask
        return residue(ids)

    return {"residue": residue, "chain": chain, "span": span, "slow": slow}[name]


def choose(name: str, number: int) -> Callable[[np.ndarray, Sequence[int]], int]:
    """Return a ``choose_fn`` that returns the best token, the second, or one of the five best by the number of ids.

    Ties go to the lower id.
    """

    def pick(logits: np.ndarray, ids: Sequence[int]) -> int:
        order = np.argsort(-logits, kind="stable")
        return int(order[{"argmax": 0, "second": 1, "hashed": len(ids) % 5}[name]])

    return pick


def processor(name: str, number: int) -> Callable[..., Any]:
    """Return one of the ``logits_processors``."""

    def same(output: Any, logits: Any) -> Any:
        return logits

    def ban_last(output: Any, logits: Any) -> Any:
        if output:
            logits[output[-1]] = -float("inf")
        return logits

    def boost(output: Any, logits: Any) -> Any:
        logits[number] += 3.0
        return logits

    def scale(output: Any, logits: Any) -> Any:
        return logits * (0.5 + (len(output) % 3) / 2)

    def ban_first(prompt: Any, output: Any, logits: Any) -> Any:
        logits[prompt[0]] = -float("inf")
        return logits.numpy()

    found = {"same": same, "ban_last": ban_last, "boost": boost, "scale": scale, "ban_first": ban_first}
    return found[name]


def taps_of(params: dict[str, Any], points: Mapping[str, int]) -> list[Any]:
    """Return the taps of a request, {"seed": n, "add": bool, "read": bool}, at some of the model's points.

    Points whose names end with an entry of "without" are left out.
    """
    from minivllm import Tap
    from minivllm.core.interfaces.taps import read_only

    if "taps" not in params:
        return []
    requested = params["taps"]
    names = [name for name in points if name.rpartition(".")[2] not in requested.get("without", ())]
    rng, made = random.Random(f"taps {requested['seed']}"), []
    if requested["add"]:
        for name in rng.sample([name for name in names if not read_only(name)], rng.choice([1, 1, 2])):
            vector = np.random.default_rng(rng.randrange(1000)).standard_normal(points[name])
            made.append(Tap(name, add=vector, scale=rng.choice([0.1, 0.5])))
    if requested["read"]:
        made += [
            Tap(name, read=True) for name in rng.sample(names, rng.choice([1, 3])) + names[-1:] * (rng.random() < 0.5)
        ]
    return made


def sampling_params(params: dict[str, Any], vocab: int) -> Any:
    """Return ``SamplingParams`` of plain data.

    Functions are [name, number], and ``logit_bias`` is a list of pairs.  ``taps``, ``adapter`` and ``images`` are left
    out.
    """
    from minivllm import SamplingParams

    made = {name: value for name, value in params.items() if name not in ("taps", "adapter", "images")}
    if "allowed_tokens_fn" in made:
        made["allowed_tokens_fn"] = allowed(*made["allowed_tokens_fn"], vocab)
    if "choose_fn" in made:
        made["choose_fn"] = choose(*made["choose_fn"])
    if "logits_processors" in made:
        made["logits_processors"] = [processor(*f) for f in made["logits_processors"]]
    if "logit_bias" in made:
        made["logit_bias"] = {int(i): float(b) for i, b in made["logit_bias"]}
    return SamplingParams(**made)
