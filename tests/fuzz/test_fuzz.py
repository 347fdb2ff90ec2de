"""The fuzzer itself: a seed always gives the same case, sound engines pass, and planted faults are found under their
kinds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minivllm.core.engine import publisher
from minivllm.core.engine.cache import KVCache
from minivllm.core.engine.engine import Engine
from minivllm.core.engine.masks import RowMasks
from minivllm.core.engine.request import Seq
from minivllm.core.interfaces.finish import Finish
from minivllm.core.interfaces.plan import NAN
from minivllm.frontend.requests import Tracked
from minivllm.plugins.processor.bad_words import BadWords

from . import models, run
from .cases import VERSION, Ask, Case, case_of
from .configs import PLAIN, VOCAB
from .functions import GRAMMARS, fits, sampling_params
from .invariants import check
from .ledger import Ledger
from .pool import Pool
from .shrink import keep, plainer_asks, plainer_engines
from .ties import Ties
from .worker import Player

QUICK = (1, 4, 5, 13)  # one seed for each way of driving, and one with several engines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("fuzz")
    models.make(made)
    return made


@pytest.fixture
def player(folder):
    torch.set_num_threads(1)
    made = Player(folder)
    yield made
    made.close()


# ---- the generator -----------------------------------------------------------------------------------------------


def test_a_seed_is_one_case_and_json_holds_it():
    for seed in range(40):
        case = case_of(seed, "cuda", "bfloat16")
        assert case == case_of(seed, "cuda", "bfloat16") == Case.from_json(case.to_json())
        assert replace(case, dtype="float16") == case_of(seed, "cuda", "float16"), "the dtype changes nothing else"


def test_the_parameters_of_all_requests_are_sound():
    for seed in range(60):
        case = case_of(seed, "cpu", "float32")
        for ask in case.asks:
            sampling_params(ask.params, VOCAB[case.engines[ask.engine]["model"]])


def test_every_option_and_parameter_is_drawn():
    options, params, drives = Counter(), Counter(), Counter()
    for seed in range(300):
        case = case_of(seed, "cuda", "float32")
        drives[case.drive] += 1
        for engine in case.engines:
            options.update(f"{k}={json.dumps(v)}" for k, v in engine.items() if k != "num_kvcache_blocks")
        for ask in case.asks:
            params.update(k for k, v in ask.params.items() if v not in (None, False))
            params.update(k for k in ("after", "leave") if getattr(ask, k) is not None)
    assert set(drives) == {"generate", "streams", "async"}
    assert {f"{k}={json.dumps(v)}" for k in PLAIN for v in (PLAIN[k],)} - set(options) == {
        f"num_kvcache_blocks={PLAIN['num_kvcache_blocks']}"
    }
    wanted = (
        "best_of beam_width n length_penalty early_stopping temperature top_p top_k min_p typical_p mirostat_tau "
        "mirostat_eta repetition_penalty presence_penalty frequency_penalty logit_bias bad_words allowed_token_ids "
        "no_repeat_ngram_size temperature_schedule min_tokens stop stop_token_ids include_stop_str_in_output "
        "ignore_eos logprobs prompt_logprobs priority tenant ttft_ms tpot_ms expected_tokens cache_salt "
        "allowed_tokens_fn choose_fn logits_processors structured_outputs after leave guidance_scale "
        "negative_prompt_token_ids taps adapter kv_budget images"
    )
    assert not set(wanted.split()) - set(params)


def test_each_form_of_an_answer_is_told_from_others():
    good = {"digits": "123-4567", "letters": "abcabd", "words": "The fox ran.", "choice": "no", "integer": "7",
            "object": '{"name":"x","old":true}', "array": '["a","b"]'}  # fmt: skip
    for grammar in GRAMMARS:
        requested = grammar["asked"]
        assert fits(requested, good[grammar["name"]], True)
        assert not fits(requested, good[grammar["name"]] + "!", True)
    assert fits({"choice": ["yes"]}, "ye", False) and not fits({"choice": ["yes"]}, "yo", False)


# ---- sound engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", QUICK)
def test_a_sound_engine_has_no_fault(player, seed):
    result = player.play(case_of(seed, "cpu", "float32"))
    assert not result["faults"] and result["tokens"] > 0 and not result["replace"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_many_configurations_have_no_fault(dtype, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    requested = f"--configs 40 --processes 2 --seconds 900 --dtypes {dtype} --first-seed 500 --ledger {ledger}"
    done = subprocess.run([sys.executable, run.__file__, *requested.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "failing seeds: none" in done.stdout
    assert json.loads(ledger.read_text().splitlines()[-1])["run"]["configurations"] == 40


# ---- planted faults ----------------------------------------------------------------------------------------------


def workload(drive="generate", **options):
    """Return a case with requests of several kinds at once, which the plain engine runs one at a time."""
    engine = {**PLAIN, "model": "llama", "max_num_seqs": 8, "max_num_batched_tokens": 64, "run_ahead": 1,
              "enable_prefix_caching": True, "num_kvcache_blocks": 60, **options}  # fmt: skip
    kinds = [
        {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "top_p": 0.9}, {"n": 3, "temperature": 1.0},
        {"temperature": 0.0, "allowed_tokens_fn": ["residue", 5]}, {"temperature": 1.0, "bad_words": [[7], [9]]},
        {"temperature": 1.0, "bad_words": [[i] for i in range(3, 180)]},
    ]  # fmt: skip
    common = {"max_tokens": 14, "ignore_eos": True}
    asks = [Ask([5 + i] * (3 + 9 * i), {"seed": i, **common, **kind}) for i, kind in enumerate(kinds)]
    return Case(0, "cpu", "float32", drive, [engine], asks)


def crowded(plan):
    """Return whether a step has rows of several requests, which never happens in the plain engine."""
    return len(set(plan.slots.tolist())) > 3


def wrong_tokens(patch):
    true = publisher.Publisher.publish

    def publish(self, flight, result):
        if crowded(flight.plan) and flight.plan.id % 5 == 0:
            result = replace(result, tokens=np.where(result.tokens > 5, result.tokens - 1, result.tokens))
        return true(self, flight, result)

    patch.setattr(publisher.Publisher, "publish", publish)


def open_mask(patch):
    def by_function(self, seq, row):
        row[:] = -1

    patch.setattr(RowMasks, "_by_function", by_function)


def deaf_bad_words(patch):
    patch.setattr(BadWords, "apply", lambda self, logits, rows, state: None)


def lost_branch(patch):
    true = Tracked._finish

    def finish(self, request):
        request.answer = request.answer[:2]
        true(self, request)

    patch.setattr(Tracked, "_finish", finish)


def nothing_to_draw(patch):
    true = publisher.Publisher.publish

    def publish(self, flight, result):
        if crowded(flight.plan) and len(result.flags):
            flags = result.flags.copy()
            flags[0] = NAN
            result = replace(result, flags=flags)
        return true(self, flight, result)

    patch.setattr(publisher.Publisher, "publish", publish)


def kept_block(patch):
    true, seen = KVCache.release, Counter()

    def release(self, slot):
        seen["calls"] += 1
        if seen["calls"] % 7 == 0 and self.slots.blocks[0, slot] > 1:
            self.slots.blocks[0, slot] -= 1  # forget the last of its blocks
        true(self, slot)

    patch.setattr(KVCache, "release", release)


def lost_piece(patch):
    true = Tracked._sink

    def sink(self, seq, ids, ended):
        stream = self.stream
        if len(self.texts[seq.sample].token_ids) == 4:
            self.stream = None
        try:
            return true(self, seq, ids, ended)
        finally:
            self.stream = stream

    patch.setattr(Tracked, "_sink", sink)


def shifted_scores(patch):
    true = Seq.flush_logprobs

    def flush_logprobs(self):
        true(self)
        if len(self.logprobs) > 3 and self.request.params.logprobs is not None:
            self.logprobs.chosen[1] = 0.25

    patch.setattr(Seq, "flush_logprobs", flush_logprobs)


def cut_short(patch):
    def publish(self, seq, ended):
        if ended is None and int(self.slots.known[seq.slot]) == len(seq.request.prompt) + 9:
            ended = Finish("length")
        return send(self, seq, ended)

    send = publisher.Publisher.send
    patch.setattr(publisher.Publisher, "send", publish)


def dead_engine(patch):
    true = Engine.step

    def step(self):
        if len(self.slots.running) > 4:
            self._die("planned")
        return true(self)

    patch.setattr(Engine, "step", step)


PLANTED = [
    (wrong_tokens, "generate", "wrong token"), (open_mask, "generate", "mask"), (deaf_bad_words, "async", "mask"),
    (lost_branch, "streams", "count"), (nothing_to_draw, "generate", "nan"), (kept_block, "generate", "leak"),
    (lost_piece, "streams", "stream"), (shifted_scores, "generate", "logprob"), (cut_short, "streams", "count"),
    (dead_engine, "async", "dead"),
]  # fmt: skip


@pytest.mark.parametrize("drive", ["generate", "streams", "async"])
def test_the_workload_of_the_planted_faults_is_sound(player, drive):
    assert not player.play(workload(drive))["faults"]


@pytest.mark.parametrize(("plant", "drive", "kind"), PLANTED, ids=lambda x: getattr(x, "__name__", x))
def test_a_planted_fault_is_found_under_its_kind(player, monkeypatch, plant, drive, kind):
    plant(monkeypatch)
    faults = player.play(workload(drive))["faults"]
    assert kind in {found for found, *_ in faults}, faults


# ---- processes that die or hang ----------------------------------------------------------------------------------

FAKE = """
import json, os, sys, time, signal, faulthandler
faulthandler.register(signal.SIGUSR1)
def tell(**said): print(json.dumps(said), flush=True)
tell(stage="ready")
for line in sys.stdin:
    case = json.loads(line)
    print("== seed", case["seed"], file=sys.stderr, flush=True)
    tell(stage="alone")
    if case["seed"] == 2:
        print("device-side assert triggered", file=sys.stderr, flush=True); os._exit(3)
    if case["seed"] == 4:
        time.sleep(60)
    faults = [["mask", "planned", 0]] if case["seed"] == 5 else []
    tell(done={"seed": case["seed"], "dtype": "float32", "requests": 1, "tokens": 1, "met": {}, "faults": faults,
               "replace": case["seed"] == 6, "seconds": 0.01})
    if case["seed"] == 6: break
