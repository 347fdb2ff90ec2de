"""Signals during the steps of an engine, and iterators that are abandoned when the program ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
