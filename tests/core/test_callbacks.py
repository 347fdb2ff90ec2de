"""External code that the engine calls.

Any exception ends only the calls for which it was called, and no caller waits forever.
"""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
from callback_helpers import (
    FIELDS,
    NAMED,
    PROMPTS,
    RAISED,
    SMALL,
    Raising,
    after,
    once,
    plain,
    quiet,
    throw,
    tiny_engines,
)

from minivllm import LLM, EngineDeadError, RequestError
from minivllm.core.interfaces.sampling import Row
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.plugins.evictor.lru import Lru
from minivllm.plugins.scheduler.fcfs import Fcfs
from minivllm.runtime.hooks import Hooks, hookimpl
from minivllm.runtime.hooks.bridge import EngineHooks
from minivllm.runtime.hooks.manager import HookManager
from minivllm.testing.faulty import TARGETS as FAULTY
from minivllm.testing.sim import answer, at_rest, outputs, request, run, sim_engine

folder, llm = tiny_engines()


# ---- what it raises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
@pytest.mark.parametrize("field", FIELDS)
def test_what_a_function_raises_ends_its_own_request_and_the_next_call_is_served(llm, field, exc):
    want = [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)]
    bad = plain(**{field: FIELDS[field](after(2, lambda: throw(exc)))})
    if isinstance(exc, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt) as raised:
            llm.generate(PROMPTS, [plain(), bad, plain()], use_tqdm=False)
        assert raised.value is exc
    else:
        a, broken, b = llm.generate(PROMPTS, [plain(), bad, plain()], use_tqdm=False)
        assert [a.tokens, b.tokens] == [want[0], want[2]]
        assert broken.finish_reason == "error" and len(broken.tokens) == 2
        assert broken.error.startswith(f"{field}: {type(exc).__name__}: "), broken.error
    while llm.engine.in_flight:
        llm.engine.step()
    quiet(llm.engine)
    assert [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)] == want


@pytest.mark.parametrize("field", FIELDS)
def test_in_an_async_engine_everyone_else_goes_on(folder, field):
    async def last(llm, prompt, params):
        async for piece in llm.generate(prompt, params):
            output = piece.output
        return output

    async def main():
        async with AsyncLLM(folder, run_ahead=2, **SMALL) as llm:
            want = [(await last(llm, p, plain())).tokens for p in PROMPTS]
            for exc in RAISED:
                bad = plain(**{field: FIELDS[field](after(2, lambda exc=exc: throw(exc)))})
                requested = [last(llm, p, sp) for p, sp in zip(PROMPTS, (plain(), bad, plain()), strict=True)]
                a, broken, b = await asyncio.wait_for(asyncio.gather(*requested), 30)
                assert [a.tokens, b.tokens] == [want[0], want[2]]
                assert broken.finish_reason == "error" and f"{field}: {type(exc).__name__}: " in broken.error
            assert llm._thread.is_alive() and (await llm.stats())["running"] == 0

    asyncio.run(main())


