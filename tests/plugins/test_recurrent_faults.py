"""Faults in the engine's handling of recurrent states.  Wrong tokens or a failed self-check show each of them.

``tests/testing/test_state_kit.py`` plants faults into a layer.  Here the layer is right and the engine is wrong.
"""

from __future__ import annotations

import pytest
from test_recurrent_models import Case, Oracle, engine

from minivllm.core.engine.checkpoints import Checkpoints
from minivllm.device.worker.recurrent import StateMemory

FAULTS = {}


def fault(cls, name):
    """Return a decorator for the method ``name`` of ``cls``.

    The decorated function replaces it, and gets it as first argument.
    """

    def plant(fn):
        FAULTS[fn.__name__] = cls, name, fn
        return fn

    return plant


@fault(Checkpoints, "publish")
def a_copy_is_kept_under_the_block_before(real, self, slot, table, blocks):
    real(self, slot, table[[0, *range(len(table) - 1)]], blocks)


@fault(Checkpoints, "drop")
def a_copy_outlives_its_block(real, self, block):
    pass


@fault(Checkpoints, "use")
def a_hit_takes_the_copy_of_another_block(real, self, block):
    index = real(self, block)
    return next((other for other in self.of_block.values() if other != index), index)


@fault(Checkpoints, "reserve")
def a_copy_is_written_while_a_block_has_it(real, self, slot, blocks):
    if self.of_block and not self.free:
        self.pending.setdefault(slot, []).append((blocks, index := next(iter(self.of_block.values()))))
        return index
    return real(self, slot, blocks)


@fault(StateMemory, "copy")
def a_fork_begins_without_a_state(real, self, source, to):
    self.valid[to] = self.valid[source]


@fault(StateMemory, "_advance")
def drafts_count_before_the_verdict(real, self, step):
    real(self, step)
    self.valid[step.rows] = step.start + step.cu_q[1:] - step.cu_q[:-1]


@fault(StateMemory, "save")
def a_copy_is_made_a_token_late(real, self, slots, which, position, to):
    real(self, slots, which, position + 1, to)
    self.valid[to] = position.int()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("qwen3_5_text"), "qwen3_5_text")


def work(case):
    """Prompts twice, in turns and at once, with forks, drafts and more copies than there is room for."""
    options = {
        "kvcache_block_size": 4,
        "num_state_checkpoints": 3,
        "num_kvcache_blocks": 96,
        "max_num_batched_tokens": 24,
    }
    llm = engine(case, drafter=Oracle, num_speculative_tokens=2, speculate="always", **options)
    try:
        for _ in range(3):
            case.check(llm)
        case.check(llm, n=2)
        case.check(llm)
    finally:
        llm.close()


@pytest.fixture(autouse=True)
def sequences(case, monkeypatch):
    monkeypatch.setattr(Oracle, "sequences", [prompt + answer for prompt, answer in case.want])


def test_without_a_fault_nothing_is_told(case):
    work(case)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(case, name, monkeypatch):
    cls, method, wrong = FAULTS[name]
    real = getattr(cls, method)
    monkeypatch.setattr(cls, method, lambda self, *args: wrong(real, self, *args))
    with pytest.raises((AssertionError, RuntimeError)):
        work(case)
