"""The captures of an engine, rehearsed for a Hopper where none is; run by worker/test_gradual_captures.py.

Nothing is launched: kernels are queued, and a few of them are compiled at the end.  New memory is filled with values
that no index may have, so a rehearsal that used one would fail.  The last line has the numbers of variants of the start
and of all captures."""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
from compiled_ahead import poison
from compiled_loops import Hopper
from triton.runtime import driver

from minivllm.device.kernels import launch

launch.capability = lambda device: 9  # type: ignore[assignment]
launch.pdl = lambda like: {"PDL": True, "launch_pdl": True}

from minivllm import LLM  # noqa: E402, I001
from minivllm.device.kernels import ahead  # noqa: E402
from minivllm.device.worker import build, graphs, runner, start  # noqa: E402
from minivllm.plugins.attention import spec  # noqa: E402
from minivllm.plugins.attention.triton_backend import Triton  # noqa: E402
from minivllm.testing.tiny import tiny_dir  # noqa: E402


LIMITS = {fact: limit for fact, limit in spec.TRITON.limits.items() if fact != "sm"}


class OnCpu(Triton):
    spec = replace(spec.TRITON, impl="__main__:OnCpu", limits={**LIMITS, "device": {"cpu"}}, needs=())


class Held:
    """In the place of threads: compilations wait until the test runs them."""

    def __init__(self, count, thread_name_prefix=""):
        self.calls = []

    def submit(self, call, *args):
        self.calls.append((call, args))
        return Future()

    def shutdown(self, **options):
        pass


class Recorder:
    """In the place of ``GraphRecorder``: it records nothing."""

    launch_ms = 1.0

    def rehearse(self, run):
        run()

    def capture(self, run):
        return None, None


def main(folder: Path) -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    made = []

    class Ahead(ahead.CompileAhead):
        def __init__(self, *args):
            super().__init__(*args)
            self.names = set()
            made.append(self)

        def _queue(self, function, key, compile_it):
            self.names.add(function._fn_name.rpartition(".")[2])
            super()._queue(function, key, compile_it)

        def wait(self, jobs):
            assert jobs

    ahead.ThreadPoolExecutor, ahead.CompileAhead = Held, Ahead  # type: ignore[misc, assignment]
    start._reason_against = lambda wiring, kernels: None
    ahead.blank = poison
    runner.has_kernels = build.has_kernels = lambda wiring: True
    graphs.GraphRecorder, graphs.replay_ms = Recorder, lambda graph: 1.0  # type: ignore[misc, assignment]
    graphs.Graphs._draw_once = lambda self, variant: None  # type: ignore[method-assign]
    shape = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    tiny_dir(folder, "qwen3", vocab_size=1024, **shape)
    options = dict(skip_tokenizer_init=True, dtype="bfloat16", device="cpu", num_kvcache_blocks=60, max_model_len=256)
    options |= dict(attention="__main__:OnCpu", allow_targets=["__main__"], max_num_seqs=40)
    options |= dict(graph_captures="gradual", compile_ahead=True)
    with LLM(model=str(folder), max_num_batched_tokens=512, **options) as llm:
        worker_runner = llm.engine.executor.runner
        steps = worker_runner.graphs
        assert steps is not None, worker_runner.worker.notes
        first = len(made[0].jobs)
        state = worker_runner.state
        columns = [x.clone() for x in (state.tokens, state.known, state.table)]
        with torch.inference_mode():
            for shape in steps.later.queue:
                made[0].rehearse(partial(steps.rehearse, shape))
        for before, now in zip(columns, (state.tokens, state.known, state.table), strict=True):
            assert torch.equal(before, now)
        assert all((slots == steps.spare).all() for slots in (b.slots for b in steps.buffers.values()))
        calls = made[0].pool.calls
        assert len(calls) == len(made[0].jobs)
        print(*sorted(made[0].names))
        for call, args in calls[:: max(1, len(calls) // 6)]:
            call(*args)
        print(first, len(calls))


if __name__ == "__main__":
    main(Path(tempfile.mkdtemp()))
