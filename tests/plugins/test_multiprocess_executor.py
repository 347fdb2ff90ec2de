"""Executor ``multiprocess``: ranks that share a model give the tokens of one process, and an end never blocks."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minivllm import LLM, ConfigError, EngineDeadError, ModelError, PluginError, ResourceError, SamplingParams
from minivllm.core.interfaces.plan import StepError, StepPlan, StepResult
from minivllm.plugins.executor import multiprocess
from minivllm.plugins.executor.multiprocess import LOST, OPERATIONS, PARTED, Multiprocess
from minivllm.plugins.executor.options import MultiprocessOptions
from minivllm.plugins.executor.process import FAILED
from minivllm.plugins.executor.process_worker import _failure
from minivllm.runtime.processes.channel import Message, shared_file
from minivllm.runtime.processes.child import ChildEnded
from minivllm.runtime.processes.status import BEGUN, CALLS, DONE, LEFT, MET, OPERATION, PHASE, StatusPage
from minivllm.testing import ExecutorConformance
from minivllm.testing.tiny import tiny_dir

RANKS = {"executor": {"name": "multiprocess", "options": {"checked": True, "timeout": 20}}, "tensor_parallel_size": 2}
LONG = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
PROMPTS = [[(7 * j) % 60 for j in range(18)] + [(i * i + 5 * j) % 60 for j in range(3 * i + 1)] for i in range(5)]
ALONE_FAILS = """
import os, torch
from dataclasses import replace
from minivllm.plugins.attention.sdpa import Sdpa
from minivllm.plugins.attention.spec import SDPA

class Parts(Sdpa):
    "Fails on one rank alone, once it is told to."
    spec = replace(SDPA, impl="parts:Parts")
    def forward(self, *args, **more):
        if os.path.exists("FLAG") and torch.distributed.get_rank() == 1:
            raise RuntimeError("on this rank alone")
        return super().forward(*args, **more)
"""


class TestTwoRanks(ExecutorConformance):
    """The kit with two ranks in all tests.  ``tests/testing`` runs it with one rank."""

    pytestmark = pytest.mark.slow
    plugin = "minivllm/multiprocess"

    def sizes(self):
        return [2]


def options(folder, **more):
    base = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_num_seqs": 6,
        "max_model_len": 128,
        "kvcache_block_size": 4,
        "num_kvcache_blocks": 30,
        "max_num_batched_tokens": 24,
        "drafter": "ngram",
        "num_speculative_tokens": 2,
        "speculate": "always",
    }
    return {**base, **more}


def requests():
    """Greedy and drawn, guided, penalised, with a mask that comes late, a token that the host chooses, branches."""
    allowed = {"allowed_tokens_fn": lambda ids: range(3, 50)}
    chosen = {"choose_fn": lambda logits, ids: int(np.argmax(logits))}
    requested = [
        {},
        allowed,
        chosen,
        {"temperature": 0.9, "seed": 5, "n": 2},
        {"repetition_penalty": 1.3, "logprobs": 2},
    ]
    return [SamplingParams(**{"temperature": 0, "max_tokens": 14, "ignore_eos": True, **more}) for more in requested]


def answers(llm, rounds=2):
    outs = [llm.generate(PROMPTS, requests(), use_tqdm=False) for _ in range(rounds)]  # the second with a prefix cache
    if rounds > 1:
        requested = SamplingParams(max_tokens=3, prompt_logprobs=1, temperature=0)
        outs.append(llm.generate(PROMPTS[:1], requested, use_tqdm=False))
    faults = [out.error for one in outs for out in one if out.error]
    assert not faults, faults
    return [[list(o.token_ids) for o in out.outputs] for one in outs for out in one]


def ranks_of(llm):
    return [child.pid for child in llm.engine.executor._ranks()]


def gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The vocabulary has 61 tokens, which neither 2 nor 4 divide, and there is one KV head.

    The head shares the embedding's weight.
    """
    path = tmp_path_factory.mktemp("ranks") / "model"
    return tiny_dir(path, "qwen3", "mqa", tie_word_embeddings=True)[0]


@pytest.fixture(scope="module")
def want(folder):
    with LLM(**options(folder)) as llm:
        found = answers(llm)
        stats = llm.stats()
        assert stats["preemptions"] and stats["prefix_hits"] and stats["speculation"]["accepted"], "too weak a test"
    return found