@pytest.mark.parametrize("where", ["bind", "apply", "commit", "draw"])
def test_what_a_processor_or_sampler_raises_ends_the_rows_that_bound_it(folder, monkeypatch, where):
    """The processor is bound by one request of three.  The sampler is bound by all, so all requests of the step end."""
    faulty = dict(processors=[f"{FAULTY}:Faulty"], allow_targets=[FAULTY])
    with LLM(folder, **SMALL, **faulty) as llm:
        want = [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)]
        runner = llm.engine.executor.runner
        host, device = llm.engine.processors[0][1], runner.processors[0]
        monkeypatch.setattr(host, "bind", lambda p, n: Row(variant=1) if p.extra else None)
        monkeypatch.setattr(device, "apply", lambda *args: None)
        monkeypatch.setattr(device, "commit", lambda *args: None)
        made = {"bind": host, "draw": runner.sampler}.get(where, device)
        for exc in RAISED:
            true, wanted = getattr(made, where), type(exc).__name__
            act = after(0 if where == "bind" else 2, lambda exc=exc: throw(exc))
            only_bad = where != "bind"
            calls = lambda *args: (act() if only_bad or args[0].extra else None) or true(*args)  # noqa: B023, E731
            with monkeypatch.context() as patch:
                patch.setattr(made, where, calls)
                try:
                    outs = llm.generate(PROMPTS, [plain(), plain(extra={"fault": "x"}), plain()], use_tqdm=False)
                except (KeyboardInterrupt, RequestError) as e:
                    assert e is exc or (where == "bind" and wanted in str(e))
                else:
                    name = "minivllm/default" if where == "draw" else "Faulty"
                    assert outs[1].finish_reason == "error" and wanted in outs[1].error and name in outs[1].error
                    if where != "draw":
                        assert [outs[0].tokens, outs[2].tokens] == [want[0], want[2]]
            quiet(llm.engine)
            assert [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)] == want


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
@pytest.mark.parametrize("where", ["takes", "topk", "start", "result"])
def test_what_a_strategy_raises_ends_its_own_request(where, exc):
    strategy = Raising()
    strategy.where, strategy.exc = where, exc
    engine = sim_engine(strategy=strategy)
    made = [request(engine, f"r{i}", [i, 2], n=2, max_tokens=5, ignore_eos=True) for i in range(2)]
    received = []
    interrupts = isinstance(exc, KeyboardInterrupt)
    if where == "result":
        bad = request(engine, "bad", [1, 3], n=2, max_tokens=5, ignore_eos=True, tenant="bad")
        bad.on_done = received.append
        if interrupts:
            with pytest.raises(KeyboardInterrupt):
                run(engine)
    else:
        with pytest.raises(KeyboardInterrupt if interrupts else RequestError) as refused:
            request(engine, "bad", [1, 3], n=2, max_tokens=5, tenant="bad")
        assert interrupts or type(exc).__name__ in str(refused.value)
    run(engine, check=True)
    if where == "result":
        assert received == [bad] and all(s.finish_reason == "error" for s in bad.sequences)
        assert bad.sequences[0].error.startswith(f"strategy Raising: {type(exc).__name__}: ")
    for r in made:
        assert outputs(r) == [answer(r.prompt, r.params, i) for i in range(2)]
    at_rest(engine)


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
@pytest.mark.parametrize("which", ["sink", "on_done"])
def test_what_receives_tokens_may_raise_anything(which, exc):
    engine = sim_engine(depth=2)
    made = [request(engine, f"r{i}", [i, 3], max_tokens=10, ignore_eos=True, n=1 + i) for i in range(3)]
    setattr(made[1], which, lambda *args: throw(exc))
    made[1].watch = True
    interrupts = 0
    for _ in range(100):
        try:
            if not engine.busy:
                break
            engine.step()
        except KeyboardInterrupt as e:
            assert e is exc
            interrupts += 1
        engine.cache.check()
    assert (interrupts > 0) == isinstance(exc, KeyboardInterrupt)
    if which == "sink":
        failed = [s for s in made[1].sequences if s.finish_reason == "error"]
        assert failed[0].error.startswith(f"what receives its tokens failed: {type(exc).__name__}: ")
    for r in made if which == "on_done" else (made[0], made[2]):
        assert outputs(r) == [answer(r.prompt, r.params, i) for i in range(r.params.n)]
    at_rest(engine)


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
@pytest.mark.parametrize("where", ["key", "order", "lane", "shape", "victim", "ended"])
def test_a_policy_that_raises_anything_costs_a_turn(where, exc):
    class Once(Fcfs):
        def order(self, head, running, now):
            return np.arange(len(head))

    left = [exc]
    setattr(Once, where, once(getattr(Once, where), left))
    engine = sim_engine(policy=Once, blocks=16, slots=4)
    made, interrupts = [], 0
    for i in range(8):
        try:
            made.append(request(engine, f"r{i}", range(i, i + 9), max_tokens=20, ignore_eos=True))
        except (RequestError, KeyboardInterrupt) as e:
            assert where in ("key", "lane") and i == 0
            interrupts += isinstance(e, KeyboardInterrupt)
    for _ in range(2000):
        if not engine.busy:
            break
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert not left and interrupts == isinstance(exc, KeyboardInterrupt)
    assert engine.dead is None
    for r in made:
        assert outputs(r) == [answer(r.prompt, r.params)]
    at_rest(engine)


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
@pytest.mark.parametrize("where", ["add", "hold", "free", "victims", "hit"])
def test_an_evictor_that_raises_anything_ends_the_engine_and_everyone_is_told(where, exc):
    bad = type("Bad", (Lru,), {where: lambda self, *args: throw(exc)})
    engine, received = sim_engine(evictor=bad, blocks=14, slots=3), []
    for i in range(12):
        r = request(engine, f"r{i}", range(i % 3, i % 3 + 17), max_tokens=12, ignore_eos=True)
        r.on_done = lambda r: received.append(r.id)
    with pytest.raises((KeyboardInterrupt, EngineDeadError)):
        while True:
            engine.step()
    assert len(received) == 12 and f"evictor Bad failed in {where}: {type(exc).__name__}: " in engine.dead


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
@pytest.mark.parametrize("where", ["submit", "collect"])
def test_an_executor_that_raises_anything_ends_the_engine_by_its_name(where, exc):
    engine = sim_engine(depth=1)
    made = [request(engine, f"r{i}", [i, 2], max_tokens=10, ignore_eos=True) for i in range(3)]
    engine.step()
    setattr(engine.executor, where, lambda *args: throw(exc))
    with pytest.raises((KeyboardInterrupt, EngineDeadError)):
        for _ in range(5):
            engine.step()
    assert engine.dead.startswith(f"executor SimExecutor failed: {type(exc).__name__}: ")
    assert all(r.sequences[0].error == engine.dead for r in made)


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
def test_a_hook_that_raises_anything_ends_nothing(exc):
    class Bad(Hooks):
        @hookimpl
        def minivllm_step_finished(self, step):
            raise exc

        @hookimpl(wrapper=True)
        def minivllm_publish(self, step):
            yield
            raise exc

    engine = sim_engine(depth=1)
    EngineHooks(HookManager([("acme/bad", Bad())]), {}, engine).started()
    made = [request(engine, f"r{i}", [i, 2], max_tokens=6, ignore_eos=True) for i in range(3)]
    interrupts = 0
    while engine.busy:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert engine.stats()["hook_failures"] == {"acme/bad": 3} and (interrupts > 0) == (type(exc) is KeyboardInterrupt)
    assert all(outputs(r) == [answer(r.prompt, r.params)] for r in made)
    at_rest(engine)


