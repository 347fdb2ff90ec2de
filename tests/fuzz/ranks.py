"""Cases for executors of several ranks, whose number for each engine is drawn for the seed."""

from __future__ import annotations

import random
from dataclasses import replace

from .cases import Case
from .configs import ROUTED
from .models import SHAPES

MOST = 4  # largest number of ranks on a machine with two cores
POCKET = {"num_attention_heads": 4, "num_key_value_heads": 2}
OWN = ("q", "k", "v")  # points of a layer of which each rank has a part
ALONE = ("suffix", "mtp", "eagle3")  # drafters that several ranks refuse


def sizes(model: str, most: int = MOST) -> list[int]:
    """Return the numbers of ranks that can share a model, up to ``most``.

    It is 1 for models whose router may choose another expert for a last bit.
    """
    if model in ROUTED:
        return [1]
    shape = SHAPES.get(model, POCKET)
    heads = shape["num_attention_heads"]
    kv_heads = shape.get("num_key_value_heads", heads)
    return [n for n in range(1, most + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def shared(case: Case, executor: str, most: int = MOST) -> Case:
    """Return the case with ranks of an executor.

    Options that the executor refuses are left out, which are batch invariance and points of which each rank has a part.
    Quantization is left out, because weights that are quantized in shares differ.
    """
    engines = []
    for i, options in enumerate(case.engines):
        rng = random.Random(f"ranks {case.seed} {i}")
        able = sizes(options["model"], most)
        size = rng.choice([n for n in able if n > 1] or able)
        how: dict[str, object] = {"checked": rng.random() < 0.5, "timeout": 60}
        if executor == "ray":
            how["transport"] = rng.choice(["auto", "tcp"])
        checked = {"name": executor, "options": how}
        alone: dict[str, object] = {"batch_invariant": False, "quantizer": "none", "captured_drafts": "auto"}
        more = alone if size > 1 else {}
        if size > 1 and options.get("drafter") in ALONE:
            more["drafter"] = "ngram"
        engines.append({**options, "executor": checked, "tensor_parallel_size": size, **more})
    asks = []
    for ask in case.asks:
        params = dict(ask.params)
        if "taps" in params and engines[ask.engine]["tensor_parallel_size"] > 1:
            params["taps"] = {**params["taps"], "without": OWN}
        asks.append(replace(ask, params=params))
    return replace(case, engines=engines, asks=asks)
