"""Wrong recurrent layers: the short convolution of LFM2 with one fault each."""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.device.layers.short_conv import ShortConvolution, convolve
from minivllm.plugins.model.lfm2 import Lfm2
from minivllm.plugins.model.spec import LFM2

SEAM = "model"
FORK = "test_a_fork_of_a_state_continues_as_its_own_sequence"
CHECKPOINT = "test_a_sequence_continues_from_a_checkpoint"
DRAFTS = "test_rejected_drafts_leave_no_trace_in_a_state"
WRITES = "test_a_step_writes_only_the_states_of_its_rows"
FOREIGN = "test_a_state_of_other_tokens_gives_nan"
FAULTS = {
    "ForgetsCheckpoints": (CHECKPOINT,),
    "DropsDrafts": (DRAFTS,),
    "ComputesAlikeOnce": (FORK,),
    "ForgetsTheSecondCheckpoint": (CHECKPOINT,),
    "CopiesATokenEarly": (CHECKPOINT,),
    "CopiesDrafts": (DRAFTS,),
    "WritesToStaleCopies": (WRITES,),
    "WritesTheNextState": (WRITES,),
    "TakesAnyState": (FOREIGN,),
}
RIGHT = ("PlainLfm2",)


class Wrong(Lfm2):
    """LFM2 whose convolutions call ``wrong``."""

    def build(self, cfg, parts):
        made = super().build(cfg, parts)
        for module in parts.modules.values():
            if isinstance(module, ShortConvolution):
                module.convolve = self.wrong
        return made

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        return convolve(mixed, weight, bias, ring, step)


def spec(name):
    return replace(LFM2, impl=f"{__name__}:{name}", priority=0)


def plain(step):
    """The rows that have no drafts and lack no tokens, bool [R, 1]."""
    return ((step.behind == 0) & ~step.drafts)[:, None]


class PlainLfm2(Wrong):
    spec = spec("PlainLfm2")


class ForgetsCheckpoints(Wrong):
    spec = spec("ForgetsCheckpoints")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        return convolve(mixed, weight, bias, ring, replace(step, save_at=step.save_at.masked_fill(plain(step), -1)))


class ForgetsTheSecondCheckpoint(Wrong):
    spec = spec("ForgetsTheSecondCheckpoint")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        first = torch.tensor([True, False])
        return convolve(mixed, weight, bias, ring, replace(step, save_at=torch.where(first, step.save_at, -1)))


class CopiesATokenEarly(Wrong):
    spec = spec("CopiesATokenEarly")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        early = torch.where(plain(step), step.save_at - 1, step.save_at)
        return convolve(mixed, weight, bias, ring, replace(step, save_at=early))


class DropsDrafts(Wrong):
    spec = spec("DropsDrafts")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        before = ring[step.rows]
        out = convolve(mixed, weight, bias, ring, step)
        for row in step.drafts.nonzero()[:, 0].tolist():
            place = int(step.start[row]) % ring.shape[1]
            before[row, place] = ring[step.rows[row], place]
            ring[step.rows[row]] = before[row]
        return out


class CopiesDrafts(Wrong):
    spec = spec("CopiesDrafts")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        return convolve(mixed, weight, bias, ring, replace(step, drafts=torch.zeros_like(step.drafts)))


class ComputesAlikeOnce(Wrong):
    """Rows that begin at the same position have the state of the first of them."""

    spec = spec("ComputesAlikeOnce")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        rows = step.rows.clone()
        for row, start in enumerate(step.start.tolist()):
            rows[row] = rows[step.start.tolist().index(start)] if start else rows[row]
        return convolve(mixed, weight, bias, ring, replace(step, rows=rows))


class WritesToStaleCopies(Wrong):
    spec = spec("WritesToStaleCopies")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        out = convolve(mixed, weight, bias, ring, step)
        ring[step.save_to[step.save_at < 0]] = 0
        return out


class WritesTheNextState(Wrong):
    """Pads the rows to an even number, with a state that is none of theirs."""

    spec = spec("WritesTheNextState")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        out = convolve(mixed, weight, bias, ring, step)
        if len(step.rows) == 3:
            ring[step.rows.max() - 5] = 0
        return out


class TakesAnyState(Wrong):
    spec = spec("TakesAnyState")

    @staticmethod
    def wrong(mixed, weight, bias, ring, step):
        return convolve(mixed, weight, bias, ring, replace(step, behind=step.behind.clamp(min=0)))
