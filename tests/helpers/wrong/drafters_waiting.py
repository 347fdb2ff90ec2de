"""Drafters that wait for the device, each by another call."""

from __future__ import annotations

import numpy as np
import torch

from minivllm.plugins.drafter.ngram import NGram
from minivllm.registration.spec import ANY, Spec

SEAM = "drafter"
WAITS = "test_it_does_not_wait_for_the_device"
CALLS = {
    "Int": lambda t: int(t[0]),
    "Item": lambda t: t[0].item(),
    "Float": lambda t: float(t[0]),
    "Bool": lambda t: bool((t > 0).all()),
    "Index": lambda t: range(1000)[t[0]],
    "ToList": lambda t: t.tolist(),
    "Cpu": lambda t: t.cpu(),
    "ToCpu": lambda t: t.to("cpu"),
    "ToDevice": lambda t: t.to(device="cpu", dtype=torch.int32),
    "Numpy": lambda t: t.numpy(),
    "AsArray": lambda t: np.asarray(t),
    "NonZero": lambda t: t.nonzero(),
    "Where": lambda t: torch.where(t > 3),
    "Mask": lambda t: t[t > 3],
    "Unique": lambda t: t.unique(),
    "Equal": lambda t: torch.equal(t, t),
    "Slice": lambda t: t[: t[0]],
    "Repeat": lambda t: t.repeat_interleave(t),
    "Loop": lambda t: [x for x in t if x > 3],
    "Max": lambda t: max(t),
}
FAULTS = dict.fromkeys(CALLS, (WAITS,))
RIGHT = ("AsksTheHost",)


def spec(name: str) -> Spec:
    options = "minivllm.plugins.drafter.options:NGramOptions"
    return Spec(f"{__name__}:{name}", (1, 0), "a planted fault", limits={"device": ANY}, options=options)


class AsksTheHost(NGram):
    """Right.  It reads columns that are on the host, and uses a mask."""

    spec = spec("AsksTheHost")

    def propose(self, ask):
        assert int(ask.known.max()) > 0 and ask.slots.tolist()
        tokens, count = super().propose(ask)
        count = count.clone()
        count[ask.rows.position < 2] = 0
        return tokens.to(ask.rows.slots.device), count


def planted(name: str) -> type:
    def propose(self, ask):
        CALLS[name](ask.rows.position)
        return NGram.propose(self, ask)

    return type(name, (NGram,), {"spec": spec(name), "propose": propose, "__module__": __name__})


globals().update({name: planted(name) for name in CALLS})
