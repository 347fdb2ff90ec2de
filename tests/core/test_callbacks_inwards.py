"""Code that the engine calls cannot call the engine, and a caller that waits for a thread that ends gets the reason."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

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

from minivllm import EngineDeadError, RequestError
from minivllm.core.engine.request import Request
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.frontend.requests import Tracked
from minivllm.server.link.compiling import Compiling
from minivllm.server.link.engine_loop import EngineLoop
from minivllm.server.link.frames import Frame
from minivllm.testing.sim import sim_engine

folder, llm = tiny_engines()


# ---- calls of the engine ---------------------------------------------------------------------------------------------

CALLS = {
    "generate": lambda llm: llm.generate([1, 2], plain(), use_tqdm=False),
    "stream": lambda llm: llm.stream([1, 2], plain()),
    "next piece": lambda llm: [next(llm.open) for _ in range(99)],
    "abort": lambda llm: llm.engine.abort("r"),
    "add": lambda llm: llm.engine.add(Request("again", np.array([1], np.int32), plain(), 0.0)),
    "step": lambda llm: llm.engine.step(),
    "reset": lambda llm: llm.reset_prefix_cache(),
    "profile": lambda llm: llm.start_profile(),
    "stop": lambda llm: llm.engine.stop(),
    "close": lambda llm: llm.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_function_that_calls_the_engine_is_refused_atonce(llm, name):
    want = [o.tokens for o in llm.generate(PROMPTS, plain(), use_tqdm=False)]
    for field in FIELDS:
        llm.open = llm.stream(PROMPTS[0], plain())
        bad = plain(**{field: FIELDS[field](after(1, lambda: CALLS[name](llm)))})
        a, broken, b = llm.generate(PROMPTS, [plain(), bad, plain()], use_tqdm=False)
        assert [a.tokens, b.tokens] == [want[0], want[2]]
        assert broken.finish_reason == "error"
        assert broken.error.startswith(f"{field}: RequestError: ") and "while the engine is in step" in broken.error
        rest = [t for piece in llm.open for t in piece.token_ids]
        assert rest == want[0][8 - len(rest) :] and (len(rest) == 8 or name == "next piece")
    while llm.engine.in_flight:
        llm.engine.step()
    quiet(llm.engine)


def test_another_thread_is_refused_while_a_step_runs_and_served_when_it_has_ended(llm):
    found = []

    def beside():
        call = lambda: llm.generate([1], plain(), use_tqdm=False)  # noqa: E731
        thread = threading.Thread(target=lambda: found.append(_told(call)))
        thread.start()
        thread.join()

    llm.generate([1, 2], plain(choose_fn=lambda logits, ids: beside() or 1), use_tqdm=False)
    assert len(found) == 8 and all("another thread" in text for text in found)
    beside()
    assert found[-1] == ""


def _told(work):
    try:
        work()
    except RequestError as e:
        return str(e)
    return ""


def test_a_stream_that_is_forgotten_in_a_step_is_aborted_before_the_next(llm):
    held = [llm.stream([1, 2, 3], plain())]
    forget = plain(choose_fn=lambda logits, ids: held.clear() or 1)
    assert llm.generate([5, 9, 2], forget, use_tqdm=False)[0].tokens == [1] * 8
    assert not llm.engine.requests
    while llm.engine.in_flight:
        llm.engine.step()
    quiet(llm.engine)


def test_functions_that_call_an_async_engine_are_refused_and_do_not_wait_for_themselves(folder):
    async def ask(llm, name):
        if name == "generate":
            async for _ in llm.generate([1], plain()):
                pass
        elif name in ("stats", "start_profile", "bill_of_materials"):
            await getattr(llm, name)()
        else:
            getattr(llm, name)(*(("r",) if name == "abort" else ()))

    async def main():
        async with AsyncLLM(folder, **SMALL) as llm:
            for name in ("generate", "stats", "start_profile", "bill_of_materials", "abort", "close"):
                for field in FIELDS:
                    act = after(1, lambda name=name: asyncio.run(ask(llm, name)))
                    pieces = [p async for p in llm.generate([1, 2], plain(**{field: FIELDS[field](act)}))]
                    error = pieces[-1].output.error
                    assert error.startswith(f"{field}: RequestError: ") and "must not call it" in error
            assert len([p async for p in llm.generate([1, 2], plain())][-1].output.tokens) == 8

    asyncio.run(asyncio.wait_for(main(), 60))


# ---- threads that end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["step", "idle", "jobs"])
def test_a_thread_that_ends_ends_everyone_who_waits_with_the_reason(folder, monkeypatch, where):
    async def main():
        llm = AsyncLLM(folder, **SMALL)
        try:
            running = asyncio.create_task(_last(llm, [1, 2], plain(allowed_tokens_fn=lambda ids: slow() or [1, 2])))
            begun, go = asyncio.Event(), threading.Event()
            loop = asyncio.get_running_loop()
            slow = lambda: loop.call_soon_threadsafe(begun.set) and go.wait(5) and None  # noqa: E731
            await asyncio.wait_for(begun.wait(), 10)
            if where == "jobs":
                llm._send(lambda: throw(SystemExit(3)))
            elif where == "step":
                monkeypatch.setattr(llm.engine.publisher, "publish", lambda *args: throw(SystemExit(3)))
            else:
                dies = once(type(llm._loop).do_jobs, [SystemExit(3)])
                monkeypatch.setattr(llm._loop, "do_jobs", dies.__get__(llm._loop))
            requested = asyncio.create_task(llm.stats())
            waiting = asyncio.create_task(_last(llm, [3, 4], plain()))
            await asyncio.sleep(0)
            go.set()
            found = await asyncio.wait_for(asyncio.gather(running, waiting, requested, return_exceptions=True), 20)
            await asyncio.to_thread(llm._thread.join, 10)
            assert not llm._thread.is_alive()
            received = [str(f) if isinstance(f, BaseException) else getattr(f, "error", None) for f in found]
            assert "SystemExit: 3" in received[0] and "SystemExit: 3" in received[1], received
            with pytest.raises(EngineDeadError, match="SystemExit: 3"):
                await llm.stats()
        finally:
            llm.close()

    asyncio.run(main())


async def _last(llm, prompt, params):
    async for piece in llm.generate(prompt, params):
        output = piece.output
    return output


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
def test_an_output_that_cannot_be_made_still_ends_its_stream(folder, monkeypatch, exc):
    async def main():
        async with AsyncLLM(folder, **SMALL) as llm:
            with monkeypatch.context() as patch:
                patch.setattr(Tracked, "output", lambda self: throw(exc))
                made = await asyncio.wait_for(_last(llm, [1, 2], plain()), 20)
                assert made.error.startswith(f"its output could not be made: {type(exc).__name__}: ")
            assert len((await _last(llm, [1, 2], plain())).tokens) == 8

    asyncio.run(main())


class Held:
    """A link that keeps the frames, and gives the loop the messages of the test."""

    def __init__(self):
        self.frames, self.commands = [], []

    def receive(self, seconds):
        found, self.commands = self.commands, []
        return found

    def send(self, header, columns):
        self.frames.append((header, columns))

    def add(self, number, **params):
        header = dict(id=f"r{number}", number=number, params=params, arrival=0.0, watch=False)
        self.commands.append(Frame("add", header, {"prompt": np.arange(1, 5, dtype=np.int32)}))

    def reported(self, word):
        return [entry for header, _ in self.frames for entry in header.get(word, ())]

    def done(self):
        return [n for _, columns in self.frames for n in columns.get("done", np.empty(0)).tolist()]


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
def test_the_servers_loop_tells_everyone_whatever_plugins_raise(exc):
    class Bad(Raising):
        where = ""

    strategy, link = Bad(), Held()
    strategy.exc = exc
    engine = sim_engine(strategy=strategy)
    loop = EngineLoop(engine, link)
    strategy.where = "start"
    link.add(1, max_tokens=4, ignore_eos=True)
    link.add(2, max_tokens=4, ignore_eos=True, tenant="bad")
    link.add(3, max_tokens=4, ignore_eos=True)
    while len(link.reported("accepted")) < 2:  # a turn reads commands for some milliseconds, and then steps
        loop.turn()
    assert link.reported("accepted") == [1, 3] and link.reported("refused")[0][0] == 2
    assert type(exc).__name__ in link.reported("refused")[0][2]
    strategy.where = "result"
    link.add(4, max_tokens=4, ignore_eos=True, tenant="bad", n=2)
    engine.stats, true = lambda: throw(exc), engine.stats
    link.commands.append(Frame("ask", dict(ask=9, what="stats", args={}), {}))

    def stop_at_rest():
        if len(link.done()) == 3:
            link.commands.append(Frame("stop", {}, {}))
        return []

    receive = link.receive
    link.receive = lambda seconds: receive(seconds) + stop_at_rest()
    loop.run()
    engine.stats = true
    assert sorted(link.done()) == [1, 3, 4] and [number for number, _ in link.reported("failed")][:1] == [4]
    assert link.reported("answers")[0][2][0] == type(exc).__name__
    assert "strategy Bad: " in link.reported("failed")[0][1] and engine.dead == "the engine was stopped"


def test_a_servers_loop_that_cannot_go_on_tells_everyone_why():
    link = Held()
    engine = sim_engine()
    loop = EngineLoop(engine, link)
    link.add(1, max_tokens=40, ignore_eos=True)
    loop.turn()
    link.receive = lambda seconds: throw(SystemExit(3))
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and engine.dead == "the engine's thread ended: SystemExit: 3"
    assert link.done() == [1] and link.reported("errors")[0][2] == engine.dead
    assert any(header.get("dead") == engine.dead for header, _ in link.frames)


@pytest.mark.parametrize("exc", RAISED, ids=NAMED)
def test_a_grammar_that_raises_anything_while_it_compiles_refuses_its_request(exc):
    compiling = Compiling(lambda params: None, lambda params: throw(exc), 2)
    params = SimpleNamespace(structured_outputs=SimpleNamespace(source="x"), salt=("", ""))
    live = SimpleNamespace(request=SimpleNamespace(params=params, owner="", grammar=None))
    compiling.begin(1, live)
    for _ in range(1000):
        if found := compiling.ready():
            break
        time.sleep(0.005)
    assert found == [(live, exc)]
    compiling.close()
