"""Captures that are made while the engine serves, and kernels that are compiled before they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from minivllm import LLM
from minivllm.core.engine.captures import QUIET, IdleCaptures
from minivllm.core.interfaces.attention import GraphKey
from minivllm.core.timing import StartTimes
from minivllm.device.layers.captured_sizes import coarse_sizes, first_decode, first_mixed, is_first_mixed, row_sizes
from minivllm.device.worker import build
from minivllm.device.worker import runner as runner_module
from minivllm.device.worker.distinct_layers import DistinctLayers, distinct
from minivllm.device.worker.graph_keys import TappedKey
from minivllm.device.worker.runner import Runner
from minivllm.errors import EngineDeadError, ResourceError
from minivllm.testing.tiny import tiny_dir

TESTS = Path(__file__).parents[2]
# attributes of a runner in which nothing reads values of each layer
UNREAD = dict(compactor=None, states_read=None, images=None, state=SimpleNamespace(recurrent=None))


def test_captures_made_while_serving_give_what_separate_launches_give():
    """In a process of its own, because Triton's interpreter is chosen when Triton is imported."""
    here = TESTS / "helpers"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(here / "gradual_captures.py")]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=here, env=environ, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("most_tokens", [16, 100, 700, 1 << 14])
@pytest.mark.parametrize("most", [1, 3, 8, 100, 512, 1024])
def test_every_decode_step_and_the_largest_mixed_step_fit_a_capture_of_the_start(most, most_tokens):
    sizes = row_sizes(most)
    assert first_decode(sizes) <= set(sizes) and max(first_decode(sizes)) == most and len(first_decode(sizes)) <= 5
    mixed = first_mixed(coarse_sizes(most), most_tokens)
    first = [one for one in mixed if is_first_mixed(one, mixed)]
    assert 1 <= len(first) <= 4
    assert {mixed[0], mixed[-1]} <= set(first), "the largest takes the memory of all, the smallest is tried first"


@pytest.mark.parametrize(
    "forms, layers",
    [
        ([0] * 28, [0, 1, 27]),
        ([0, 0, 0, 1] * 7, [*range(8), 26, 27]),
        ([0] + [1] * 9, [0, 1, 2, 9]),
        ([0, 1] * 6, [0, 1, 2, 3, 10, 11]),
        ([0] * 5 + [1] * 5, [0, 1, 2, 3, 4, 5, 6, 9]),
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([0], [0]),
        ([0, 0], [0, 1]),
    ],
)
def test_the_layers_before_a_capture_have_each_form_and_each_pair_of_neighbours(forms, layers):
    assert distinct(forms) == layers
    run = [forms[i] for i in layers]
    assert set(pairwise(run)) == set(pairwise(forms)) and layers[-1] == len(forms) - 1


def test_all_layers_run_before_captures_of_a_kind_until_such_a_run_succeeds():
    layers = DistinctLayers(SimpleNamespace(model=SimpleNamespace(blocks=[*range(5)]), alone=False, **UNREAD))
    layers.blocks, seen = [0, 1, 4], []

    def run(fails):
        seen.append(len(layers.model.blocks))
        if fails:
            raise RuntimeError("no memory")

    mixed = GraphKey("mixed", 8, 64)
    with pytest.raises(RuntimeError, match="no memory"):
        layers.before(mixed, partial(run, True))()
    for key in (mixed, mixed, GraphKey("decode", 8, 8), TappedKey("mixed", 8, 64), mixed):
        layers.before(key, partial(run, False))()
    assert seen == [5, 5, 3, 5, 5, 3]


def test_no_capture_is_made_while_threads_compile_kernels():
    made, rehearsals = [], SimpleNamespace(compiling=True)
    later = SimpleNamespace(queue=[1, 2], capture=lambda: made.append(later.queue.pop()) or True)
    runner = SimpleNamespace(graphs=SimpleNamespace(later=later), worker=SimpleNamespace(rehearsals=rehearsals))
    assert Runner.capture_later(runner) == {"left": 2, "worked": False} and not made
    rehearsals.compiling = False
    assert Runner.capture_later(runner) == {"left": 1, "worked": True} and made == [2]


@pytest.mark.parametrize(
    "graph, fuse, kernels, traits, note",
    [
        ("off", True, True, dict(graph="mixed", plan="device"), ""),
        ("auto", True, False, dict(graph="mixed", plan="device"), ""),
        ("auto", True, True, dict(plan="device"), ""),
        ("auto", True, True, dict(graph="mixed", plan="host"), ""),
        ("auto", False, True, dict(graph="mixed", plan="device"), "fuse is off"),
    ],
)
def test_a_start_that_captures_no_steps_marks_its_kernels_as_compiled(monkeypatch, graph, fuse, kernels, traits, note):
    """Otherwise each later start would rehearse and compile again."""
    marked, notes = [], []
    monkeypatch.setattr(runner_module, "has_kernels", lambda wiring: kernels)
    runner = Runner.__new__(Runner)
    parts = {"attention": SimpleNamespace(traits=traits)}
    runner.wiring = SimpleNamespace(steps=SimpleNamespace(graph=graph), parts=parts)
    runner.state = SimpleNamespace(recurrent=object())
    rehearsals = SimpleNamespace(done=lambda: marked.append(True))
    runner.worker = SimpleNamespace(rehearsals=rehearsals, parts=SimpleNamespace(fuse=fuse), notes=notes)
    assert runner.captured_steps() is None
    assert marked == [True] and len(notes) == bool(note) and all(note in one for one in notes)


