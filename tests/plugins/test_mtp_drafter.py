"""The drafter ``mtp``: drafts of the head compared with a reference, and tokens with and without drafts."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from devices import DEVICE
from prediction_heads import MTPReference, watch_drafts

from minivllm import LLM, ConfigError, SamplingParams
from minivllm.device.layers.heads import PredictionHead
from minivllm.device.layers.native_drafts import NativeDrafts
from minivllm.device.layers.native_steps import NativeHead
from minivllm.device.native import library
from minivllm.device.worker import build
from minivllm.device.worker.head_model import HeadModel
from minivllm.device.worker.runner import Runner
from minivllm.device.worker.running import Running
from minivllm.device.worker.target_states import TargetStates
from minivllm.errors import ModelError
from minivllm.plugins.drafter.mtp import MTP
from minivllm.pocket import train_head
from minivllm.testing.tiny import read_tensors, tiny_dir, write_tensors

torch.set_num_threads(1)  # on tiny tensors threads only wait for each other
K, TOKENS = 3, 14
STORIES = [[{"role": "user", "content": f"Tell me a story about {what}."}] for what in ("a fox", "a boat", "the rain")]
SMALL = {"device": DEVICE, "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 6}


class Case:
    def __init__(self, folder, family):
        more = {"num_hidden_layers": 4} if family == "qwen3_5" else {}
        self.folder, _, self.model = tiny_dir(folder, family, eos_token_id=60, **more)
        self.head = MTPReference(self.model)
        self.head.write(self.folder)
        g = torch.Generator().manual_seed(4)
        draw = lambda n: torch.randint(3, 60, (n,), generator=g).tolist()  # noqa: E731
        begin, again = draw(37), draw(5) * 6
        self.prompts = [draw(1), draw(4), draw(19), begin + draw(9), begin + draw(22), again, draw(70)]
        with LLM(str(self.folder), drafter="none", **SMALL) as llm:
            self.want = tokens(llm, self.prompts)
        self.known = {}

    def expected(self, history, k):
        key = (*history, -1, k)
        if key not in self.known:
            self.known[key] = self.head.drafts(list(history), k)
        return self.known[key]


def tokens(llm, prompts, **params):
    params = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **params})
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(out.error for out in outs), [out.error for out in outs]
    llm.check()
    return [[o.tokens for o in out.outputs] for out in outs]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3"])
def case(request, tmp_path_factory):
    return Case(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def seen(case, monkeypatch):
    return watch_drafts(monkeypatch, case.prompts, case.want)


WAYS = {
    "native steps": {},
    "separate operations": {"graph": "off"},
    "chunks, rows wait": {"max_num_seqs": 3, "max_num_batched_tokens": 9, "kvcache_block_size": 8},
    "preempted": {"num_kvcache_blocks": 12, "kvcache_block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "blocks in a tier": {"kvstore": ["cpu"], "num_kvcache_blocks": 14, "kvcache_block_size": 16, "max_num_seqs": 2},
    "batch invariant": {"batch_invariant": True},
    "results are late": {"run_ahead": 1},
    "results of two steps are late, preempted": {"run_ahead": 2, "num_kvcache_blocks": 12, "kvcache_block_size": 16},
}


def watch_late_plans(monkeypatch, plans):
    """Return results of steps as late as possible, and add each submitted plan to ``plans``."""
    forward = Runner.forward
    monkeypatch.setattr(Running, "finished", lambda self: False)
    monkeypatch.setattr(Runner, "forward", lambda self, plan: plans.append(plan) or forward(self, plan))


@pytest.mark.parametrize("way", WAYS)
def test_drafts_are_those_of_the_reference_and_change_no_token(case, way, seen, monkeypatch):
    options, plans = {**SMALL, **WAYS[way]}, []
    if "run_ahead" in options:
        watch_late_plans(monkeypatch, plans)
    with LLM(str(case.folder), drafter="mtp", num_speculative_tokens=K, speculate="always", **options) as llm:
        for _ in range(2):  # the second time with prefix hits
            assert tokens(llm, case.prompts) == case.want
        stats = llm.stats()
        if way == "native steps" and DEVICE == "cpu" and library.why_not() is None:
            assert llm.engine.executor.runner.own_models["drafter"].native is not None
    assert stats["speculation"]["failed"] is None
    assert len(seen) > 60 and ("run_ahead" not in options or sum(len(plan.slack) > 0 for plan in plans) > 10)
    wrong = [(row, drafts) for row, drafts in seen if drafts != case.expected(row, len(drafts))]
    assert not wrong, f"{len(wrong)} of {len(seen)}: {wrong[0][1]}, expected {case.expected(wrong[0][0], K)}"


def test_a_quantizer_with_options_for_modules_that_the_head_lacks_is_taken(case):
    """The head has one layer, and looks up tokens in the embedding of the target model."""
    quantizer = {"name": "int8", "options": {"embedding": True, "skip": ["layers.1.*"]}}
    found = {}
    for drafter in ("none", "mtp"):
        with LLM(str(case.folder), drafter=drafter, speculate="always", quantizer=quantizer, **SMALL) as llm:
            found[drafter] = tokens(llm, case.prompts)
            stats = llm.stats()
    assert found["mtp"] == found["none"]
    assert stats["speculation"]["failed"] is None and stats["speculation"]["proposed"]


def test_branches_sampled_rows_and_penalties_give_the_tokens_of_a_run_without_drafts(case, seen):
    ways = (
        {"n": 3, "temperature": 0.9, "seed": 5},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 1, "logprobs": 2},
        {"min_tokens": 9, "ignore_eos": False, "stop_token_ids": list(range(3, 27))},
        {"presence_penalty": 1.0, "logit_bias": {5: 4.0}},
    )
    found = {}
    for drafter in ("none", "mtp"):
        with LLM(str(case.folder), drafter=drafter, speculate="always", batch_invariant=True, **SMALL) as llm:
            found[drafter] = [tokens(llm, case.prompts, **way) for way in ways]
    assert found["mtp"] == found["none"] and len(seen) > 100


NATIVE = pytest.mark.skipif(DEVICE != "cpu" or library.why_not() is not None, reason="needs the native part of a CPU")


@NATIVE
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_drafts_of_native_calls_are_those_of_separate_calls(case, params, monkeypatch):
    """A native step, one native call for the drafts of another step, and a call for each pass give equal drafts."""
    found, steps, calls = [], [], []
    draft, propose = NativeDrafts.draft, NativeHead.propose
    for way in ("native step", "one call", "separate calls"):
        monkeypatch.setattr(NativeDrafts, "draft", lambda self: steps.append(way) or draft(self))  # noqa: B023
        monkeypatch.setattr(NativeHead, "propose", lambda self, *args: calls.append(way) or propose(self, *args))  # noqa: B023
        if way != "native step":
            monkeypatch.setattr(NativeDrafts, "takes", lambda self, plan: False)
        if way == "separate calls":
            monkeypatch.setattr(HeadModel, "propose", lambda self, *args: None)
        seen = watch_drafts(monkeypatch, *((case.prompts, case.want) if not params else ()))
        with LLM(str(case.folder), drafter="mtp", num_speculative_tokens=K, speculate="always", **SMALL) as llm:
            answers = tokens(llm, case.prompts, **params)
            assert llm.stats()["speculation"]["failed"] is None
        found.append((answers, seen))
        monkeypatch.undo()
    (answers, seen), one, separate = found
    # a native step computes only the drafts that a row may have, which are fewer near the end of its text
    first = [(row, drafts[: len(mine)]) for (row, drafts), (_, mine) in zip(one[1], seen, strict=True)]
    assert answers == one[0] and first == seen and one == separate and len(seen) > 40
    recurrent = case.model.config.model_type.startswith("qwen3_5")  # its steps have states, which other code sets
    assert recurrent or steps.count("native step") > 5
    assert calls.count("one call") > 5 and "separate calls" not in calls


@NATIVE
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_a_native_step_ends_drafts_where_the_head_doubts_and_changes_no_token(params, monkeypatch):
    """No draft is made with a limit above 1, all with 0, and in between those that are more often right."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 50, **params})
    how = {"device": "cpu", "dtype": "float32", "max_num_seqs": 2, "num_kvcache_blocks": 40}
    head = {"name": "mtp", "options": {"model": "pocket-mtp"}}
    with LLM("pocket", drafter="none", **how) as llm:
        want = [out.tokens for out in llm.chat(STORIES, params, use_tqdm=False)]
    share, proposed = [], []
    for least in (0.0, 0.25, 1.1):
        monkeypatch.setattr(NativeDrafts, "least", least)
        with LLM("pocket", drafter=head, num_speculative_tokens=K, speculate="always", **how) as llm:
            assert [out.tokens for out in llm.chat(STORIES, params, use_tqdm=False)] == want
            stats = llm.stats()["speculation"]
        proposed.append(stats["proposed"])
        share.append(stats["accepted"] / max(1, stats["proposed"]))
    assert proposed[0] > proposed[1] > proposed[2] == 0 and share[1] > share[0] + 0.05


