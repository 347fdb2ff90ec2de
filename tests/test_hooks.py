"""Hooks: who is told what, that nobody can harm a step, and that the refusals name the package."""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import gc
import json
import logging
import random
import sys
import threading
import time

import numpy as np
import pytest
import torch
from plugin_helpers import discover, point, write_package
from wrong.hooks import Mirror

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.cli import main
from minivllm.config import load_config
from minivllm.errors import ConfigError, PluginError
from minivllm.hooks import Hooks, hookimpl
from minivllm.hooks.bridge import EngineHooks
from minivllm.hooks.manager import NAMES, HookManager
from minivllm.plugins.hooks.options import LiveOptions, StepLogOptions
from minivllm.plugins.hooks.step_log import COLUMNS, StepLog
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.testing.sim import VOCAB, answer, outputs, request, run, sim_engine
from minivllm.wiring import resolve

package = pytest.fixture(write_package)


@pytest.fixture(autouse=True)
def _one_thread():
    """The models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


POCKET = {"model": "pocket", "max_num_seqs": 4, "max_num_batched_tokens": 256, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


class Told(Hooks):
    """Writes down everything."""

    def __init__(self, options=None):
        super().__init__(options)
        self.of = {name: [] for name in NAMES}

    @hookimpl
    def minivllm_engine_started(self, engine):
        self.of["minivllm_engine_started"].append(engine)

    @hookimpl
    def minivllm_engine_stopped(self, engine, error):
        self.of["minivllm_engine_stopped"].append((engine, error))

    @hookimpl
    def minivllm_request_added(self, request):
        self.of["minivllm_request_added"].append(request)

    @hookimpl
    def minivllm_request_finished(self, request, end):
        self.of["minivllm_request_finished"].append((request, end))

    @hookimpl
    def minivllm_preempted(self, preemption):
        self.of["minivllm_preempted"].append(preemption)

    @hookimpl
    def minivllm_step_finished(self, step):
        self.of["minivllm_step_finished"].append(step)

    @hookimpl
    def minivllm_evicted(self, blocks):
        self.of["minivllm_evicted"].append(blocks)

    @hookimpl
    def minivllm_removed(self, blocks):
        self.of["minivllm_removed"].append(blocks)


def hooked(*plugins, **options):
    """A simulated engine that was started with plug-ins, named a, b, ..."""
    names = [f"acme/{'abcdef'[i]}" for i in range(len(plugins))]
    hooks = EngineHooks(HookManager(zip(names, plugins, strict=True)), {})
    engine = sim_engine(hooks=hooks, **options)
    hooks.started()
    return engine


def crowd(engine, n=14, seed=0):
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(16)]
    return [
        request(engine, f"r{i}", [*shared[: rng.randrange(16)], rng.randrange(VOCAB), i], max_tokens=rng.randint(1, 30))
        for i in range(n)
    ]


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("depth", [0, 2])
def test_the_tokens_that_steps_tell_of_are_those_of_each_sequence(depth):
    told = Told()
    engine = hooked(told, depth=depth, blocks=20, budget=24, max_len=64)
    made = crowd(engine)
    run(engine)
    assert engine.planner.preemptions > 0, "the test has no power: nothing was preempted"
    got, computed = {}, 0
    for step in told.of["minivllm_step_finished"]:
        assert len(step.q_len) == step.rows and len(step.token) == len(step.count) == len(step.drawn)
        computed += step.tokens
        for j, row in enumerate(step.drawn.tolist()):
            if step.count[j]:
                got.setdefault(int(step.sequence[row]), []).append(int(step.token[j]))
    by_request = {view.id: view.sequences for view in told.of["minivllm_request_added"]}
    for r in made:
        (number,) = by_request[r.id]
        assert got[number] == answer(r.prompt, r.params, max_len=64)[0]
    last = told.of["minivllm_step_finished"][-1]
    assert last.generated == engine.stats()["generated_tokens"] and last.running == 0 == last.waiting
    assert computed == engine.clock.tokens[: engine.clock.count].sum()


def test_every_request_that_was_added_is_finished_once_with_its_figures():
    told = Told()
    engine = hooked(told, depth=1, blocks=20, max_len=64)
    made = crowd(engine)
    made.append(request(engine, "two", range(9), n=2, max_tokens=4, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.abort("r5")
    with pytest.raises(Exception, match="empty"):
        request(engine, "refused", [])
    run(engine)
    added = told.of["minivllm_request_added"]
    ended = {view.id: end for view, end in told.of["minivllm_request_finished"]}
    assert [view.id for view in added] == [r.id for r in made] and len(ended) == len(made)
    assert ended["r5"].reasons == ("abort",) and ended["two"].reasons == ("length", "length")
    for r in made:
        end = ended[r.id]
        assert list(end.tokens) == [len(ids) for ids, _ in outputs(r)] and end.finished == r.finished
        assert end.preempted == sum(s.preempted for s in r.sequences) and end.error is None
    assert len(told.of["minivllm_preempted"]) == engine.planner.preemptions > 0
    assert sum(end.preempted for end in ended.values()) == engine.planner.preemptions


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_stored_less_removed_is_what_can_be_found(windows):
    mirror, told = Mirror(), Told()
    engine = hooked(mirror, told, depth=1, windows=windows, blocks=20, max_len=64)
    crowd(engine)
    evicted = lambda: sum(len(b.keys) for b in told.of["minivllm_evicted"])  # noqa: E731
    while engine.busy:
        engine.step()
        for g, pool in enumerate(engine.cache.pools):
            assert mirror.keys.get(g, set()) == set(pool.index)
    assert evicted() == engine.stats()["evictions"] > 0
    engine.reset_prefix_cache()
    assert not any(mirror.keys.values()) and not any(p.index for p in engine.cache.pools)
    assert {b.reason for b in told.of["minivllm_removed"]} == {"evicted", "dropped"}


def test_views_are_frozen_and_lead_nowhere():
    told = Told()
    engine = hooked(told, blocks=20, max_len=64)
    crowd(engine)
    run(engine)
    engine.stop()
    seen = list(told.of["minivllm_engine_started"])
    seen += [told.of[name][0] for name in ("minivllm_preempted", "minivllm_step_finished", "minivllm_evicted")]
    seen += told.of["minivllm_request_finished"][0]
    for view in seen:
        for f in dataclasses.fields(view):
            value = getattr(view, f.name)
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(view, f.name, value)
            if isinstance(value, np.ndarray):
                assert not value.flags.writeable, f.name
        assert all(found is not engine for found in gc.get_referents(*gc.get_referents(view)))
    with pytest.raises(TypeError):
        told.of["minivllm_request_added"][0].params["max_tokens"] = 9


def test_the_engine_is_started_and_stopped_once_and_says_what_ended_it():
    told = Told()
    engine = hooked(told)
    request(engine, "r", range(5))
    engine._die("the evictor failed")
    engine.stop()
    engine.stop()
    (view,) = told.of["minivllm_engine_started"]
    assert (view.max_num_seqs, view.block, view.blocks) == (8, 4, (63,))
    assert told.of["minivllm_engine_stopped"] == [(view, "the evictor failed")]
    assert told.of["minivllm_request_finished"][0][1].error == "the evictor failed"


def test_a_failed_step_is_told_with_its_error():
    told = Told()
    engine = hooked(told)
    engine.executor.fail_at = {2}
    request(engine, "r", range(5), max_tokens=9)
    run(engine)
    assert [step.error for step in told.of["minivllm_step_finished"]] == [None, "sim: planned failure"]


def test_hooks_run_on_the_thread_of_the_engine(package):
    package("acme_threads", THREADS)
    options = {**POCKET, "hooks": ["acme_threads:Threads"], "allow_targets": ["acme_threads"]}

    async def serve():
        async with AsyncLLM(**options) as llm:
            async for _ in llm.generate("One day", GREEDY):
                pass

    asyncio.run(serve())
    import acme_threads

    assert acme_threads.SEEN["step"] == {"minivllm-engine"} == acme_threads.SEEN["added"]
    acme_threads.SEEN.clear()
    with LLM(**options) as llm:
        llm.generate("One day", GREEDY, use_tqdm=False)
    assert acme_threads.SEEN["step"] == {threading.current_thread().name} == acme_threads.SEEN["added"]


THREADS = """
import threading
from minivllm.hooks import Hooks, hookimpl
SEEN = {}
class Threads(Hooks):
    @hookimpl
    def minivllm_step_finished(self):
        SEEN.setdefault("step", set()).add(threading.current_thread().name)
    @hookimpl
    def minivllm_request_added(self):
        SEEN.setdefault("added", set()).add(threading.current_thread().name)
