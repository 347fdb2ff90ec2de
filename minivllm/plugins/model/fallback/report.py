"""A description of a plan for ``minivllm explain``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .plan import Plan


def report(plan: Plan) -> Mapping[str, str]:
    """Return the modules that the engine replaced in the model, by kind.  Kinds without a module are left out."""
    together = {name for names in plan.merged.values() for name in names}
    alone = [name for name in plan.matrices if name not in together]
    turned = [call.module for call in plan.calls if call.rotation is not None]
    in_attention = {name for names in plan.head_norms.values() for name in names}
    notes = {
        "linear": names_of(alone),
        "merged": names_of(plan.merged),
        "mlp": names_of(plan.gated),
        "experts": names_of(plan.experts),
        "norm": names_of(name for name in plan.norms if name not in in_attention),
        "head_norm": names_of(name for names in plan.head_norms.values() for name in names),
        "embedding": names_of(plan.embeddings),
        "head": f"{plan.head}{f', with the weight of {plan.tied}' if plan.tied else ''}",
        "attention": names_of(call.module for call in plan.calls),
        "rope": names_of(turned) or "transformers' own, before attention",
        "kept": names_of(f"{name}.{param}" for name, params in plan.rest.items() for param in params)
        or "no weights: all are the engine's",
    }
    return {word: text for word, text in notes.items() if text}


def names_of(names: Iterable[str]) -> str:
    """Join names, with * for the number of the layer and the number of modules of each name."""
    counts: dict[str, int] = {}
    for name in names:
        short = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
        counts[short] = counts.get(short, 0) + 1
    return ", ".join(name if n == 1 else f"{name} x {n}" for name, n in counts.items())
