"""Engines whose captured CPU steps are compared, step by step, with the same steps as separate operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from devices import DEVICE

from minivllm import LLM, SamplingParams
from minivllm.device.layers.native_steps import NativeSteps
from minivllm.device.native import library, program
from minivllm.device.worker.runner import Runner
from minivllm.device.worker.running import Running
from minivllm.plugins.model import spec as families
from minivllm.registration.spec import Spec
from minivllm.testing.tiny import quiet, save, small_config, tiny_model

needs_library = pytest.mark.skipif(library.load() is None, reason=f"the native part: {library.why_not()}")
HERE = [name for name in ("avx2", "avx512") if library.ISAS.index(name) <= library.ISAS.index(library.isa())]
NAMED = [s for s in vars(families).values() if isinstance(s, Spec) and s.listed("architecture")]
FAMILIES = [s.listed("architecture")[0] for s in NAMED]
SIZES: dict[str, Any] = {
    "skip_tokenizer_init": True, "device": DEVICE, "dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64,
    "num_kvcache_blocks": 64, "kvcache_block_size": 8 if DEVICE == "cpu" else 16, "max_model_len": 128,
}  # fmt: skip


@pytest.fixture(params=HERE)
def each_isa(request, monkeypatch):
    """Run a test with the kernels of each instruction set that this CPU and the environment allow."""
    monkeypatch.setattr(program, "isa", lambda: request.param)
    return request.param


def prompt(n: int, seed: int = 0, vocab: int = 61) -> list[int]:
    return [(7 * i * i + 3 * i + 5 + 11 * seed) % vocab for i in range(n)]


def checkpoint(path: Path, architecture: str, **values: Any) -> str:
    """Write a tiny random model of an architecture of transformers, and return its folder."""
    cls = getattr(transformers, architecture)
    with quiet():
        return str(save(tiny_model(small_config(cls.config_class, **values), 0, cls), path))


def engine(path: str, **options: Any) -> LLM:
    return LLM(model=path, **{**SIZES, **options})


def ask(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[list[int]]]:
    """Return the tokens of each sample of each prompt."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 32, "ignore_eos": True, **params})
    outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [[o.token_ids for o in out.outputs] for out in outs]


@dataclass
class Watched:
    """Counts and largest differences of the captured steps."""

    steps: int = 0  # steps whose FORWARD ran in the native part, and that draw
    draws: int = 0  # steps whose FORWARD ran as separate operations
    others: int = 0  # tokens of each native step
    tokens: list[int] = field(default_factory=list)  # of each native step
    mixed: int = 0  # native steps with both chunks and decodes
    drafted: int = 0  # native steps with drafts
    hidden: float = 0.0  # largest difference of hidden states, relative to the largest value of a step
    logits: float = 0.0
    states: float = 0.0  # largest difference of recurrent states and their rings


@contextmanager
def watched(compare: bool = True) -> Iterator[Watched]:
    """Let engines that run in this context compute each captured step again, by separate operations, before
    they draw.
    """
    seen, forward, sample, native = Watched(), Runner.forward, NativeSteps.sample, NativeSteps.forward
    before: list[list[torch.Tensor]] = [[]]

    def kept(self: NativeSteps, plan: Any) -> Any:
        before[0] = [tensor.clone() for tensor in states_of(self.state)]
        return native(self, plan)

    def both(self: Runner, plan: Any) -> Running:
        running = forward(self, plan)
        if not running.native:
            seen.others += 1
            return running
        q_len = running.plan.q_len
        seen.tokens.append(int(q_len.sum()))
        seen.mixed += int((q_len == 1).any() and (q_len > 1).any())
        seen.drafted += int(running.plan.draft.any())
        if running.hidden is None:
            return running
        seen.steps += 1
        if compare:
            with torch.inference_mode():
                other, after = Running(running.plan), [tensor.clone() for tensor in states_of(self.state)]
                replace(self.state, before[0])
                self._forward(other, running.plan, lambda seam, call, *args: call(*args))
                for now, then in zip(states_of(self.state), after, strict=True):
                    here = slice(0, len(now) - int(self.state.recurrent.checkpoints) - 1)  # the slots
                    seen.states = max(seen.states, _difference(then[here], now[here]))
                replace(self.state, after)
                got, want = running.hidden, other.hidden
                seen.hidden = max(seen.hidden, _difference(got, want))
                seen.logits = max(seen.logits, _difference(self.model.logits(got), self.model.logits(want)))
        return running

    def draw(self: NativeSteps, plan: Any) -> torch.Tensor:
        seen.draws += 1
        return sample(self, plan)

    Runner.forward, NativeSteps.sample, NativeSteps.forward = both, draw, kept
    try:
        yield seen
    finally:
        Runner.forward, NativeSteps.sample, NativeSteps.forward = forward, sample, native


def states_of(state: Any) -> list[torch.Tensor]:
    """Return the tensors of recurrent states, and the number of tokens that each state covers."""
    memory = state.recurrent
    return [] if memory is None else [memory.valid, *(x for layer in memory.memory for x in layer.values())]


def replace(state: Any, tensors: list[torch.Tensor]) -> None:
    for tensor, other in zip(states_of(state), tensors, strict=True):
        tensor.copy_(other)


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape and got.dtype == want.dtype and bool(want.isfinite().all())
    found = float((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-30))
    return found if found == found else float("inf")  # a NaN counts as the largest difference
