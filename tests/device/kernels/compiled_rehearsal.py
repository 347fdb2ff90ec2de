"""The captures of an engine, rehearsed for a Hopper where none is; run by worker/test_gradual_captures.py.

Nothing is launched: kernels are queued, and a few of them are compiled at the end.  New memory is filled with values
that no index may have, so a rehearsal that used one would fail.  No step of an ordinary request, with all its layers,
may need a kernel that was not queued before the engine was ready.  The kernel for a Hopper gives what it should if the
second argument is "fit": each shape is then rehearsed once.  The last line has the number of kernels."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import numpy as np
import torch
from compiled_ahead import poison
from compiled_loops import Hopper
from triton.runtime import driver

from minivllm.device.kernels import launch

launch.capability = lambda device: 9  # type: ignore[assignment]
launch.pdl = lambda like: {"PDL": True, "launch_pdl": True}

from minivllm import LLM, SamplingParams  # noqa: E402, I001
from minivllm.core.interfaces.attention import GraphKey  # noqa: E402
from minivllm.device.kernels import ahead  # noqa: E402
from minivllm.device.worker import build, graphs, runner, start  # noqa: E402
from minivllm.device.worker.captured import Drawn, SampleOperations  # noqa: E402
from minivllm.device.worker.trial_launches import separate_step  # noqa: E402
from minivllm.plugins.attention import spec, triton_backend  # noqa: E402
from minivllm.plugins.attention.triton_backend import Triton  # noqa: E402
from minivllm.plugins.processor import triton_penalties  # noqa: E402
from minivllm.plugins.processor.penalties import Penalties  # noqa: E402
from minivllm.plugins.sampler.default import DefaultSampler  # noqa: E402
from minivllm.registry import build_part  # noqa: E402
from minivllm.testing.tiny import tiny_dir  # noqa: E402


LIMITS = {fact: limit for fact, limit in spec.TRITON.limits.items() if fact != "sm"}
LIMITS_OF_ROWS = ({}, {"top_p": 0.8}, {"top_k": 40}, {"top_k": 500}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.5})
EVENTS: list[str] = []  # "wait" for compilations and "capture", in order


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

    def capture(self, run, before=None):
        EVENTS.append("capture")
        return None, None


def penalized(self, logits, rows, state):
    """Launch the kernel that a GPU uses."""
    triton_penalties.penalize(logits, rows, state["repetition"], state["presence"], state["frequency"])


def shapes(steps):
    """Yield the shapes of all captures that ordinary requests may need."""
    for span in (graphs.SHORT, steps._span(graphs.SHORT + 1)):
        yield from (GraphKey("decode", n, n, span) for n in steps.sizes)
        saving = [n for n in steps.shared_sizes if steps.runner.shared.can_save(n, span)]
        yield from (GraphKey("decode", n, n, span, shared=True) for n in saving)
        for rows in steps.coarse:
            for tokens in range(64, 513, 64):
                yield GraphKey("mixed", rows, max(tokens, rows), steps._span(span, tokens))


def draws(steps):
    """Yield draws of requests with the usual parameters, alone and together."""
    params = [dict(temperature=t, **limit) for t in (0.0, 0.7) for limit in LIMITS_OF_ROWS]
    sampler, penalties = steps.runner.processors[-1], steps.runner.names.index("minivllm/penalties")
    bits = [sampler.bind_prompt(SamplingParams(**one), np.zeros(1, np.int32)).variant for one in params]
    unused = (-1,) * (len(steps.runner.processors) - 1)
    for bit in [*bits, *(a | b for a in bits for b in bits)]:
        for penalized in (-1, 1, 2, 3):
            used = [*unused]
            used[penalties] = penalized
            for rows, least, topk, late in ((1, False, -1, False), (16, True, 0, True), (40, False, 5, False)):
                yield Drawn(rows, SampleOperations((*used, bit), least, topk, late))


def main(folder: Path) -> None:
    driver.set_active(Hopper())  # type: ignore[arg-type]
    made = []

    class Ahead(ahead.CompileAhead):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.names = set()
            self.rehearsed = []
            made.append(self)

        def rehearse(self, run, first=False):
            found = super().rehearse(run, first)
            self.rehearsed.append((run, set(self.names)))
            return found

        def _queue(self, function, key, compile_it):
            self.last = function._fn_name.rpartition(".")[2]
            self.names.add(self.last)
            super()._queue(function, key, compile_it)

        def wait(self, jobs):
            assert jobs
            EVENTS.append("wait")

    ahead.ThreadPoolExecutor, ahead.CompileAhead = Held, Ahead  # type: ignore[misc, assignment]
    fit, compared = sys.argv[2] == "fit", triton_backend.disagreement
    if fit:
        triton_backend.disagreement = lambda *args: compared(*args) if ahead.rehearsing() else ""
    start._reason_against = lambda wiring, kernels: None
    ahead.blank = poison
    DefaultSampler.draw = DefaultSampler._draw_fused  # type: ignore[method-assign]
    Penalties.apply = penalized  # type: ignore[method-assign]
    build.synchronize = lambda: None
    runner.has_kernels = build.has_kernels = lambda wiring: True
    graphs.GraphRecorder, graphs.replay_ms = Recorder, lambda graph: 1.0  # type: ignore[misc, assignment]
    graphs.Graphs._draw_once = lambda self, variant: None  # type: ignore[method-assign]
    shape = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    tiny_dir(folder, "qwen3", vocab_size=1024, num_hidden_layers=5, **shape)
    options = dict(skip_tokenizer_init=True, dtype="bfloat16", device="cpu", max_model_len=256)
    options |= dict(
        attention={"name": "__main__:OnCpu", "options": {"shared_prefixes": "always"}},
        allow_targets=["__main__"],
        max_num_seqs=40,
    )
    options |= dict(compile_ahead=True)
    captures = sys.argv[1]
    with LLM(model=str(folder), max_num_batched_tokens=512, graph_captures=captures, **options) as llm:
        worker_runner = llm.engine.executor.runner
        steps = worker_runner.graphs
        assert steps is not None, worker_runner.worker.notes
        names = made[0].rehearsed[1][1]
        assert [run.func for run, _ in made[0].rehearsed[:2]] == [build._early_layers, build._early_step]
        assert {"_attend", "_prefill", "_write"} <= names, names
        begun = EVENTS.index("capture")
        two = EVENTS[begun - 1 : begun + 3]
        assert two == ["wait", "capture"] * 2, "each capture waits only for its own kernels"
        rehearsed = [run.args[0] for run, _ in made[0].rehearsed if getattr(run.func, "__name__", "") == "rehearse"]
        assert max(Counter(rehearsed).values()) == (1 if fit else 2), "captures use other kernels than the early ones"
        queued = set(made[0].jobs)
        assert len(steps.layers.blocks) == 3
        steps.layers.blocks = None  # from here on all layers run
        state = worker_runner.state
        columns = [x.clone() for x in (state.tokens, state.known, state.table)]
        with torch.inference_mode():
            for shape in [*steps.later.queue, *dict.fromkeys(shapes(steps)), *dict.fromkeys(draws(steps))]:
                made[0].rehearse(partial(steps.rehearse, shape))
                new = set(made[0].jobs) - queued
                assert not new, f"{shape} needs kernels that are compiled while requests run: {made[0].last}"
            for lengths in ([1, 200], [1] * 30 + [90, 70], [1] * 17 + [300], [100] * 5):
                made[0].rehearse(partial(separate_step, worker_runner, np.array(lengths, np.int32)))
                assert set(made[0].jobs) == queued, f"{lengths} {made[0].last}"
        for before, now in zip(columns, (state.tokens, state.known, state.table), strict=True):
            assert torch.equal(before, now)
        assert all((slots == steps.spare).all() for slots in (b.slots for b in steps.buffers.values()))
        worker, wiring = worker_runner.worker, worker_runner.wiring
        notes, caches = list(worker.backend.notes), worker.caches
        fmt = build_part("kvformat", wiring.parts["kvformat"])
        disagreed = set(worker.backend.unfit)
        assert (
            notes
            and bool(disagreed) is not fit
            and made[0].rehearse(partial(build._early_step, worker, wiring, fmt, []))
        )
        assert worker.backend.notes == notes and worker.backend.unfit == disagreed
        worker.caches = caches
        calls = made[0].pool.calls
        assert len(calls) == len(made[0].jobs)
        print(*sorted(made[0].names))
        for call, args in calls[:: max(1, len(calls) // 6)]:
            call(*args)
        print(len(calls))


if __name__ == "__main__":
    main(Path(tempfile.mkdtemp()))
