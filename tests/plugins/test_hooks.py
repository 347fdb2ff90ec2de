"""Hooks: the events that they receive, that none can harm a step, and the time that each request is charged."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import threading
import time

import numpy as np
import pytest
import torch
from hook_helpers import Received, crowd, hooked
from plugin_helpers import write_package
from wrong.hooks import Mirror

from minivllm import LLM, AsyncLLM, SamplingParams
from minivllm.config import PROCESSORS
from minivllm.core.engine.request import Request
from minivllm.errors import ConfigError, PluginError
from minivllm.plugins.hooks.options import StepLogOptions
from minivllm.plugins.hooks.step_log import StepLog
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.runtime.hooks import Hooks, hookimpl
from minivllm.runtime.hooks.bridge import view_of
from minivllm.testing.sim import answer, outputs, request, run, sim_engine

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


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("depth", [0, 2])
def test_the_tokens_that_steps_tell_of_are_those_of_each_sequence(depth):
    received = Received()
    engine = hooked(received, depth=depth, blocks=20, budget=24, max_len=64)
    made = crowd(engine)
    run(engine)
    assert engine.planner.preemptions > 0, "the test has no power: nothing was preempted"
    got, computed = {}, 0
    for step in received.of["minivllm_step_finished"]:
        assert len(step.q_len) == step.rows and len(step.token) == len(step.count) == len(step.drawn)
        computed += step.tokens
        for j, row in enumerate(step.drawn.tolist()):
            if step.count[j]:
                got.setdefault(int(step.sequence[row]), []).append(int(step.token[j]))
    by_request = {view.id: view.sequences for view in received.of["minivllm_request_added"]}
    for r in made:
        (number,) = by_request[r.id]
        assert got[number] == answer(r.prompt, r.params, max_len=64)[0]
    last = received.of["minivllm_step_finished"][-1]
    assert last.generated == engine.stats()["generated_tokens"] and last.running == 0 == last.waiting
    assert computed == engine.clock.tokens[: engine.clock.count].sum()


def test_every_request_that_was_added_is_finished_once_with_its_figures():
    received = Received()
    engine = hooked(received, depth=1, blocks=20, max_len=64)
    made = crowd(engine)
    made.append(request(engine, "two", range(9), n=2, max_tokens=4, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.abort("r5")
    with pytest.raises(Exception, match="empty"):
        request(engine, "refused", [])
    run(engine)
    added = received.of["minivllm_request_added"]
    ended = {view.id: end for view, end in received.of["minivllm_request_finished"]}
    assert [view.id for view in added] == [r.id for r in made] and len(ended) == len(made)
    assert ended["r5"].reasons == ("abort",) and ended["two"].reasons == ("length", "length")
    for r in made:
        end = ended[r.id]
        assert list(end.tokens) == [len(ids) for ids, _ in outputs(r)] and end.finished == r.finished
        assert end.preempted == sum(s.preempted for s in r.sequences) and end.error is None
    assert len(received.of["minivllm_preempted"]) == engine.planner.preemptions > 0
    assert sum(end.preempted for end in ended.values()) == engine.planner.preemptions


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_stored_less_removed_is_what_can_be_found(windows):
    mirror, received = Mirror(), Received()
    engine = hooked(mirror, received, depth=1, windows=windows, blocks=20, max_len=64)
    crowd(engine)
    evicted = lambda: sum(len(b.keys) for b in received.of["minivllm_evicted"])  # noqa: E731
    while engine.busy:
        engine.step()
        for g, pool in enumerate(engine.cache.pools):
            assert mirror.keys.get(g, set()) == set(pool.index)
    assert evicted() == engine.stats()["evictions"] > 0
    engine.reset_prefix_cache()
    assert not any(mirror.keys.values()) and not any(p.index for p in engine.cache.pools)
    assert {b.reason for b in received.of["minivllm_removed"]} == {"evicted", "dropped"}


def test_views_are_frozen_and_lead_nowhere():
    received = Received()
    engine = hooked(received, blocks=20, max_len=64)
    crowd(engine)
    run(engine)
    engine.stop()
    seen = list(received.of["minivllm_engine_started"])
    seen += [received.of[name][0] for name in ("minivllm_preempted", "minivllm_step_finished", "minivllm_evicted")]
    seen += received.of["minivllm_request_finished"][0]
    for view in seen:
        for f in dataclasses.fields(view):
            value = getattr(view, f.name)
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(view, f.name, value)
            if isinstance(value, np.ndarray):
                assert not value.flags.writeable, f.name
        assert all(found is not engine for found in gc.get_referents(*gc.get_referents(view)))
    with pytest.raises(TypeError):
        received.of["minivllm_request_added"][0].params["max_tokens"] = 9


def test_the_engine_is_started_and_stopped_once_and_says_what_ended_it():
    received = Received()
    engine = hooked(received)
    request(engine, "r", range(5))
    engine._die("the evictor failed")
    engine.stop()
    engine.stop()
    (view,) = received.of["minivllm_engine_started"]
    assert (view.max_num_seqs, view.block, view.blocks) == (8, 4, (63,))
    assert received.of["minivllm_engine_stopped"] == [(view, "the evictor failed")]
    assert received.of["minivllm_request_finished"][0][1].error == "the evictor failed"


def test_a_failed_step_is_told_with_its_error():
    received = Received()
    engine = hooked(received)
    engine.executor.fail_at = {2}
    request(engine, "r", range(5), max_tokens=9)
    run(engine)
    assert [step.error for step in received.of["minivllm_step_finished"]] == [None, "sim: planned failure"]


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
from minivllm.runtime.hooks import Hooks, hookimpl
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
    """A hook that raises in each step, and raises ``SystemExit`` at the end of each request."""

    calls = 0

    @hookimpl
    def minivllm_step_finished(self):
        self.calls += 1
        raise ValueError("no disk")

    @hookimpl
    def minivllm_request_finished(self):
        raise SystemExit(3)


def test_an_observer_that_raises_is_logged_with_its_package_and_disabled_after_three_times(caplog):
    fails, received = Fails(), Received()
    engine = hooked(fails, received)
    made = crowd(engine)
    with caplog.at_level(logging.WARNING, "minivllm.hooks"):
        run(engine, check=True)
    assert all(outputs(r) == [answer(r.prompt, r.params)] for r in made)
    assert engine.stats()["hook_failures"] == {"acme/a": 3, "acme/b": 0} and fails.calls <= 3
    assert len(received.of["minivllm_request_finished"]) == len(made), "the other plug-in goes without"
    first, *_, last = caplog.messages
    assert first == "hooks 'acme/a' (acme -) failed in minivllm_step_finished (1 of 3): ValueError: no disk"
    assert last == "hooks 'acme/a' (acme -) is disabled: it failed 3 times" and len(caplog.messages) == 4


def test_no_exception_of_a_hook_ends_the_engine_not_even_a_panic_in_rust(caplog):
    class Panic(BaseException):  # what PyO3 raises
        pass

    class Panics(Hooks):
        @hookimpl
        def minivllm_step_finished(self, step):
            raise Panic("index out of bounds")

    engine = hooked(Panics())
    made = request(engine, "r", range(5), max_tokens=9)
    run(engine)
    assert outputs(made) == [answer(made.prompt, made.params)]
    assert engine.stats()["hook_failures"] == {"acme/a": 3} and "Panic: index out of bounds" in caplog.text


def test_a_hook_cannot_change_the_parameters_of_a_request():
    given = SamplingParams(logit_bias={3: 1.0}, stop_token_ids=[7], extra={"deep": {"a": [1]}})
    made = Request("r", np.arange(5, dtype=np.int32), given, arrival=0.0)
    params = view_of(made).params
    for change in (
        lambda: params["logit_bias"].clear(),
        lambda: params["extra"]["deep"].update(a=0),
        lambda: params["stop_token_ids"].clear(),
    ):
        with pytest.raises(AttributeError):
            change()
    assert params["extra"] == {"deep": {"a": (1,)}} and made.params.logit_bias == {3: 1.0}


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
    assert engine.dead == "executor SimExecutor failed: ZeroDivisionError: division by zero"


def test_a_hook_that_cannot_start_is_the_error_of_the_start_and_the_others_are_told(tmp_path):
    received = Received()
    log = StepLog(StepLogOptions(path=str(tmp_path / "none" / "s.csv")))
    with pytest.raises(ConfigError, match=r"hooks step_log: .*s.csv: No such file or directory"):
        hooked(received, log)
    ((_, error),) = received.of["minivllm_engine_stopped"]
    assert "a hook failed at start" in error

    class Broken(Hooks):
        @hookimpl
        def minivllm_engine_started(self):
            raise RuntimeError("no socket")

    text = r"^hooks 'acme/a' \(acme -\) failed in minivllm_engine_started: RuntimeError: no socket$"
    with pytest.raises(PluginError, match=text):
        hooked(Broken())


def test_an_engine_without_listeners_makes_no_views():
    assert listened(sim_engine()) == set() and "hook_failures" not in sim_engine().stats()
    always = {"stats_asked", "engine_stopped"}
    assert listened(hooked(Fails())) == always | {"request_finished", "planning", "publishing", "turn_ended"}

    class Quiet(Hooks):
        @hookimpl
        def minivllm_engine_stopped(self):
            pass

    assert listened(hooked(Quiet())) == always


def listened(engine):
    """Names of the events that somebody hears."""
    found = vars(engine.events).items()
    return {name for name, event in found if getattr(event, "listeners", ()) or getattr(event, "wrappers", ())}


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
    received = []

    class Slow(Hooks):
        @hookimpl
        def minivllm_stored(self):
            received.append(1)
            time.sleep(0.002)

    engine = hooked(Slow())
    crowd(engine, 4)
    run(engine)
    seams = engine.stats()["seam_ms"]
    assert seams["hooks:acme/a"] * engine.clock.count >= 2 * len(received) > 0
    assert seams["evictor"] * engine.clock.count < 2 * len(received)


def test_a_real_engine_counts_the_time_of_each_plug_in():
    with LLM(**POCKET, graph="off") as llm:  # captured steps are the model's as a whole
        llm.generate("One day", SamplingParams(max_tokens=6, presence_penalty=0.5), use_tqdm=False)
        stats = llm.stats()
    seams = stats["seam_ms"]
    assert set(seams) == {
        "attention",
        "evictor",
        "model",
        "sampler",
        "scheduler",
        "strategy",
        *(f"processor:minivllm/{name}" for name in PROCESSORS),
    }
    assert seams["model"] > 0 and seams["processor:minivllm/penalties"] > 0 and seams["sampler"] > 0
    whole = sum(stats[f"{part}_ms"] for part in ("plan", "submit", "wait", "publish"))
    assert seams["model"] < 20 * whole  # means beside medians: the first step is slow