@pytest.mark.parametrize("fails", ["", "KV cache", "captures"])
def test_a_start_that_fails_cancels_the_compilations_that_have_not_begun(fails, tmp_path, monkeypatch):
    closed, take = [], build._take_cache

    def take_cache(worker, *rest):
        worker.rehearsals.ahead = SimpleNamespace(close=lambda: closed.append(True))
        if fails == "KV cache":
            raise ResourceError("of the cache")
        take(worker, *rest)

    def captured_steps(self):
        if fails == "captures":
            raise ResourceError("of the captures")

    monkeypatch.setattr(build, "_take_cache", take_cache)
    monkeypatch.setattr(Runner, "captured_steps", captured_steps)
    tiny_dir(tmp_path, "qwen3")
    options = dict(dtype="float32", device="cpu", num_kvcache_blocks=8, max_model_len=32, skip_tokenizer_init=True)
    with pytest.raises(ResourceError, match="of the") if fails else nullcontext(), LLM(model=str(tmp_path), **options):
        assert not closed
    assert closed == [True]


def test_an_engine_on_a_cpu_starts_without_triton(tmp_path):
    tiny_dir(tmp_path, "qwen3")
    options = dict(dtype="float32", device="cpu", num_kvcache_blocks=8, max_model_len=32, skip_tokenizer_init=True)
    code = (
        "import sys\nsys.modules['triton'] = None  # as if it were not installed\n"
        f"from minivllm import LLM\nLLM(model={str(tmp_path)!r}, **{options!r}).close()\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_idle_engine_waits_before_its_first_capture_and_none_follows_the_last():
    idle = IdleCaptures()
    answers = [{"left": n, "worked": worked} for n, worked in ((2, True), (2, False), (0, True))]
    call = lambda verb: answers.pop(0)  # noqa: E731
    idle.turn(call, 5)
    assert idle.pause == QUIET and len(answers) == 3, "it has just generated tokens"
    pauses = []
    for _ in range(3):
        idle.turn(call, 5)
        pauses.append(idle.pause)
    assert pauses[0] == 0.0 and 0 < pauses[1] < QUIET and pauses[2] is None and not idle.left


@pytest.mark.parametrize("answer", [NotImplementedError("captures"), RuntimeError("broken"), {}, None, {"left": 1}])
def test_an_executor_without_the_verb_is_called_once(answer):
    idle, calls = IdleCaptures(), []

    def call(verb):
        calls.append(verb)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for _ in range(3):
        idle.turn(call, 0)
    assert calls == ["captures"] and idle.pause is None


def test_an_executor_that_dies_in_a_capture_ends_the_engine():
    def call(verb):
        raise EngineDeadError("gone")

    with pytest.raises(EngineDeadError, match="gone"):
        IdleCaptures().turn(call, 0)


def test_the_parts_of_a_start_add_up_to_its_time(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 6.0, 7.0, 9.0, 20.0, 30.0])
    monkeypatch.setattr("minivllm.core.timing.perf_counter", lambda: next(now))
    times = StartTimes()
    with times.of("KV cache"), times.of("compile"):
        pass
    with times.of("compile"):
        pass
    assert times.seconds == {"compile": 5.0, "KV cache": 3.0}
    with times.of("executor"):
        times.include({"weights": 4.0, "compile": 1.0})
    assert times.seconds == {"compile": 6.0, "KV cache": 3.0, "weights": 4.0, "executor": 5.0}


def without_interpreter(name, *args):
    """Return the printed lines of a script in tests/device/kernels, run without Triton's interpreter."""
    folders = [str(TESTS / "device" / "kernels"), str(TESTS / "helpers"), str(TESTS), *sys.path]
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join(folders)
    command = [sys.executable, str(TESTS / "device" / "kernels" / name), *args]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip().split("\n")


def test_a_rehearsal_finds_each_variant_once_launches_none_and_compiles_it_for_the_card():
    assert without_interpreter("compiled_ahead.py")[-1] == "ok"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_end_of_a_program_does_not_wait_for_compilations_that_have_not_begun():
    """A program need not close its engine.  Python itself would run all compilations in the queue first."""
    code = """
import time, torch
from minivllm.device.kernels.ahead import CompileAhead
ahead = CompileAhead(torch.device("cpu"), 1)
jobs = [ahead.pool.submit(lambda: print("compiled", flush=True) or time.sleep(0.5)) for _ in range(20)]
ahead.finish(jobs, lambda: print("finished"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("compiled") < 5 and "finished" not in done.stdout


@pytest.mark.parametrize("captures, kernel", [("start", "unfit"), ("gradual", "unfit"), ("gradual", "fit")])
def test_steps_of_ordinary_requests_need_no_kernel_that_is_not_compiled_when_the_engine_is_ready(captures, kernel):
    """Steps are rehearsed with memory that holds no valid index.  Both parts of a step are among the kernels."""
    *_, names, count = without_interpreter("compiled_rehearsal.py", captures, kernel)
    steps = {"_begin", "_deal", "_decode", "_merge", "_tiles", "_prefill", "_shared", "_cut"}
    draws = {"_first", "_few", "_redraw", "_search", "_penalize", "_apply", "_parts", "_commit"}
    assert steps | draws <= set(names.split())
    assert 50 < int(count) < 100


def test_compilation_ahead_that_is_not_possible_is_noted(tmp_path):
    tiny_dir(tmp_path, "qwen3")
    for ahead in (None, False, True):
        options = dict(dtype="float32", device="cpu", num_kvcache_blocks=8, max_model_len=32, skip_tokenizer_init=True)
        with LLM(model=str(tmp_path), compile_ahead=ahead, **options) as llm:
            notes = [note for note in llm.engine.executor.runner.worker.notes if "compile_ahead" in note]
        assert len(notes) == bool(ahead) and all("no kernels of Triton" in note for note in notes)