"""


# ---------------------------------------------------------------- failures


class Fails(Hooks):
    """Raises in each step; ``SystemExit`` in the end of each request."""

    calls = 0

    @hookimpl
    def minivllm_step_finished(self):
        self.calls += 1
        raise ValueError("no disk")

    @hookimpl
    def minivllm_request_finished(self):
        raise SystemExit(3)


def test_an_observer_that_raises_is_logged_with_its_package_and_disabled_after_three_times(caplog):
    fails, told = Fails(), Told()
    engine = hooked(fails, told)
    made = crowd(engine)
    with caplog.at_level(logging.WARNING, "minivllm.hooks"):
        run(engine, check=True)
    assert all(outputs(r) == [answer(r.prompt, r.params)] for r in made)
    assert engine.stats()["hook_failures"] == {"acme/a": 3, "acme/b": 0} and fails.calls <= 3
    assert len(told.of["minivllm_request_finished"]) == len(made), "the other plug-in goes without"
    first, *_, last = caplog.messages
    assert first == "hooks 'acme/a' (acme -) failed in minivllm_step_finished (1 of 3): ValueError: no disk"
    assert last == "hooks 'acme/a' (acme -) is disabled: it failed 3 times" and len(caplog.messages) == 4


def test_wrappers_see_both_sides_and_the_first_is_the_outermost():
    trail = []

    class Wraps(Hooks):
        @hookimpl(wrapper=True)
        def minivllm_plan_and_submit(self, turn):
            trail.append((self.options, "before", turn))
            step = yield
            trail.append((self.options, "after", step and step.id))

        @hookimpl(wrapper=True)
        def minivllm_publish(self, step):
            trail.append((self.options, "publish", step.id))
            yield

    engine = hooked(Wraps("a"), Wraps("b"))
    request(engine, "r", range(5), max_tokens=1, ignore_eos=True)
    engine.step()
    plan = [("a", "before", 0), ("b", "before", 0), ("b", "after", 1), ("a", "after", 1)]
    assert trail == [*plan, ("a", "publish", 1), ("b", "publish", 1)]
    engine.step()  # nothing to do
    assert trail[-1] == ("a", "after", None)


@pytest.mark.parametrize("fault", ["before", "after", "twice", "never", "swallows"])
def test_a_wrapper_cannot_change_what_happens(fault):
    class Bad(Hooks):
        @hookimpl(wrapper=True)
        def minivllm_plan_and_submit(self):
            if fault == "before":
                raise ValueError("before")
            if fault == "never":
                return
            try:
                yield
            except BaseException:
                if fault != "swallows":
                    raise
            if fault == "after":
                raise ValueError("after")
            if fault == "twice":
                yield

    engine = hooked(Bad())
    made = crowd(engine, 4)
    run(engine)
    assert all(outputs(r) == [answer(r.prompt, r.params)] for r in made)
    assert engine.stats()["hook_failures"] == {"acme/a": 0 if fault == "swallows" else 3}
    engine.executor.submit = lambda plan: 1 / 0
    request(engine, "late", range(5))
    engine.step()
    assert engine.dead == "ZeroDivisionError: division by zero"


def test_a_hook_that_cannot_start_is_the_error_of_the_start_and_the_others_are_told(tmp_path):
    told = Told()
    log = StepLog(StepLogOptions(path=str(tmp_path / "none" / "s.csv")))
    with pytest.raises(ConfigError, match=r"hooks step_log: .*s.csv: No such file or directory"):
        hooked(told, log)
    ((_, error),) = told.of["minivllm_engine_stopped"]
    assert "a hook failed at start" in error

    class Broken(Hooks):
        @hookimpl
        def minivllm_engine_started(self):
            raise RuntimeError("no socket")

    text = r"^hooks 'acme/a' \(acme -\) failed in minivllm_engine_started: RuntimeError: no socket$"
    with pytest.raises(PluginError, match=text):
        hooked(Broken())


def test_an_engine_without_listeners_makes_no_views():
    assert sim_engine().hooks is None and "hook_failures" not in sim_engine().stats()
    engine = hooked(Fails())
    assert engine.planner.on_preempt is None and all(p.on_change is None for p in engine.cache.pools)

    class Quiet(Hooks):
        @hookimpl
        def minivllm_engine_stopped(self):
            pass

    engine = hooked(Quiet())
    crowd(engine, 3)
    run(engine)
    assert not engine.hooks._planned and not engine.hooks._published and not engine.hooks._steps


# ---------------------------------------------------------------- registration

PACKAGE = """
from minivllm.hooks import Hooks, hookimpl
from minivllm.spec import Spec
SPEC = Spec("acme_hooks:Mine", {api}, "for a test")
class Mine({base}):
    @hookimpl({mark})
    def {name}(self{args}):
        {body}
