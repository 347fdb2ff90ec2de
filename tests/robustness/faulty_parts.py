"""Parts that fail as an environment variable demands.  They are named as targets, so that the engine's process can
build them.

MINIVLLM_TEST_FAULT="forward:raise@10"    attention.plan, call 10, counted from the first request on
                    "forward:memory@10"   the same with MemoryError
                    "forward:raise@*"     every call
                    "policy:raise@5", "policy:hang@5"
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from typing import Any

from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA
from minivllm.plugins.scheduler.fcfs import Fcfs

VARIABLE = "MINIVLLM_TEST_FAULT"


class Fault:
    def __init__(self, part: str) -> None:
        mine, _, what = os.environ.get(VARIABLE, "").partition(":")
        self.kind, _, at = what.partition("@") if mine == part else ("", "", "")
        self.at = at
        self.calls = 0

    def call(self) -> None:
        self.calls += 1
        if not self.kind or (self.at != "*" and self.calls != int(self.at)):
            return
        print(f"fault {self.kind} in call {self.calls}", file=sys.stderr, flush=True)
        if self.kind == "hang":
            time.sleep(600)
        raise MemoryError("planned: out of memory") if self.kind == "memory" else RuntimeError("planned fault")


class Attention(Sdpa):
    spec = replace(SDPA, impl=f"{__name__}:Attention")

    def plan(self, meta: Any, key: Any) -> None:
        if not hasattr(self, "_fault"):
            self._fault = Fault("forward")
        self._fault.call()
        super().plan(meta, key)


class Policy(Fcfs):
    def __init__(self, options: Any, ctx: Any) -> None:
        super().__init__(options, ctx)
        self._fault = Fault("policy")

    def order(self, head: Any, running: Any, now: float) -> Any:
        self._fault.call()
        return super().order(head, running, now)
