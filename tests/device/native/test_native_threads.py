"""Threads of captured CPU steps: how many there are, and when they come, changes no bit; they end with the process."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from native_runs import ask, checkpoint, engine, needs_library, prompt, watched

from minivllm.device.layers.native_steps import NativeSteps
from minivllm.device.native.program import LOGITS, Program, address

pytestmark = needs_library
torch.set_num_threads(1)  # of torch: on tiny tensors threads only wait for each other

MANY = [prompt(n, i) for i, n in enumerate((40, 3, 17, 33, 1, 26))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM", intermediate_size=100, vocab_size=131)


@pytest.fixture
def threads(monkeypatch):
    """Return a function that sets the number of threads for programs that are made later."""
    return lambda n: monkeypatch.setattr("minivllm.device.layers.native_steps.torch.get_num_threads", lambda: n)


def states(monkeypatch, path, pause=lambda: None, **options):
    """Return the tokens, and the hidden states of each captured step in bits."""
    found, forward = [], NativeSteps.forward

    def kept(self, plan):
        pause()
        hidden = forward(self, plan)
        found.append(None if hidden is None else hidden.clone())
        return hidden

    with monkeypatch.context() as patch, engine(path, max_num_batched_tokens=24, **options) as llm:
        patch.setattr(NativeSteps, "forward", kept)
        return ask(llm, MANY, temperature=0.7, seed=3), found


def test_any_number_of_threads_gives_the_same_bits(folder, threads, monkeypatch):
    """More than there are processors too, so that they are put aside in the middle of a step; and steps come at once,
    or after threads have gone to sleep."""
    wait = random.Random(0)
    tokens, want = states(monkeypatch, folder)
    for n in (2, 3, 8):
        threads(n)
        again, got = states(monkeypatch, folder, lambda: time.sleep(wait.choice([0, 0, 0, 1e-4, 1e-3, 5e-3])))
        assert again == tokens
        assert len(got) == len(want)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_task_is_lost_or_done_twice_in_thousands_of_steps():
    """Each phase adds a row of the one before it to its own: a task that is done twice, or too early, shows."""
    wait, rows, phases = random.Random(1), 64, 12
    made = Program(4, rows, {"stop_ids": torch.zeros(1, 1, dtype=torch.int32), "per_row": 1})
    sums = [torch.ones(rows, 5), *(torch.zeros(rows, 5) for _ in range(phases))]
    registers = [made.register(s) for s in sums]
    for before, after in itertools.pairwise(registers):
        made.add("add", sampling=True, in_=before, out=after)
    box = np.zeros(2 + 3 * rows, np.int64)
    box[1] = LOGITS
    for _ in range(3000):
        box[0] = n = wait.choice([1, 2, 3, 17, rows])
        for s in sums[1:]:
            s.zero_()
        made.sample(address(box), 0)
        assert all(bool((s[:n] == 1).all()) and not s[n:].any() for s in sums[1:])
        if wait.random() < 0.01:
            time.sleep(wait.choice([1e-4, 2e-3, 6e-3]))
    made.close()


def test_two_engines_step_at_once_in_two_threads(folder, tmp_path, threads):
    threads(2)
    other = checkpoint(tmp_path, "Gemma2ForCausalLM")
    with engine(folder) as a, engine(other) as b:
        prompts = [[i % 61 for i in p] for p in MANY]
        want = [ask(llm, prompts) for llm in (a, b)]
        got: list[list] = [[], []]

        def run(at, llm):
            got[at] += [ask(llm, prompts) for _ in range(4)]

        with watched(compare=False) as seen:
            both = [threading.Thread(target=run, args=pair) for pair in enumerate((a, b))]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()
    assert seen.draws
    assert got == [[want[0]] * 4, [want[1]] * 4]


def test_engines_made_and_closed_at_once_leave_no_thread_behind(folder, threads):
    threads(3)
    with engine(folder) as llm:  # what torch and others start once
        ask(llm, MANY[:1], max_tokens=2)
    before = _tasks()
    errors = []

    def live():
        try:
            for _ in range(3):
                with engine(folder) as llm:
                    ask(llm, MANY[:2], max_tokens=3)
        except BaseException as e:
            errors.append(e)

    both = [threading.Thread(target=live) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not errors
    deadline = time.monotonic() + 30
    while _tasks() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _tasks() <= before


def _tasks() -> int:
    return len(os.listdir("/proc/self/task"))


def test_threads_that_the_system_does_not_give_are_done_without():
    """In a process whose memory for their stacks ends soon."""
    done = python("""
        import resource
        from minivllm.device.native.program import LOGITS, Program, address
        x, out = torch.ones(64, 5), torch.zeros(64, 5)
        box, before = np.array([64, LOGITS] + [0] * 192), len(os.listdir("/proc/self/task"))
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (96 << 20),) * 2)
        made = Program(64, 64, {"stop_ids": torch.zeros(1, 1, dtype=torch.int32), "per_row": 1})
        assert before < len(os.listdir("/proc/self/task")) < before + 63
        made.add("add", sampling=True, in_=made.register(x), out=made.register(out))
        made.sample(address(box), 0)
        assert torch.equal(x, out)
        made.close()
        os.write(1, b"done")
        os._exit(0)
    """)
    assert done == "done"


def test_a_process_that_forks_ends_and_so_do_both_its_engines(folder):
    """The child has no threads but its own: it neither waits for others when it ends, nor ends those of its parent."""
    done = python(f"""
        from minivllm.device.layers import native_steps
        from minivllm import LLM, SamplingParams

        def ask(llm):
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            return llm.generate([dict(prompt_token_ids=[5, 6, 7])], params, use_tqdm=False)[0].tokens

        native_steps.torch.get_num_threads = lambda: 3
        llm = LLM({folder!r}, device='cpu', skip_tokenizer_init=True, num_kvcache_blocks=9)
        want = ask(llm)
        for asleep in (False, True):
            if asleep:
                time.sleep(0.05)
            child = os.fork()
            if not child:
                del llm  # the program goes
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert ask(llm) == want
        llm.close()
        print("done")
    """)
    assert done == "done"


@pytest.mark.parametrize("asleep", [False, True])
def test_a_process_that_closes_nothing_ends(folder, asleep):
    done = python(f"""
        from minivllm.device.layers import native_steps
        from minivllm import LLM, SamplingParams

        def ask(llm):
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            return llm.generate([dict(prompt_token_ids=[5, 6, 7])], params, use_tqdm=False)[0].tokens

        native_steps.torch.get_num_threads = lambda: 3
        llm = LLM({folder!r}, device='cpu', skip_tokenizer_init=True, num_kvcache_blocks=9)
        ask(llm)
        assert llm.engine.executor.runner.native is not None
        time.sleep({0.05 if asleep else 0})
        print("done")
    """)
    assert done == "done"


def test_an_executor_in_a_process_of_its_own_captures_too(folder):
    with engine(folder, graph="off") as llm:
        want = ask(llm, MANY)
    with engine(folder, executor="process") as llm:
        assert not any("not captured" in note for note in llm.engine.capacity.notes)
        assert ask(llm, MANY) == want


def python(code: str) -> str:
    """Return the output of a process that runs this code and ends well."""
    lines = [line.removeprefix("        ") for line in code.splitlines()]
    setup = "import copy, os, sys, time\nimport numpy as np\nimport torch\ntorch.set_num_threads(1)\n"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", setup + "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