"""


def chosen(package, environ=None, **text):
    """What is resolved with a hook plug-in of this text."""
    usual = {"api": (1, 0), "base": "Hooks", "mark": "", "name": "minivllm_step_finished", "args": "", "body": "pass"}
    package("acme_hooks", PACKAGE.format(**{**usual, **text}))
    sys.modules.pop("acme_hooks", None)
    catalog = discover(point("acme", "mine", "acme_hooks:SPEC", "hooks", "2.1"), environ=environ)
    return resolve(load_config(keywords={**POCKET, "device": "cpu", "hooks": ["mine"]}, environ={}).engine, catalog)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "minivllm_step_end"}, "there is no hook 'minivllm_step_end'. Did you mean"),
        ({"args": ", stats"}, r"minivllm_step_finished: argument\(s\) {'stats'} are declared .*; it is told: step$"),
        ({"mark": "wrapper=True", "body": "yield"}, "minivllm_step_finished cannot be wrapped: want @hookimpl without"),
        ({"mark": "hookwrapper=True", "body": "yield"}, "is an old-style wrapper: want @hookimpl"),
        ({"name": "minivllm_publish"}, r"minivllm_publish is a wrapper: want @hookimpl\(wrapper=True\) and a yield"),
        ({"mark": "specname='minivllm_nothing'", "name": "f"}, "there is no hook 'minivllm_nothing'"),
    ],
)
def test_a_hook_that_does_not_fit_the_contract_is_refused_in_words(package, wrong, message):
    parts = chosen(package, **wrong).hooks
    with pytest.raises(PluginError, match=message) as info:
        HookManager.make(parts)
    assert str(info.value).startswith("hooks 'acme/mine' (")


def test_versions_blocks_and_base_classes_are_those_of_any_seam(package):
    with pytest.raises(PluginError, match=r"contract version: want 1.0, supports 2.0  .written for a newer minivllm"):
        chosen(package, api=(2, 0))
    with pytest.raises(PluginError, match="is blocked by MINIVLLM_PLUGINS"):
        chosen(package, environ={"MINIVLLM_PLUGINS": ""})
    with pytest.raises(PluginError, match=r"is not a subclass of minivllm.hooks.Hooks"):
        HookManager.make(chosen(package, base="object").hooks)


def test_a_hook_that_is_newer_may_be_optional(package):
    parts = chosen(package, mark="optionalhook=True", name="minivllm_next_year").hooks
    assert not HookManager.make(parts).listens(*NAMES)


# ---------------------------------------------------------------- first result


def test_the_first_hook_that_knows_a_model_is_believed_and_explain_says_so(package):
    body = "return 'pocket' if model == 'alias' else None"
    package("acme_hooks", PACKAGE.format(api=(1, 0), base="Hooks", mark="", name="minivllm_resolve_model",
                                         args=", model", body=body))  # fmt: skip
    catalog = discover(point("acme", "mine", "acme_hooks:SPEC", "hooks", "2.1"))
    want = load_config(keywords={**POCKET, "model": "alias", "device": "cpu", "hooks": ["mine"]}, environ={}).engine
    resolved = resolve(want, catalog)
    assert resolved.wiring.model_dir.endswith("pocket/data") or "pocket" in resolved.wiring.model_dir
    assert "alias is pocket (says acme/mine)" in resolved.explain()


@pytest.mark.parametrize(
    ("body", "message"),
    [("raise ValueError('no net')", "failed in minivllm_resolve_model: ValueError: no net"),
     ("return 7", "answered minivllm_resolve_model with a int; want a path or an id")],
)  # fmt: skip
def test_a_first_result_hook_that_fails_is_an_error(package, body, message):
    with pytest.raises(PluginError, match=f"^hooks 'acme/mine'.*{message}"):
        chosen(package, name="minivllm_resolve_model", body=body)


READER = """
import json
from minivllm.hooks import Hooks, hookimpl
class Json(Hooks):
    @hookimpl
    def minivllm_read_config(self, path):
        return json.load(open(path)) if path.endswith(".json") else None
