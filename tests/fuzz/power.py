"""Counts of hard situations in a run, because a run without preemption does not test preemption."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .adapters import method_of
from .cases import Case
from .drive import Answer, Run

EXPECTED = {  # situations that a run of some hundred configurations must contain, with those of a GPU
    "any": ("preemptions", "prefix hits", "partial hits", "evictions", "late rows", "host rows", "forks", "beams",
            "drafts accepted", "drafts rejected", "abandoned", "chunked prompts", "log-probabilities", "next turns",
            "resets", "delays", "side by side", "steps ahead", "early stops", "values read", "steered",
            "adapters", "adapters replaced", "adapters: lora", "adapters: ia3", "adapters: steering",
            "compressions", "loads from tiers", "images", "images again", "images beside tiers", "images with adapters",
            "images with drafts",
            "weights: other weights", "weights: mixed weights",
            "weights: pause", "weights: update", "weights: keep", "weights: refused", "weights: sleep"),
    "cuda": ("captured decode steps", "captured mixed steps", "captured draws", "captured steps with taps"),
}  # fmt: skip


def count(case: Case, driven: Run, prompts: dict[int, list[int]]) -> Counter[str]:
    met: Counter[str] = Counter()
    for stats in driven.stats:
        met["preemptions"] += stats["preemptions"]
        met["prefix hits"] += stats["prefix_hits"]
        met["partial hits"] += stats["prefix_hits_copied"]
        met["evictions"] += stats["evictions"]
        met["overshoot tokens"] += stats["overshoot_tokens"]
        met["steps"] += stats.get("steps", 0)
        met["images again"] += stats.get("images", {}).get("reused", 0)
        loads = sum(tier["loads"] for tier in stats.get("tiers", ()))
        met["loads from tiers"] += loads
        met["images beside tiers"] += loads if "images" in stats else 0
        met["compressions"] += stats.get("compression", {}).get("compressions", 0)
        met["adapters replaced"] += stats.get("adapters", {}).get("replaced_on_device", 0)
    met["captured decode steps"], met["captured mixed steps"] = driven.captured["decode"], driven.captured["mixed"]
    met["captured draws"] = driven.captured["draw"]
    met["captured steps with taps"] = driven.captured["tapped"]
    met.update({f"weights: {kind}": count for kind, count in driven.changed.items()})
    met["side by side"] += len(case.engines) > 1
    met["resets"] += len(case.resets)
    met["delays"] += case.late > 0
    met["steps ahead"] += sum((e["run_ahead"] or 0) > 0 for e in case.engines)
    met["not batch invariant"] += sum(not e["batch_invariant"] for e in case.engines)
    for i, (ask, answer) in enumerate(zip(case.asks, driven.answers, strict=True)):
        met += _request(ask.params, answer)
        met["next turns"] += ask.after is not None
        met["abandoned"] += answer.left
        met["chunked prompts"] += len(prompts[i]) > case.engines[ask.engine]["max_num_batched_tokens"]
    return +met


def _request(params: dict[str, Any], answer: Answer) -> Counter[str]:
    n = sum(len(o.tokens) for o in answer.outputs) or sum(map(len, answer.pieces.values()))
    met: Counter[str] = Counter(tokens=n)
    met["late rows"] = n * bool({"allowed_tokens_fn", "structured_outputs"} & params.keys())
    met["host rows"] = n * bool({"choose_fn", "logits_processors"} & params.keys())
    met["forks"] = max(params.get("n", 1), params.get("best_of") or 1) - 1 if "beam_width" not in params else 0
    met["beams"] = int("beam_width" in params)
    met["drafts accepted"] = answer.accepted
    met["drafts rejected"] = answer.drafted - answer.accepted
    met["log-probabilities"] = int("logprobs" in params) + int("prompt_logprobs" in params)
    met["early stops"] = sum(o.finish == "stop" for o in answer.outputs)
    met["values read"] = sum(len(v) for o in answer.outputs for v in (o.taps or {}).values())
    met["steered"] = int(params.get("taps", {}).get("add", False))
    met["images"] = len(params.get("images", ()))
    met["images with drafts"] = answer.drafted if "images" in params else 0
    met["adapters"] = int("adapter" in params)
    met["images with adapters"] = int("adapter" in params and "images" in params)
    if "adapter" in params:
        met[f"adapters: {method_of(params['adapter'])}"] = 1
    met["errors for good"] = int(answer.error is not None)
    return met


def lacking(met: Counter[str], device: str) -> list[str]:
    """Return the situations that did not occur."""
    return [name for kind in ("any", device) for name in EXPECTED.get(kind, ()) if not met[name]]
