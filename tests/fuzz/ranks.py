"""Cases for executors of several ranks: how many share the model of each engine, drawn for the seed."""

from __future__ import annotations

import random
from dataclasses import replace

from .cases import Case
from .configs import ROUTED
from .models import SHAPES

MOST = 4  # ranks of a machine with two cores
POCKET = {"num_attention_heads": 4, "num_key_value_heads": 2}
OWN = ("q", "k", "v")  # points of a layer that no rank has whole


def sizes(model: str, most: int = MOST) -> list[int]:
    """How many ranks can share a model, of at most ``most``.  Where a router may send a token elsewhere for a last bit
    it is one."""
    if model in ROUTED:
        return [1]
    shape = SHAPES.get(model, POCKET)
    heads = shape["num_attention_heads"]
    kv_heads = shape.get("num_key_value_heads", heads)
    return [n for n in range(1, most + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def shared(case: Case, executor: str, most: int = MOST) -> Case:
    """The case with ranks of an executor.  What they would be refused is left out: bits that do not go by the batch,
    points of which each has a part.  Weights that are quantized share by share are other weights, so none are."""
    engines = []
    for i, options in enumerate(case.engines):
        rng = random.Random(f"ranks {case.seed} {i}")
        able = sizes(options["model"], most)
        size = rng.choice([n for n in able if n > 1] or able)
        how: dict[str, object] = {"checked": rng.random() < 0.5, "timeout": 60}
        if executor == "ray":
            how["transport"] = rng.choice(["auto", "tcp"])
        checked = {"name": executor, "options": how}
        more = {"batch_invariant": False, "quantizer": "none"} if size > 1 else {}
        engines.append({**options, "executor": checked, "tensor_parallel_size": size, **more})
    asks = []
    for ask in case.asks:
        params = dict(ask.params)
        if "taps" in params and engines[ask.engine]["tensor_parallel_size"] > 1:
            params["taps"] = {**params["taps"], "without": OWN}
        asks.append(replace(ask, params=params))
    return replace(case, engines=engines, asks=asks)