def test_two_ranks_give_the_tokens_of_one_process_and_a_dead_one_ends_the_engine_within_two_seconds(folder, want):
    """Prompts are divided into chunks and preempted, with prefix hits and drafts.

    Plans, hidden states and columns of each step are compared.
    """
    with LLM(**options(folder, **RANKS)) as llm:
        pids = ranks_of(llm)
        for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: left to the engine's process
            os.kill(pids[1], number)
        assert answers(llm) == want
        llm.engine.cache.check()
        assert "layers.0.mlp" in llm.tap_points() and "layers.0.q" not in llm.tap_points(), "a rank has some heads"
        assert llm.engine.call("kv_resident") > 0
        os.kill(pids[1], signal.SIGKILL)
        begun = time.monotonic()
        while llm.engine.dead is None and time.monotonic() - begun < 5.0:
            llm.engine.watch()
            time.sleep(0.05)
        assert time.monotonic() - begun < 2.0
        assert re.search(r"rank 1 of 2 \(cpu, process \d+\).*signal 9 \(SIGKILL\)", llm.engine.dead)
        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            llm.generate(PROMPTS[:1], LONG, use_tqdm=False)
        assert gone(pids)


def test_four_ranks_give_the_same_and_a_step_that_fails_on_one_alone_ends_the_engine(
    folder, want, tmp_path, monkeypatch
):
    (tmp_path / "parts.py").write_text(ALONE_FAILS.replace("FLAG", str(tmp_path / "flag")))
    monkeypatch.syspath_prepend(tmp_path)
    ranks = {"tensor_parallel_size": 4, "attention": "parts:Parts", "allow_targets": ["parts"]}
    with LLM(**options(folder, **ranks)) as llm:
        assert isinstance(llm.engine.executor, Multiprocess), "the size alone chooses it"
        assert answers(llm, 1) == want[: len(PROMPTS)]
        pids = ranks_of(llm)
        (tmp_path / "flag").touch()
        out = llm.generate(PROMPTS[:1], LONG, use_tqdm=False)[0]
        assert out.finish_reason == "error"
        assert re.search(r"have parted in step \d+: rank 1 of 4 .*failed after \d+ calls: .*on this rank", out.error)
        assert "rank 0 of 4" in out.error and "has not failed" in out.error
        assert gone(pids)