# ---- signals ---------------------------------------------------------------------------------------------------------


class TimeIsUp(Exception):
    """The exception of an application's own handler of SIGALRM."""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1])
def test_a_signal_in_the_middle_of_a_step_takes_effect_when_the_step_is_whole(llm, number, field):
    want = [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)]
    raised = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}.get(number, TimeIsUp)
    before = signal.getsignal(number)
    if number != signal.SIGINT:
        signal.signal(number, lambda *args: throw(raised()))
    try:
        held = signal.getsignal(number)
        bad = plain(**{field: FIELDS[field](after(2, lambda: os.kill(os.getpid(), number)))})
        with pytest.raises(raised):
            llm.generate(PROMPTS, [plain(), bad, plain()], use_tqdm=False)
        assert signal.getsignal(number) is held
    finally:
        signal.signal(number, before)
    while llm.engine.in_flight:
        llm.engine.step()
    quiet(llm.engine)
    assert [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)] == want


def test_what_is_raised_into_the_engine_itself_ends_it_and_nobody_waits():
    """For example, another thread may raise it, and then any table may be half written."""
    engine = sim_engine()
    made = [request(engine, f"r{i}", [i, 2], max_tokens=10, ignore_eos=True) for i in range(3)]
    engine.step()
    engine.publisher.publish = lambda flight, result: throw(SystemExit(3))
    with pytest.raises(SystemExit):
        engine.step()
    assert engine.dead == "SystemExit: 3" and all(r.sequences[0].error == engine.dead for r in made)
    with pytest.raises(EngineDeadError, match="SystemExit"):
        engine.step()
