"""Captures made while an engine serves, against steps as separate launches; run by test_gradual_captures.py.

As in ``captured_steps``, captures are recordings on a CPU, and kernels run under Triton's interpreter."""

from __future__ import annotations

import asyncio
import random
import signal

import captured_steps
import pytest
import torch
from captured_steps import PLAIN, engine, play, requested
from cpu_captures import CpuRecorder, cpu_captures
from greedy import prompts

from minivllm import AsyncLLM
from minivllm.core.engine.engine import Engine
from minivllm.core.interfaces.attention import GraphKey
from minivllm.device.layers.decoder import DecoderBlock
from minivllm.device.worker import graphs, later
from minivllm.device.worker.captured import Drawn
from minivllm.testing.tiny import tiny_dir

SIZES = dict(max_num_seqs=12, max_num_batched_tokens=256, graph_captures="gradual")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    tiny_dir(folder, "qwen3")
    return folder


@pytest.fixture(autouse=True)
def more_rows(monkeypatch):
    monkeypatch.setattr(captured_steps, "SEQS", SIZES["max_num_seqs"])


def same(want, got):
    for a, b in zip(want, got, strict=True):
        assert [(c.token_ids, c.finish_reason) for c in b.outputs] == [
            (c.token_ids, c.finish_reason) for c in a.outputs
        ]


def made(runner):
    return {*runner.graphs.forwards, *(Drawn(*key) for key, one in runner.graphs.samples.items() if one is not None)}


def idle(llm):
    """Make all captures that are left, and return the number of calls."""
    calls = 0
    while True:
        answer = llm.engine.call("captures")
        if not answer["left"]:
            return calls
        assert answer["worked"]
        calls += 1


def test_the_start_has_a_capture_for_each_decode_step_and_idle_turns_make_those_of_a_whole_start(model):
    with cpu_captures():
        with engine(model, **{**SIZES, "graph_captures": "start"}) as llm:
            whole = made(llm.engine.executor.runner)
            assert llm.engine.call("captures") == {"left": 0, "worked": False}
        with engine(model, **SIZES) as llm:
            runner = llm.engine.executor.runner
            first = made(runner)
            assert first < whole and idle(llm) == len(whole - first) - 1
            assert made(runner) == whole and runner.graphs.notes == []
    decodes = {key.rows for key in first if isinstance(key, GraphKey) and key.kind == "decode"}
    assert decodes == {1, 8, SIZES["max_num_seqs"]}
    assert {key.rows for key in first if isinstance(key, Drawn)} >= decodes
    assert any(isinstance(key, GraphKey) and key.kind == "mixed" for key in first)


def test_captures_after_sleep_are_those_that_first_requests_need_and_measure_nothing(model, monkeypatch):
    """The start makes all captures.  A runner that captures again uses its measurements; idle turns make the others."""
    params = requested(*PLAIN, ignore_eos=True)
    items = prompts(61, [1 + 13 * i for i in range(len(params))])
    options = {**SIZES, "graph_captures": "start"}
    with cpu_captures(), engine(model, **options) as llm:
        runner = llm.engine.executor.runner
        whole, want = made(runner), llm.generate(items, params, False)
        known = runner.graphs.measured()
        runner.forget_captures()
        for name in ("_measure", "_launch_once", "_draw_once"):
            monkeypatch.setattr(graphs.Graphs, name, lambda *args: pytest.fail("measured again"))
        runner.graphs = runner.captured_steps(known)
        first = made(runner)
        assert runner.graphs.measured() == known and first < whole
        same(want, llm.generate(items, params, False))
        idle(llm)
        assert made(runner) >= whole and runner.graphs.notes == []
        same(want, llm.generate(items, params, False))


def test_before_a_capture_equal_layers_run_once_except_before_the_first_of_a_kind(tmp_path, monkeypatch):
    tiny_dir(tmp_path, "qwen3", num_hidden_layers=6)
    ran, block = [], DecoderBlock.__call__
    monkeypatch.setattr(DecoderBlock, "__call__", lambda self, *args: ran.append(self.name) or block(self, *args))
    before, capture = [], CpuRecorder.capture

    def counted(self, run, first=None):
        def call():
            ran.clear()
            (first or run)()
            before.append(len(ran))

        return capture(self, run, call)

    monkeypatch.setattr(CpuRecorder, "capture", counted)
    params = requested(*PLAIN, ignore_eos=True)
    want, _ = play(tmp_path, params, False, **SIZES)
    with cpu_captures():
        got, used = play(tmp_path, params, True, **SIZES)
    same(want, got)
    assert used.notes == [] and set(before) == {0, 3, 6}, "draws, other captures, the first of a kind"
    assert before.count(6) == len({(type(key), key.kind, key.rows == 1) for key in used.forwards})


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_captures_between_any_two_steps_change_no_token(model, monkeypatch, depth, seed):
    draw, step = random.Random(seed), Engine.step

    def stepped(self):
        if draw.random() < 0.4:
            self.executor.runner.graphs.later.capture()
        return step(self)

    params = requested(*PLAIN, *PLAIN, {}, {"temperature": 0}, ignore_eos=True)
    want, _ = play(model, params, False, run_ahead=depth, **SIZES)
    monkeypatch.setattr(Engine, "step", stepped)
    monkeypatch.setattr(graphs, "DECODE_SIGHTS", 3)
    with cpu_captures():
        got, used = play(model, params, True, run_ahead=depth, **SIZES)
    same(want, got)
    assert used.notes == [] and len(used.forwards) == 8, "all sizes were captured"


