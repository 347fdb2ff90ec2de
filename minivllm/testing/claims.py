"""Reading a spec: which values of a fact are claimed, and which lie just outside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from minivllm.registration.spec import ANY, AtLeast, AtMost, Kind, MultipleOf, PluginQuery, Range, Spec, allows

USUAL = {  # a value to take where a limit is ANY
    "architecture": "LlamaForCausalLM", "block": 16, "checkpoint": "none", "device": "cpu", "dim_qk": 64, "dim_v": 64,
    "dtype": "float32", "holds": "float32", "kv_format": "fp32", "model_type": "llama", "queries_per_kv": 1, "sm": 90,
    "tensor_parallel_size": 1,
}  # fmt: skip

ASKED_AT_TIMES = ("sm", "block", "holds")
SIZES = ("dim_qk", "dim_v", "queries_per_kv")  # sets where the layers of a model differ


def inside(limit: Any, usual: Any) -> Any:
    """A value that the limit allows: the usual one if it does."""
    if limit == ANY or allows(limit, usual):
        return usual
    if isinstance(limit, Set):
        return min(limit, key=str)
    if isinstance(limit, MultipleOf):
        return limit.step
    return limit.most if isinstance(limit, AtMost) else limit.least


def outside(limit: Any) -> list[Any]:
    """The nearest values that a limit refuses; none for ANY and for limits of a type of the plug-in's own."""
    if isinstance(limit, Set):
        if limit and all(isinstance(v, (int, float)) for v in limit):
            return [min(limit) - 1, max(limit) + 1]
        return [f"not-{min(limit, key=str)}" if limit else "anything"]
    if isinstance(limit, MultipleOf):
        return [0, -limit.step, *([limit.step + 1] if limit.step > 1 else [])]
    below = [_beyond(limit.least, -1)] if isinstance(limit, (AtLeast, Range)) else []
    above = [_beyond(limit.most, 1)] if isinstance(limit, (AtMost, Range)) else []
    return below + above


def _beyond(edge: float, direction: int) -> float:
    return edge + direction if isinstance(edge, int) else math.nextafter(edge, direction * math.inf)


def claimed(spec: Spec, fact: str, candidates: Iterable[Any]) -> list[Any]:
    """Those of the candidates that the spec claims for a fact."""
    if spec.limits == ANY:
        return list(candidates)
    limit = spec.limits.get(fact)
    return [] if limit is None else [v for v in candidates if allows(limit, v)]


def partly(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The facts as the engine may ask them: without those that it asks only at times, and with sets of sizes."""
    for absent in ((), *((name,) for name in ASKED_AT_TIMES), ASKED_AT_TIMES):
        left = {name: value for name, value in facts.items() if name not in absent}
        yield left
        yield {name: frozenset({value}) if name in SIZES else value for name, value in left.items()}
        yield {name: frozenset({value, 2 * value}) if name in SIZES else value for name, value in left.items()}


def served(spec: Spec, kind: Kind) -> PluginQuery:
    """A request that lies inside every limit of the spec and asks for all that it claims; of a fact for which the spec
    claims no value (a KV format that holds no dtype without loss) it does not speak."""
    limits = {} if spec.limits == ANY else spec.limits
    facts = {fact: limits.get(fact, ANY) for fact in kind.facts}
    claimed = {fact: limit for fact, limit in facts.items() if not isinstance(limit, Set) or limit}
    return PluginQuery({fact: inside(limit, USUAL[fact]) for fact, limit in claimed.items()}, spec.features)
