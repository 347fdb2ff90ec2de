"""Plug-ins that raise on purpose, for tests of the effects of a failure, and a processor that counts tokens.

A worker process imports them by names such as ``minivllm.testing.faulty:Faulty``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minivllm.core.interfaces.sampling import Column, Processor, Row
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA
from minivllm.plugins.sampler.default import DefaultSampler

TARGETS = __name__
# number of tokens of a prompt with a failing step; a preempted sequence of the tests never computes as many again
FATAL_CHUNK = 63


class Faulty(Processor):
    """A processor that raises in the method that ``params.extra["fault"]`` names: bind, apply or commit."""

    reads = frozenset({"fault"})

    def bind(self, params, prompt_len):
        fault = params.extra.get("fault")
        if fault == "bind":
            raise RuntimeError("boom in bind")
        if fault is None:
            return None
        return Row(variant=1 + (fault == "commit"))

    def apply(self, logits, rows, state):
        logits[:] = 0
        if rows.variant & 1:
            raise RuntimeError("boom in apply")

    def commit(self, tokens, count, rows, state):
        if count.any():
            raise RuntimeError("boom in commit")


FIRST_TALLY = 3  # first generated token of a row that counts its tokens


class CountingProcessor(Processor):
    """A processor that makes rows with ``params.extra["tally"]`` draw token 3, then 4, 5 ...

    It counts the tokens that ``commit`` receives.  The count is kept when a row is preempted, although ``commit`` then
    receives the tokens of the row again.
    """

    reads = frozenset({"tally"})

    def columns(self):
        return {"count": Column((), "int64", kept=True)}

    def bind(self, params, prompt_len):
        if params.extra.get("tally"):
            return Row({"count": 0})
        return None

    def apply(self, logits, rows, state):
        token = FIRST_TALLY + state["count"][rows.slots]
        logits.scatter_(1, token[:, None], 1e4)

    def commit(self, tokens, count, rows, state):
        state["count"].index_add_(0, rows.slots, count.long())  # a row that is in the step twice adds 2


class Unbound(Processor):
    """A processor whose ``bind`` returns no row for any request, so that ``apply`` must not be called."""

    def bind(self, params, prompt_len):
        return None

    def apply(self, logits, rows, state):
        raise AssertionError("apply was called, although no request has a row")


class Misshapen(Processor):
    """A processor whose values do not fit its column for rows with ``extra["wide"]``."""

    reads = frozenset({"wide"})

    def columns(self):
        return {"x": Column((2,))}

    def bind(self, params, prompt_len):
        return Row({"x": [0.0] * (3 if params.extra.get("wide") else 2)})

    def apply(self, logits, rows, state):
        logits += state["x"][rows.slots].sum(dim=1, keepdim=True)


class FaultyAttention(Sdpa):
    """An attention back end that raises in each step with a complete prompt of ``FATAL_CHUNK`` tokens."""

    spec = replace(SDPA, impl=f"{__name__}:FaultyAttention")

    def plan(self, meta, key):
        if ((meta.host_q_len == FATAL_CHUNK) & (meta.host_kv_len[0] == FATAL_CHUNK)).any():
            raise RuntimeError("boom in plan")
        super().plan(meta, key)


class FaultySampler(DefaultSampler):
    """A sampler that draws ``extra["token"]``, which may be outside the vocabulary.

    With ``extra["misshapen"]``, its output has a wrong shape.
    """

    reads = DefaultSampler.reads | {"token", "misshapen"}

    def columns(self):
        return {**super().columns(), "token": Column(dtype="int64", fill=-7), "misshapen": Column()}

    def bind(self, params, prompt_len):
        row = super().bind(params, prompt_len)
        own = {}
        for name in ("token", "misshapen"):
            if name in params.extra:
                own[name] = params.extra[name]
        return Row({**row.values, **own}, row.variant)

    def draw(self, logits, rows, state, out):
        super().draw(logits, rows, state, out)
        token = state["token"][rows.slots]
        out.tokens.copy_(torch.where(token == -7, out.tokens, token))
        if state["misshapen"][rows.slots].any():
            out.tokens = out.tokens[:, None].float()
