"""A description of a plan for ``minivllm explain``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

from .plan import Plan


def report(plan: Plan) -> Mapping[str, str]:
    """Return the modules that the engine replaced in the model, by kind of replacement.

    Kinds without a module are left out.
    """
    merged = set(chain.from_iterable(plan.merged.values()))
    head_norms = list(chain.from_iterable(plan.head_norms.values()))
    norms = [name for name in plan.norms if name not in head_norms]
    rotated = [call.module for call in plan.calls if call.rotation is not None]
    kept = [f"{name}.{param}" for name, params in plan.rest.items() for param in params]

    notes = {}
    notes["linear"] = names_of(name for name in plan.matrices if name not in merged)
    notes["merged"] = names_of(plan.merged)
    notes["mlp"] = names_of(plan.gated)
    notes["experts"] = names_of(plan.experts)
    notes["norm"] = names_of(norms)
    notes["head_norm"] = names_of(head_norms)
    notes["embedding"] = names_of(plan.embeddings)
    notes["head"] = plan.head
    if plan.tied:
        notes["head"] += f", with the weight of {plan.tied}"
    notes["attention"] = names_of(call.module for call in plan.calls)
    notes["rope"] = names_of(rotated) or "transformers' own, before attention"
    notes["kept"] = names_of(kept) or "no weights: all are the engine's"
    return {kind: text for kind, text in notes.items() if text}


def names_of(names: Iterable[str]) -> str:
    """Return the names of modules in one text, with * for the index of the layer and the count of each such name."""
    counts = Counter(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    texts = []
    for name, count in counts.items():
        texts.append(name if count == 1 else f"{name} x {count}")
    return ", ".join(texts)
