"""Values inside and just outside of the limits that a spec claims, and engine queries that contain them.

A fact is a property of an engine's configuration, such as its dtype.  The limit of a fact is the set of values that
the plug-in serves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from minivllm.registration.spec import ANY, AtLeast, AtMost, Kind, MultipleOf, PluginQuery, Range, Spec, allows

USUAL = {  # fact -> value that is used if the limits allow it
    "architecture": "LlamaForCausalLM", "block": 16, "checkpoint": "none", "device": "cpu", "dim_qk": 64, "dim_v": 64,
    "dtype": "float32", "holds": "float32", "kv_format": "fp32", "model_type": "llama", "queries_per_kv": 1, "sm": 90,
    "tensor_parallel_size": 1, "format": "folder", "tokenizer_class": "LlamaTokenizer",
}  # fmt: skip

# Facts that the engine leaves out of some of its queries.  The function ``check`` of a spec must answer without them,
# and so ``partly`` yields facts without them too.
OPTIONAL = ("sm", "block", "holds")
# facts whose value in a query is a set of sizes if the layers of a model differ
SIZES = ("dim_qk", "dim_v", "queries_per_kv")


def inside(limit: Any, usual: Any) -> Any:
    """Return a value that the limit allows, which is ``usual`` if possible."""
    if limit == ANY or allows(limit, usual):
        return usual
    if isinstance(limit, Set):
        return min(limit, key=str)
    if isinstance(limit, MultipleOf):
        return limit.step
    if isinstance(limit, AtMost):
        return limit.most
    return limit.least


def outside(limit: Any) -> list[Any]:
    """Return the nearest values that a limit refuses.

    The list is empty for ANY and for a limit whose type the plug-in defines itself.
    """
    if isinstance(limit, Set):
        return _outside_set(limit)
    if isinstance(limit, MultipleOf):
        values = [0, -limit.step]
        if limit.step > 1:
            return [*values, limit.step + 1]
        return values
    values = []
    if isinstance(limit, (AtLeast, Range)):
        values.append(_beyond(limit.least, -1))
    if isinstance(limit, (AtMost, Range)):
        values.append(_beyond(limit.most, 1))
    return values


def _outside_set(limit: Set[Any]) -> list[Any]:
    """Return values near a set that are not in it."""
    if not limit:
        return ["anything"]
    if all(isinstance(value, (int, float)) for value in limit):
        return [min(limit) - 1, max(limit) + 1]
    return [f"not-{min(limit, key=str)}"]


def _beyond(edge: float, direction: int) -> float:
    """Return the number next to ``edge``, above it for direction 1 and below it for -1."""
    if isinstance(edge, int):
        return edge + direction
    return math.nextafter(edge, direction * math.inf)


def claimed(spec: Spec, fact: str, candidates: Iterable[Any]) -> list[Any]:
    """Return the candidates that the spec claims for a fact."""
    if spec.limits == ANY:
        return list(candidates)
    limit = spec.limits.get(fact)
    if limit is None:
        return []
    return [value for value in candidates if allows(limit, value)]


def partly(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the facts in all forms in which a query of the engine may contain them.

    The facts of ``OPTIONAL`` may be absent, alone or together.  A fact of ``SIZES`` may be a set of one or two sizes.
    """
    absences = [(), *((name,) for name in OPTIONAL), OPTIONAL]
    for absent in absences:
        present = {name: value for name, value in facts.items() if name not in absent}
        sizes = {name: value for name, value in present.items() if name in SIZES}
        yield present
        one_size = {name: frozenset({size}) for name, size in sizes.items()}
        yield present | one_size
        two_sizes = {name: frozenset({size, 2 * size}) for name, size in sizes.items()}
        yield present | two_sizes


def served(spec: Spec, kind: Kind) -> PluginQuery:
    """Return a query that lies inside every limit of the spec and requires every feature that it claims.

    The query omits a fact for which the spec claims no value, such as ``holds`` of a KV format that stores no dtype
    without loss.
    """
    limits = {} if spec.limits == ANY else spec.limits
    facts = {}
    for fact in kind.facts:
        limit = limits.get(fact, ANY)
        if not isinstance(limit, Set) or limit:
            facts[fact] = inside(limit, USUAL[fact])
    return PluginQuery(facts, spec.features)