def test_a_checkpoint_without_the_whole_head_is_refused_before_weights_are_read(case, tmp_path, monkeypatch):
    plain = tiny_dir(tmp_path / "plain")[0]
    monkeypatch.setattr(build, "load_weights", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=r"drafter minivllm/mtp: .* has no tensor mtp\.norm; use a checkpoint"):
        LLM(str(plain), drafter="mtp", **SMALL)
    folder = shutil.copytree(case.folder, tmp_path / "part")
    tensors = read_tensors(folder)
    write_tensors(folder, {name: t for name, t in tensors.items() if name != "mtp.pre_fc_norm_hidden.weight"})
    with pytest.raises(ConfigError, match=r"has no tensor mtp\.pre_fc_norm_hidden"):
        LLM(str(folder), drafter="mtp", **SMALL)


def test_a_head_of_another_size_is_refused_by_its_tensor(case, tmp_path):
    folder = shutil.copytree(case.folder, tmp_path / "other")
    tensors = read_tensors(folder)
    write_tensors(folder, {**tensors, "mtp.fc.weight": tensors["mtp.fc.weight"][:, :-1].contiguous()})
    with pytest.raises(ModelError, match=r"mtp\.fc\.weight' has shape"):
        LLM(str(folder), drafter="mtp", **SMALL)