"""


def test_a_hook_reads_a_configuration_in_another_format(tmp_path, package):
    package("acme_json", READER)
    file = tmp_path / "exp.json"
    file.write_text(json.dumps({"model": "pocket", "seed": 5, "sampling": {"max_tokens": 3}}))
    enabled = {"hooks": ["acme_json:Json"], "allow_targets": ["acme_json"]}
    loaded = load_config([file], keywords=enabled, environ={})
    assert (loaded.engine.seed, loaded.sampling) == (5, {"max_tokens": 3}) and loaded.origins["seed"] == str(file)
    for options, environ in (({}, {}), (enabled, {})):
        with pytest.raises(ConfigError, match=r"want a file that ends in .toml, .yaml or .yml"):
            load_config([file if not options else tmp_path / "exp.ini"], keywords=options, environ=environ)
    file.write_text(json.dumps({"modle": "pocket"}))
    with pytest.raises(ConfigError, match=r"exp.json: unknown option 'modle'. Did you mean 'model'"):
        load_config([file], keywords=enabled, environ={})
    with pytest.raises(PluginError, match="is a target, and a target runs code"):
        load_config([file], environ={"MINIVLLM__HOOKS": '["acme_json:Json"]'})


# ---------------------------------------------------------------- built-ins


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_the_step_log_has_a_line_for_each_step_with_the_engines_figures(tmp_path, suffix):
    path = tmp_path / f"s.{suffix}"
    told = Told()
    engine = hooked(StepLog(StepLogOptions(path=str(path))), told, depth=1, blocks=20, max_len=64)
    crowd(engine)
    run(engine)
    text = path.read_text()  # before the engine stops: it can be followed
    engine.stop()
    lines = text.splitlines()
    rows = list(csv.DictReader(lines)) if suffix == "csv" else [json.loads(line) for line in lines]
    steps = told.of["minivllm_step_finished"]
    assert [int(r["step"]) for r in rows] == [s.id for s in steps] and all(tuple(r) == COLUMNS for r in rows)
    for name in ("rows", "tokens", "running", "waiting", "blocks_free", "blocks_cached", "preemptions", "evictions"):
        assert [int(r[name]) for r in rows] == [getattr(s, name) for s in steps], name
    assert sum(int(r["accepted"]) for r in rows) == engine.publisher.tokens == int(rows[-1]["generated"])
    assert all(0 < float(r["plan_ms"]) < 1e3 for r in rows)


def test_the_live_view_shows_queue_batch_cache_and_rate():
    pytest.importorskip("rich", reason='pip install "minivllm[live]"')
    from rich.console import Console

    from minivllm.plugins.hooks.live import Live

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    live = Live(LiveOptions(), console)
    engine = hooked(live, blocks=20, max_len=64)
    console.print(live.table())
    assert "waiting for the first step" in console.export_text()
    crowd(engine)
    for _ in range(12):
        engine.step()
    step = live.seen[0]
    console.print(live.table())
    text = console.export_text()
    assert f"{step.waiting} waiting" in text and f"{step.running} of 8" in text and f"{step.blocks_free} free" in text
    assert f"{step.rows} rows, {step.tokens} tokens" in text and "tokens/s" in text and live.seen[1] > 0
    engine.stop()
    assert live.display is None
    console.file.close()


def test_the_command_line_runs_hooks_and_shows_their_failures(tmp_path, package, capsys, monkeypatch):
    package("acme_fails", "from minivllm.hooks import *\nclass F(Hooks):\n    @hookimpl\n"
            "    def minivllm_step_finished(self):\n        raise OSError('no disk')\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    options = ["--set", "hooks=['step_log', 'acme_fails:F']", "--allow-target", "acme_fails"]
    assert main(["generate", "One day", "--max-tokens", "5", *options]) == 0
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 5
    shown = capsys.readouterr().err
    assert "hooks 'local/acme_fails:F' (local -) failed in minivllm_step_finished (3 of 3): OSError: no disk" in shown
    assert "is disabled: it failed 3 times" in shown and "Traceback" not in shown


# ---------------------------------------------------------------- time of each plug-in


def test_a_policy_that_sleeps_shows_under_its_seam_and_nowhere_else():
    class Slow(Fcfs):
        def shape(self, load, now):
            time.sleep(0.002)
            return super().shape(load, now)

    engine = sim_engine(policy=Slow)
    crowd(engine, 4)
    run(engine)
    seams = engine.stats()["seam_ms"]
    assert seams["scheduler"] >= 2 and engine.stats()["plan_ms"] >= 2
    assert all(ms < 2 for name, ms in seams.items() if name != "scheduler"), seams


def test_a_hook_within_an_evictors_call_counts_for_the_hook():
    class Slow(Hooks):
        @hookimpl
        def minivllm_stored(self):
            time.sleep(0.002)

    engine = hooked(Slow())
    crowd(engine, 4)
    run(engine)
    seams = engine.stats()["seam_ms"]
    stored = engine.cache.pools[0].stamps
    assert seams["hooks:acme/a"] * engine.clock.count >= 2 * stored > 0
    assert seams["evictor"] * engine.clock.count < 2 * stored


def test_a_real_engine_counts_the_time_of_each_plug_in():
    with LLM(**POCKET) as llm:
        llm.generate("One day", SamplingParams(max_tokens=6, presence_penalty=0.5), use_tqdm=False)
        stats = llm.stats()
    seams = stats["seam_ms"]
    assert set(seams) == {
        "attention", "model", "processor:minivllm/logit_bias", "processor:minivllm/penalties", "sampler",
        "scheduler", "strategy",
    }  # fmt: skip
    assert seams["model"] > 0 and seams["processor:minivllm/penalties"] > 0 and seams["sampler"] > 0
    whole = sum(stats[f"{part}_ms"] for part in ("plan", "submit", "wait", "publish"))
    assert seams["model"] < 20 * whole  # means beside medians: the first step is slow
