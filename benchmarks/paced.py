"""An executor without a model: a step takes ``PACED_MS`` milliseconds (9) and every row draws some token.

What is in front of it is then all that is measured: `benchmarks/serving.py --paced 9` shows what HTTP and the engine's
host side can carry when the device gives that many steps a second.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from pathlib import Path

import numpy as np

from minivllm.core.interfaces.executor import Capacity, Executor
from minivllm.core.interfaces.plan import LENGTH, OVERSHOOT, StepResult

DEPTH = 2  # steps in flight beside the newest


class Paced(Executor):
    """Rows end at their length and at nothing else."""

    def start(self, wiring):
        self.ms = float(os.environ.get("PACED_MS", "9"))
        vocab = json.loads((Path(wiring.model_dir) / "config.json").read_text())["vocab_size"]
        self.tokens = np.random.default_rng(1).integers(10, vocab, 1 << 16).astype(np.int32)
        self.at, self.free_at = 0, 0.0
        self.limit = np.zeros(wiring.max_num_seqs, np.int64)
        self.ended = np.ones(wiring.max_num_seqs, bool)
        self.running: deque[tuple[float, StepResult]] = deque()
        blocks = wiring.num_blocks
        if blocks < 0:
            blocks = wiring.max_num_seqs * (wiring.max_model_len // wiring.block + 1) + 1
        return Capacity((blocks,) * max(len(wiring.groups), 1), (1,) * max(len(wiring.groups), 1), vocab, 0, DEPTH)

    def submit(self, plan):
        if plan.delta.join is not None:
            self.limit[plan.delta.join.slot] = plan.delta.join.end
            self.ended[plan.delta.join.slot] = False
        slots, n = plan.slots[plan.samples], len(plan.samples)
        over = self.ended[slots]
        last = ~over & ((plan.computed + plan.q_len)[plan.samples] + 1 >= self.limit[slots])
        self.ended[slots[last]] = True
        self.at = (self.at + n) % (len(self.tokens) - n)
        flags = np.where(over, OVERSHOOT, np.where(last, LENGTH, 0)).astype(np.uint8)
        result = StepResult(plan.id, slots, self.tokens[self.at : self.at + n], (~over).astype(np.int32), flags)
        self.free_at = max(time.perf_counter(), self.free_at) + self.ms / 1e3
        self.running.append((self.free_at, result))

    def supply(self, step, late):
        raise AssertionError("no late rows here")

    def collect(self, in_flight):
        out = []
        while self.running and (len(self.running) > in_flight or self.running[0][0] <= time.perf_counter()):
            done, result = self.running.popleft()
            time.sleep(max(done - time.perf_counter(), 0.0))
            out.append(result)
        return out

    def alive(self):
        return True

    def stop(self, deadline=10.0):
        self.running.clear()