# ---- without processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"tensor_parallel_size": 3}, ConfigError, "4 heads and 1 KV heads, .*; expected 1 or 2 or 4"),
        ({"tensor_parallel_size": 2, "executor": "process"}, PluginError, r"expected 2, supports \{1\}"),
        ({"tensor_parallel_size": 9}, PluginError, r"multiprocess +tensor_parallel_size: expected 9, supports 1 to 8"),
        ({"tensor_parallel_size": 2, "batch_invariant": True}, ConfigError, "set tensor_parallel_size=1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_starts(folder, monkeypatch, more, error, words):
    monkeypatch.setattr(multiprocess, "Child", None)
    with pytest.raises(error, match=words):
        LLM(**options(folder, **more))


class Rank:
    """A child process with prepared messages, which runs until the test ends it."""

    pid = 7

    def __init__(self, *messages, lives=True):
        self.messages, self.lives, self.sent = list(messages), lives, []

    def ready(self):
        return bool(self.messages)

    def receive(self, wait, rhythm=None):
        return self.messages.pop(0) if self.messages else None

    def rest(self, seconds, rhythm=None):
        return bool(self.messages)

    def send(self, kind, parts, file=-1):
        self.sent.append(kind)

    def alive(self):
        return self.lives

    def ended(self):
        return None if self.lives else ChildEnded("the worker process 7 has ended, exit code 3")

    def kill(self, seconds):
        self.lives = False


def parted(step, calls, where="forward", lost=False):
    reported = {"step": step, "calls": calls, "where": where, "message": "boom", "lost": lost}
    return Message(PARTED, bytearray(json.dumps(reported).encode()))


def result(executor, failed):
    """Step 5 as rank 0 sends it."""
    ids = np.zeros(1, np.int32)
    executor._slots.append(ids)
    errors = (StepError("step", "attention x", "boom"),) if failed else ()
    kind, parts = executor._answers.encode(StepResult(5, ids, ids, ids, ids.astype(np.uint8), errors=errors), ids)
    return Message(kind, bytearray(b"".join(parts)))


@pytest.mark.parametrize(
    ("failed", "first", "second", "words"),
    [
        (True, [parted(5, 12)], [parted(5, 12)], None),  # an exception of a plug-in is raised on each rank
        (True, [], [], None),  # drawing failed, on rank 0 alone
        (True, [parted(5, 12)], [parted(5, 13)], "failed after 12 calls: boom; rank 1 .* failed after 13"),
        (True, [parted(5, 12)], [], "failed after 12 calls: boom; rank 1 .* has not failed"),
        (False, [], [parted(5, 12)], "rank 1 .* failed after 12 calls: boom; rank 0 .* has not failed"),
        (False, [], [parted(5, 12, "sample")], "parted in step 5"),
        (False, [parted(5, 12, lost=True)], [], "rank 0 .* failed after 12 calls"),
    ],
)
def test_a_step_has_failed_on_all_ranks_at_one_place_or_the_engine_ends(monkeypatch, failed, first, second, words):
    monkeypatch.setattr(multiprocess, "AGREE", 0.05)
    monkeypatch.setattr(multiprocess, "DYING", 0.05)
    executor = Multiprocess()
    file = shared_file(StatusPage.room(2))
    executor._page = StatusPage(file, 2, OPERATIONS)
    os.close(file)
    executor._child, executor._others = Rank(*first, result(executor, failed)), [Rank(*second)]
    executor._due.append(5)
    if words is None:
        assert [r.id for r in executor.collect(0)] == [5] and not executor._parted
    else:
        with pytest.raises(EngineDeadError, match=words):
            executor.collect(0)
        assert not any(child.lives for child in executor._ranks()), "none is of use any more"
    executor._page.close()


class Ending(Rank):
    """One that has ended once its messages are read."""

    def ended(self):
        return None if self.messages else ChildEnded("the worker process 7 has ended, exit code 0")


def reported(kind, error):
    return Message(kind, bytearray(_failure(0, error)))


@pytest.mark.parametrize(
    ("first", "second", "error", "words"),
    [
        ([], [reported(FAILED, ResourceError("no room"))], ResourceError, "^rank 1 of 2 .*: no room"),
        (
            [reported(LOST, RuntimeError("gone"))],
            [reported(FAILED, ResourceError("no room"))],
            ResourceError,
            "rank 1 .*no room",
        ),
        (
            [reported(FAILED, ResourceError("none"))],
            [reported(FAILED, ResourceError("no room"))],
            ResourceError,
            "^none",
        ),
        ([reported(LOST, RuntimeError("gone"))], [], EngineDeadError, "rank 1 of 2 .* has ended, exit code 0"),
    ],
)
def test_what_is_wrong_while_ranks_start_is_what_the_one_with_a_reason_said(monkeypatch, first, second, error, words):
    monkeypatch.setattr(multiprocess, "DYING", 0.1)
    executor = Multiprocess()
    executor._child = Ending(*first) if first else Rank()
    executor._others = [Ending(*second)]
    with pytest.raises(error, match=words):
        executor._ready_all(2)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_has_died_is_named_by_who_sends_it_a_plan_and_the_others_are_ended(dead):
    class Gone(Rank):
        def send(self, kind, parts, file=-1):
            raise ChildEnded("it has ended, signal 9 (SIGKILL)")

    executor, ranks = Multiprocess(), [Rank(), Rank(), Rank()]
    ranks[dead] = Gone()
    executor._child, *executor._others = ranks
    plan = StepPlan(4, *(np.zeros(1, np.int32) for _ in range(4)))
    with pytest.raises(EngineDeadError, match=rf"rank {dead} of 3 .*: it has ended, signal 9"):
        executor.submit(plan)
    assert not executor.alive() and not any(rank.lives for rank in ranks)
    with pytest.raises(EngineDeadError, match=f"rank {dead} of 3"):
        executor.collect(0)


@pytest.mark.parametrize("executor", ["multiprocess", "process"])
def test_where_no_more_files_may_be_open_the_limit_is_told(folder, monkeypatch, executor):
    def full(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(f"minivllm.plugins.executor.{executor}.Child", full)
    with pytest.raises(
        ResourceError, match=r"cannot be started: .*Too many open files \(this process may have \d+: ul"
    ):
        LLM(**options(folder, executor=executor))


def test_a_rank_that_has_ended_is_told_with_where_it_was():
    executor = Multiprocess()
    file = shared_file(StatusPage.room(2))
    executor._page = page = StatusPage(file, 2, OPERATIONS)
    os.close(file)
    for word, value in ((PHASE, 3), (BEGUN, 6), (DONE, 5), (CALLS, 40), (OPERATION, 1)):
        page.set(1, word, value)
    executor._child, executor._others = Rank(), [Rank(lives=False)]
    executor._due.append(5)
    with pytest.raises(
        EngineDeadError, match=r"rank 1 of 2 \(.*\), in step 5, waits in all_reduce number 40: .*exit code 3"
    ):
        executor.collect(0)
    page.close()


def test_ranks_that_stand_still_end_the_engine_which_says_who_is_missing(monkeypatch):
    monkeypatch.setattr(multiprocess, "LOOK", 0.01)
    executor = Multiprocess()
    executor._limit = executor.options.timeout = 0.05
    file = shared_file(StatusPage.room(2))
    executor._page = page = StatusPage(file, 2, OPERATIONS)
    os.close(file)
    executor._child, executor._others = Rank(), [Rank()]
    for rank, operation in enumerate((1, 0)):
        for word, value in ((PHASE, 3), (BEGUN, 6), (DONE, 5), (CALLS, 40 - rank), (OPERATION, operation)):
            page.set(rank, word, value)
    executor._due.append(5)
    words = (
        "Missing: rank 1.  rank 0 of 2 .*in step 5, waits in all_reduce number 40; rank 1 of 2 .*in step 5, 39 calls"
    )
    with pytest.raises(EngineDeadError, match=words):
        executor.collect(0)
    page.close()


def test_a_page_says_where_each_process_is_and_who_is_missing():
    file = shared_file(StatusPage.room(3))
    page, theirs = StatusPage(file, 3, OPERATIONS), StatusPage(file, 3, ())
    os.close(file)
    assert page.describe(0) == "starts" and page.standstill() >= 0
    for rank, words in enumerate([(3, 8, 7, 21, 1), (3, 8, 7, 21, 0), (3, 8, 8, 20, 2)]):
        for word, value in zip((PHASE, BEGUN, DONE, CALLS, OPERATION), words, strict=True):
            theirs.set(rank, word, value)
    assert page.standstill() < 0.01, "they have gone on"
    assert page.describe(0) == "in step 7, waits in all_reduce number 21"
    assert page.describe(1) == "in step 7, 21 calls to others done"
    assert page.describe(2) == "last step 7, waits in gather number 20"
    assert page.missing() == [1, 2], "who waits in no call, or in an earlier one"
    for rank, words in enumerate([(90, 89), (89, 89), (90, 89)]):
        for word, value in zip((MET, LEFT), words, strict=True):
            theirs.set(rank, word, value)
    assert page.describe(0) == "in step 7, waits in all_reduce number 21, its device waits in meeting 90"
    assert page.describe(1) == "in step 7, 21 calls to others done, its device has met the others 89 times"
    assert page.missing() == [1], "devices wait for the one that does not"
    page.close()
    theirs.close()


def test_checked_ranks_refuse_plans_columns_and_hidden_states_that_differ():
    from minivllm.plugins.executor.ranks import RankRunner

    columns = SimpleNamespace(
        known=torch.tensor([3, 0]),
        stopped=torch.tensor([False, True]),
        tokens=torch.arange(10, dtype=torch.int32).view(2, 5),
        device=torch.device("cpu"),
    )
    plan = StepPlan(4, *(np.zeros(1, np.int32) for _ in range(4)))
    for at, what in enumerate(("plans", "hidden states", "columns")):

        def differ(numbers, at=at):
            return [numbers, [n + (i == at) for i, n in enumerate(numbers)]]

        ranks = SimpleNamespace(all_gather=differ)
        one = SimpleNamespace(state=columns, ranks=ranks, _seen=[0, 0])
        with pytest.raises(RuntimeError, match=f"the ranks have different {what} before step 4: rank 0 "):
            RankRunner._compare(one, plan)
    one.ranks.all_gather = lambda numbers: [numbers, numbers]
    RankRunner._compare(one, plan)


def test_bad_options_and_models_are_refused_with_their_own_words(tmp_path, folder):
    assert MultiprocessOptions().timeout == 120.0
    with pytest.raises(PluginError, match="timeout=0: expected a number from 1"):
        LLM(**options(folder, executor={"name": "multiprocess", "options": {"timeout": 0}}, tensor_parallel_size=2))
    with pytest.raises(ModelError, match="config"):
        LLM(**options(tmp_path, **RANKS))
    assert not [name for name in os.listdir(Path("/dev/shm")) if "minivllm" in name]