def test_a_drafter_that_reads_an_unknown_point_is_refused(case, monkeypatch):
    original = MTP.head
    monkeypatch.setattr(MTP, "head", lambda *args: replace(original(*args), points=("layers.9.input",)))
    with pytest.raises(ConfigError, match=r"reads the hidden states 'layers\.9\.input' of the model"):
        LLM(str(case.folder), drafter="mtp", **SMALL)


def test_a_head_that_raises_leaves_the_requests_without_drafts(case, monkeypatch, caplog):
    def fails(self, step):
        raise RuntimeError("the head has no memory")

    monkeypatch.setattr(PredictionHead, "__call__", fails)
    with (
        caplog.at_level("WARNING", "minivllm"),
        LLM(str(case.folder), speculate="always", drafter="mtp", **SMALL) as llm,
    ):
        assert tokens(llm, case.prompts) == case.want
        assert "the head has no memory" in llm.stats()["speculation"]["failed"]
    assert caplog.text.count("the head has no memory") == 1


# ---- planted faults ------------------------------------------------------------------------------------------------


def previous_states(self, state, slots, position, at=TargetStates.at):
    """Reads the states of the token before."""
    return at(self, state, slots, (position - 1).clamp(min=0))


def stale_pairs(self, ask, j, logits=HeadModel.logits):
    """Keeps pairs of rejected drafts."""
    found = logits(self, ask, j)
    self.read[ask.slots] = ask.known + j
    return found


def unshifted(self, *args, run=HeadModel._run, **more):
    """Run the head with the embedding of the token whose states a pair has, in place of the next one."""
    tokens = self.state.tokens
    self.state.tokens = torch.roll(tokens, 1, 1)
    try:
        return run(self, *args, **more)
    finally:
        self.state.tokens = tokens


def states_of_another_row(self, *args, run=HeadModel._run, **more):
    if self.last is not None and more.get("copied"):
        self.last = self.last.roll(1, 0)
    return run(self, *args, **more)


def forgets_joins(self, plan, note=HeadModel.note):
    """Keeps the pairs of the last sequence in a slot."""
    read = self.read.copy()
    note(self, plan)
    self.read = read


FAULTS = {
    "states of the token before": (TargetStates, "at", previous_states),
    "pairs of rejected drafts": (HeadModel, "logits", stale_pairs),
    "token of the states": (HeadModel, "_run", unshifted),
    "states of another row": (HeadModel, "_run", states_of_another_row),
    "pairs of another sequence": (HeadModel, "note", forgets_joins),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_drafts_and_no_token(case, fault, seen, monkeypatch):
    """The comparison with the reference catches each fault, and the tokens do not depend on it."""
    monkeypatch.setattr(*FAULTS[fault])
    # the faults of captured calls are in helpers/captured_drafts.py
    options = {"num_speculative_tokens": K, "speculate": "always", "graph": "off"}
    with LLM(str(case.folder), drafter="mtp", **options, **SMALL) as llm:
        for _ in range(2):
            assert tokens(llm, case.prompts) == case.want
    assert any(drafts != case.expected(row, len(drafts)) for row, drafts in seen)


# ---- the head of pocket --------------------------------------------------------------------------------------------


def test_the_head_of_pocket_guesses_most_tokens_of_stories():
    params = SamplingParams(temperature=0, max_tokens=60)
    head = {"name": "mtp", "options": {"model": "pocket-mtp"}}
    found = []
    for drafter in ("none", head):
        how = {"device": DEVICE, "dtype": "float32", "max_num_seqs": 3, "num_kvcache_blocks": 40}
        with LLM("pocket", drafter=drafter, num_speculative_tokens=2, speculate="always", **how) as llm:
            found.append([out.tokens for out in llm.chat(STORIES, params, use_tqdm=False)])
            stats = llm.stats().get("speculation")
    assert found[0] == found[1]
    first, second = stats["acceptance_by_position"]
    assert first > 0.6 and second > 0.5


def test_the_training_of_the_head_writes_files_that_the_drafter_reads(tmp_path):
    train_head.main(["--out", str(tmp_path), "--steps", "2", "--rows", "1", "--length", "127", "--log", "1"])
    with LLM(
        "pocket",
        drafter={"name": "mtp", "options": {"model": str(tmp_path)}},
        device=DEVICE,
        dtype="float32",
        speculate="always",
        max_num_seqs=1,
        num_kvcache_blocks=20,
    ) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert llm.stats()["speculation"]["proposed"] and llm.stats()["speculation"]["failed"] is None