def test_a_size_that_is_used_often_gets_its_capture_without_an_idle_turn(model, monkeypatch):
    monkeypatch.setattr(graphs, "DECODE_SIGHTS", 3)
    params = requested(*[{"temperature": 0}] * 4, ignore_eos=True, max_tokens=12)
    want, _ = play(model, params, False, **SIZES)
    with cpu_captures():
        got, used = play(model, params, True, **SIZES)
    same(want, got)
    assert GraphKey("decode", 4, 4, graphs.SHORT) in used.forwards
    assert GraphKey("decode", 2, 2, graphs.SHORT) not in used.forwards


@pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("no memory")])
def test_a_capture_that_fails_while_serving_is_tried_once_and_its_steps_run_in_a_larger_one(model, monkeypatch, error):
    monkeypatch.setattr(graphs, "DECODE_SIGHTS", 2)
    params = requested(*[{"temperature": 0}] * 4, ignore_eos=True, max_tokens=12)
    want, _ = play(model, params, False, **SIZES)
    tried, capture = [], CpuRecorder.capture

    def fails(self, run, before=None):
        owner = next((one for one in owners if one.graphs is not None and one.graphs.later.begun), None)
        if owner is not None:
            tried.append(run)
            raise error
        return capture(self, run, before)

    owners = []
    begin = later.LaterCaptures.begin

    def begun(self, shapes):
        begin(self, shapes)
        owners.append(self.graphs.runner)

    monkeypatch.setattr(later.LaterCaptures, "begin", begun)
    monkeypatch.setattr(CpuRecorder, "capture", fails)
    with cpu_captures():
        got, used = play(model, params, True, **SIZES)
    same(want, got)
    assert tried and len(used.notes) == 1 and str(error) in used.notes[0]
    assert len(tried) <= len(used.refused) + list(used.samples.values()).count(None)
    assert GraphKey("decode", 4, 4, graphs.SHORT) in used.refused


@pytest.mark.parametrize("number, error", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGUSR1, SystemExit)])
@pytest.mark.parametrize("captures", [0, 4])  # before that with the signal; the fifth is of a draw
def test_a_signal_during_a_capture_of_the_start_ends_the_start(model, monkeypatch, number, error, captures):
    capture, made = CpuRecorder.capture, []

    def interrupted(self, run, before=None):
        made.append(run)
        if len(made) == captures + 1:
            signal.raise_signal(number)
        return capture(self, run, before)

    def leave(number, frame):
        raise SystemExit(128 + number)

    monkeypatch.setattr(CpuRecorder, "capture", interrupted)
    handler = signal.signal(signal.SIGUSR1, leave)
    try:
        with cpu_captures(), pytest.raises(error):
            engine(model, **SIZES)
    finally:
        signal.signal(signal.SIGUSR1, handler)


def test_a_request_that_ends_by_an_abort_leaves_the_captures_that_follow_intact(model):
    params = requested(*[{"temperature": 0}] * 3, ignore_eos=True, max_tokens=14)
    want, _ = play(model, params, False, run_ahead=2, **SIZES)
    items = prompts(61, [1 + 13 * i % 50 for i in range(3)])
    with cpu_captures(), engine(model, run_ahead=2, **SIZES) as llm:
        later_captures = llm.engine.executor.runner.graphs.later
        left = len(later_captures.queue)
        for _ in range(3):
            stream = llm.stream(prompts(62, [9])[0], params[0])
            next(iter(stream))
            later_captures.capture()
            stream.close()
            later_captures.capture()
            same(want[:3], llm.generate(items, params, False))
        assert len(later_captures.queue) <= left - 6
        llm.engine.cache.check()


def test_an_idle_engine_makes_all_captures_by_itself_and_serves_in_between(model):
    async def serve(llm):
        pieces = llm.generate(prompts(61, [7])[0], requested({"temperature": 0}, max_tokens=9)[0])
        return [token async for piece in pieces for token in piece.token_ids]

    async def main():
        llm = AsyncLLM(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            device="cpu",
            attention="cpu_captures:OnDevice",
            num_kvcache_blocks=60,
            kvcache_block_size=16,
            max_model_len=96,
            allow_targets=["cpu_captures"],
            **SIZES,
        )
        try:
            first = await serve(llm)
            left = []
            for _ in range(600):
                left.append(llm.engine.captures.left)
                if llm.engine.captures.pause is None and left[-1] == 0 and len(set(left)) > 1:
                    break
                await asyncio.sleep(0.05)
            assert left[-1] == 0 and max(left) > 3, left
            again = await serve(llm)
            assert again == first and len(first) == 9
            assert llm.engine.executor.runner.graphs.notes == []
        finally:
            llm.close()

    with cpu_captures():
        asyncio.run(main())
