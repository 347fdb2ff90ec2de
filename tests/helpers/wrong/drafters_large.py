"""Wrong drafters: long rows, many rows, many drafts, many questions."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.plugins.drafter.ngram import NGram

from .drafters import spec as made

SEAM = "drafter"
LARGE = "test_large_steps_and_long_rows_are_as_small_ones"
FAULTS = {
    "ReadsOnPast64": (LARGE,),
    "LooksPastTheEnd": (LARGE,),
    "EightRows": (LARGE,),
    "CountsBeyondNine": (LARGE,),
    "KeepsHistories": ("test_what_has_ended_leaves_nothing_behind",),
}
RIGHT = ("OnTheHost",)


def spec(name):
    return replace(made(name), impl=f"{__name__}:{name}")


class ReadsOnPast64(NGram):
    """Reads beyond the known tokens of rows with more than 64 tokens."""

    spec = spec("ReadsOnPast64")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        at = (ask.rows.position[:, None] + torch.arange(ask.k)).clamp(max=ask.rows.tokens.shape[1] - 1)
        far = ask.rows.position > 64
        behind = ask.rows.tokens[ask.rows.slots[:, None], at].long()
        return torch.where(far[:, None], behind, tokens), torch.where(far, ask.k, count)


class LooksPastTheEnd(NGram):
    """Takes as many places behind the known tokens as drafts are wanted, where a row may be as long as can be."""

    spec = spec("LooksPastTheEnd")

    def propose(self, ask):
        ask.rows.tokens[ask.rows.slots[:, None], ask.rows.position[:, None] + torch.arange(ask.k)]
        return super().propose(ask)


class EightRows(NGram):
    """The grid has room for eight rows."""

    spec = spec("EightRows")

    def propose(self, ask):
        at = torch.arange(len(ask.slots)) % 8
        return tuple(x[at] for x in super().propose(ask))


class CountsBeyondNine(NGram):
    spec = spec("CountsBeyondNine")

    def propose(self, ask):
        tokens, count = super().propose(ask)
        return tokens, count + (ask.k > 9)


class KeepsHistories(NGram):
    spec = spec("KeepsHistories")

    def propose(self, ask):
        self.requested = [*getattr(self, "requested", ()), ask.rows.history()]
        return super().propose(ask)


class OnTheHost(NGram):
    """Right.  It uses Python lists on the CPU, and returns fewer drafts than requested if there are no more."""

    spec = replace(spec("OnTheHost"), limits={"device": {"cpu"}})

    def propose(self, ask):
        out = torch.zeros(len(ask.slots), ask.k, dtype=torch.int64)
        count = torch.zeros(len(ask.slots), dtype=torch.int64)
        for i, (slot, known) in enumerate(zip(ask.slots.tolist(), ask.known.tolist(), strict=True)):
            ids = ask.rows.tokens[slot, :known].tolist()
            ends = [j for j in range(known - 1) if ids[j] == ids[-1]]
            drafts = ids[ends[-1] + 1 :][: ask.k] if ends else []
            count[i] = len(drafts)
            out[i, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        return out, count