"""


@pytest.fixture
def fake(tmp_path):
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    return program


def test_a_worker_that_dies_or_hangs_is_a_fault_and_the_others_are_played(fake, tmp_path):
    found = {}
    pool = Pool(2, tmp_path, silence=2.0, until=time.monotonic() + 60, program=fake)
    cases = (Case(seed, "cpu", "float32", "generate", [], []) for seed in range(12))
    cut = pool.run(cases, lambda case, result: found.update({case.seed: result["faults"]}))
    assert cut == 0 and sorted(found) == list(range(12)) and not pool.workers
    assert {seed: faults[0][0] for seed, faults in found.items() if faults} == {2: "died", 4: "hung", 5: "mask"}
    assert "device-side assert triggered" in found[2][0][1] and "status 3" in found[2][0][1]
    assert "fake.py" in found[4][0][1], "where it hangs"


def test_time_is_kept_although_a_worker_hangs(fake, tmp_path):
    begun = time.monotonic()
    pool = Pool(1, tmp_path, silence=100.0, until=begun + 3.0, program=fake)
    cut = pool.run(iter([Case(4, "cpu", "float32", "generate", [], [])]), lambda *_: None)
    assert cut == 1 and time.monotonic() - begun < 5


# ---- ledger, shrinking, rules ------------------------------------------------------------------------------------


def test_a_ledger_tells_what_failed_before_and_which_seeds_are_new(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger("cuda", [path])
    assert (ledger.failed, ledger.next) == ({}, 0)
    for _ in range(2):
        ledger.note(7, "float16", "nan", "none left", 3)
        ledger.note(8, "float16", "", "", 3)
    assert len(path.read_text().splitlines()) == 1, "news only"
    ledger.add({"run": {"last_seed": 41}})
    path.open("a").write(json.dumps({"generator": "older", "device": "cuda", "seed": 9, "dtype": "float32"}) + "\n")
    again = Ledger("cuda", [path])
    assert (again.failed, again.next, again.other) == ({(7, "float16"): "nan"}, 42, 1)
    again.note(7, "float16", "", "", 3)
    assert Ledger("cuda", [path]).failed == {(7, "float16"): ""}, "it stays among those that are run first"
    assert Ledger("cpu", [path]).failed == {} and Ledger("cpu", [path]).next == 42


def test_a_seed_that_failed_is_run_again_with_the_executor_that_it_failed_with(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger("cpu", [path], "process").note(5, "float32", "leak", "two blocks", 3)
    assert json.loads(path.read_text())["executor"] == "process"
    assert Ledger("cpu", [path], "process").failed == {(5, "float32"): "leak"}
    assert Ledger("cpu", [path]).failed == {}, "with another it may never have failed"


def test_the_committed_ledger_can_be_read():
    path = Path(__file__).with_name("ledger.jsonl")
    assert all(json.loads(line)["generator"] for line in path.read_text().splitlines()) and VERSION
    assert len(path.read_text().splitlines()) < 1000


def test_smaller_cases_are_cases(player):
    case = case_of(3, "cpu", "float32")
    for small in [*list(plainer_engines(case))[:40], *list(plainer_asks(case))[:40], keep(case, [1, 4])]:
        assert Case.from_json(small.to_json()) == small != case
        for ask in small.asks:
            assert ask.after is None or ask.after < len(small.asks)


def test_shrinking_leaves_the_request_that_fails(player, monkeypatch, folder):
    from .shrink import Shrinker

    open_mask(monkeypatch)
    made = Shrinker(keep(workload(), [1, 3, 4]), folder, 1, 1, 60.0, time.monotonic() + 300)
    made.fails = lambda case: (
        bool(player.play(case)["faults"]) and made.reported.update(kind="mask", message="") is None
    )
    small = made.run()
    assert [set(a.params) for a in small.asks] == [{"seed", "max_tokens", "allowed_tokens_fn"}]
    assert len(small.asks[0].prompt) == 1 and small.asks[0].params["max_tokens"] <= 2
    compile(made.program(small), "program", "exec")


def test_every_rule_of_an_answer_can_be_broken(player):
    """Check that each change of a sound answer is found."""
    params = {"seed": 1, "max_tokens": 9, "temperature": 0.0, "logprobs": 3, "ignore_eos": True, "prompt_logprobs": 1}
    engine, prompt = workload().engines[0], [5, 6, 7]
    answer = player.oracle(workload()).answer(engine, prompt, params)

    def kinds(**changes):
        out = replace(answer.outputs[0], **changes)
        return {k for k, _ in check(params, "llama", prompt, 512, "raw_logprobs", replace(answer, outputs=[out]))}

    out = answer.outputs[0]
    tied = [(out.logprobs[0][0][0], -3.0, 9), (8, -1.0, 1), (7, -1.0, 2), (3, -2.0, 3)]
    swapped = [[*out.logprobs[0][:1], *out.logprobs[0][:0:-1]], *out.logprobs[1:]]
    assert kinds() == set()
    assert kinds(tokens=out.tokens[:-1], logprobs=out.logprobs[:-1], cumulative=out.cumulative) >= {"count", "logprob"}
    assert kinds(finish="stop") == {"finish"} and kinds(finish="abort") == {"finish"}
    assert kinds(tokens=[999, *out.tokens[1:]]) == {"mask", "logprob"}
    assert kinds(cumulative=out.cumulative + 1) == {"logprob"} == kinds(logprobs=swapped)
    assert kinds(logprobs=[tied, *out.logprobs[1:]], cumulative=None) == {"ties"}
    short = replace(answer, prompt_logprobs=answer.prompt_logprobs[1:])
    assert {k for k, _ in check(params, "llama", prompt, 512, "raw_logprobs", short)} == {"logprob"}


@pytest.mark.parametrize("chosen, tie", [({}, False), ({"choose_fn": ["hashed", 0]}, True)])
def test_noise_decides_between_near_logits_only_where_tokens_are_drawn(chosen, tie):
    params = {"temperature": 1.5, "seed": 3, **chosen}
    ties = Ties(None, {"model": "qwen3", "quantizer": "none", "kv_format": "auto"}, [1, 2], params)
    ties._logits = lambda forced: np.linspace(1.0, 1.0005, 40)
    got, want = (SimpleNamespace(tokens=[token], index=0) for token in (7, 9))
    noise = ties._noise(0, 0, 40)
    assert abs(noise[7] - noise[9]) > 0.1
    assert ties(got, want, 0) is tie


def test_seeds_are_run_only_with_the_models_that_the_command_line_names(tmp_path):
    argv = ["--configs", "60", "--first-seed", "0", "--models", "lfm2,qwen3_5"]
    args = run.parse(argv)
    found = list(run.cases(Ledger("cpu", [tmp_path / "none.jsonl"], ""), args))
    assert 0 < len(found) < 60 and args.last_seed == 59
    assert all({"lfm2", "qwen3_5"} & {options["model"] for options in case.engines} for case in found)
    with pytest.raises(SystemExit):
        run.parse(["--models", "lfm3"])
