"""Signals during the steps of an engine, and iterators that are abandoned when the program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from minivllm import LLM, RequestError, SamplingParams, StructuredOutputsParams

BEGIN = """
import os, signal, sys, threading
from minivllm import LLM, SamplingParams
llm = LLM("pocket", num_kvcache_blocks=300, max_num_seqs=8, max_num_batched_tokens=256)
long = SamplingParams(max_tokens=800, ignore_eos=True)
"""
INTERRUPT = """
signal.signal(signal.SIGINT, {handler})
threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    llm.generate(["Once"] * 8, long, use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted")
else:
    print("finished")
"""


def run(script):
    done = subprocess.run([sys.executable, "-c", BEGIN + script], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "handler, expected",
    [
        ("signal.default_int_handler", (0, "interrupted\n", "")),
        ("signal.SIG_DFL", (-signal.SIGINT, "", "")),
        ("signal.SIG_IGN", (0, "finished\n", "")),
    ],
)
def test_ctrl_c_in_a_step_does_what_the_program_chose(handler, expected):
    assert run(INTERRUPT.format(handler=handler)) == expected


def test_an_iterator_that_is_abandoned_at_the_end_of_the_program_says_nothing():
    assert run("stream = llm.stream('Once', long); next(stream); sys.exit(3)") == (3, "", "")


@pytest.fixture(scope="module")
def llm():
    llm = LLM("pocket", num_kvcache_blocks=300, max_num_seqs=8, max_num_batched_tokens=256)
    yield llm
    llm.close()


def interrupted_at(llm, monkeypatch, number):
    """Send Ctrl-C while the engine adds its ``number``-th request, and return the list of requests it has added."""
    added, add = [], llm.engine.add

    def adding(request):
        add(request)
        added.append(request)
        if len(added) == number:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(llm.engine, "add", adding)
    return added


@pytest.mark.parametrize("number", [1, 3, 8])
def test_ctrl_c_while_requests_are_added_ends_all_of_them(llm, monkeypatch, number):
    added, steps = interrupted_at(llm, monkeypatch, number), llm.stats()["steps"]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Once"] * 8, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
    assert len(added) == number and not llm.engine.requests
    assert llm.stats()["steps"] == steps, "no step runs after the signal"


def test_a_signal_whose_handler_returns_leaves_the_other_requests_to_be_added(llm, monkeypatch):
    handled = []
    old = signal.signal(signal.SIGINT, lambda *args: handled.append(len(added)))
    try:
        added = interrupted_at(llm, monkeypatch, 2)
        outputs = llm.generate(["Once"] * 5, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, old)
    assert handled == [2] and len(added) == 5 and [len(out.tokens) for out in outputs] == [2] * 5


def test_the_error_of_a_refused_prompt_has_its_number(llm):
    one = SamplingParams(max_tokens=2, ignore_eos=True)
    grammar = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[ab]+"))
    long = [[1] * 5000]
    for params in ([one] * 3, [grammar] * 3, [one, grammar, one], [grammar, one, one]):
        with pytest.raises(RequestError, match="prompt 3 of 3: the prompt has 5000 tokens"):
            llm.generate([[1, 2], [3], *long], params, use_tqdm=False)
        assert not llm.engine.requests
    refused = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="[ab"))
    with pytest.raises(RequestError, match="prompt 2 of 3: "):
        llm.generate([[1, 2], [3], [4]], [one, refused, one], use_tqdm=False)
    assert not llm.engine.requests
