"""Parts that fail on purpose, for tests of what a plug-in's fault may touch.  They are named as targets, so that a
worker process can build them: ``minivllm.testing.faulty:Faulty``."""

from __future__ import annotations

from dataclasses import replace

from minivllm.core.interfaces.sampling import Column, Processor, Row
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA

TARGETS = __name__
FATAL_CHUNK = 63  # tokens; more than a preempted sequence of the tests ever computes again


class Faulty(Processor):
    """Fails where ``params.extra["fault"]`` says (bind, apply or commit); inactive without it."""

    reads = frozenset({"fault"})

    def bind(self, params, prompt_len):
        fault = params.extra.get("fault")
        if fault == "bind":
            raise RuntimeError("boom in bind")
        return None if fault is None else Row(variant=1 + (fault == "commit"))

    def apply(self, logits, rows, state):
        logits[:] = 0
        if rows.variant & 1:
            raise RuntimeError("boom in apply")

    def commit(self, tokens, count, rows, state):
        if count.any():
            raise RuntimeError("boom in commit")


class Unbound(Processor):
    """Never has anything to do."""

    def bind(self, params, prompt_len):
        return None

    def apply(self, logits, rows, state):
        raise AssertionError("called without a row")


class Misshapen(Processor):
    """Binds a value that does not fit its column if ``extra["wide"]``."""

    reads = frozenset({"wide"})

    def columns(self):
        return {"x": Column((2,))}

    def bind(self, params, prompt_len):
        return Row({"x": [0.0] * (3 if params.extra.get("wide") else 2)})

    def apply(self, logits, rows, state):
        logits += state["x"][rows.slots].sum(dim=1, keepdim=True)


class FaultyAttention(Sdpa):
    """Fails in every step that brings a whole prompt of ``FATAL_CHUNK`` tokens."""

    spec = replace(SDPA, impl=f"{__name__}:FaultyAttention")

    def plan(self, meta, key):
        if ((meta.host_q_len == FATAL_CHUNK) & (meta.host_kv_len[0] == FATAL_CHUNK)).any():
            raise RuntimeError("boom in plan")
        super().plan(meta, key)
