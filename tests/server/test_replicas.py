"""Replicas of the engine: their share of the machine, the router's use, joined figures, and requests that move."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from http_helpers import Running

from minivllm import SamplingParams
from minivllm.config import load_config
from minivllm.core.interfaces.router import ReplicaLoad, ReplicaRouter, RoutedRequest, RouterContext
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError, RequestError
from minivllm.plugins.router.options import PrefixOptions
from minivllm.plugins.router.prefix import Prefix
from minivllm.server import replicas as package
from minivllm.server.replicas.client import ReplicaClient, make_client
from minivllm.server.replicas.figures import LifeTotals, merged
from minivllm.server.replicas.places import environments, visible_gpus
from minivllm.server.replicas.routing import Routing, block_keys
from minivllm.server.serve import check_config

SIM = {"executor": {"name": "sim", "options": {"step_ms": 5}}, "max_num_seqs": 16, "max_model_len": 512}
HERE = __name__


def loaded(replicas=2, server=(), **engine):
    return load_config(
        keywords={"model": "pocket", **engine, "server": {"replicas": replicas, **dict(server)}}, environ={}
    )


# ---- the machine ---------------------------------------------------------------------------------------------------


def test_replicas_get_gpus_of_their_own_or_a_share_of_the_cores(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    folder = str(tmp_path)
    assert visible_gpus({}, folder) == ["0", "1", "2", "3"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, 5"}, folder) == ["GPU-a", "5"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, folder) == []
    four = [{"CUDA_VISIBLE_DEVICES": str(number)} for number in range(4)]
    assert environments(loaded(4), {}, folder) == four
    pairs = environments(loaded(2, tensor_parallel_size=2), {"CUDA_VISIBLE_DEVICES": "7,5,3,1"}, folder)
    assert pairs == [{"CUDA_VISIBLE_DEVICES": "7,5"}, {"CUDA_VISIBLE_DEVICES": "3,1"}]
    with pytest.raises(ConfigError, match=r"replicas=5 .* needs 5 GPUs, and 4 can be used; lower server.replicas to 4"):
        environments(loaded(5), {}, folder)
    monkeypatch.setattr("minivllm.server.replicas.places.usable_cores", lambda: 8)
    assert environments(loaded(3), {}, str(tmp_path / "none")) == [{"OMP_NUM_THREADS": "2"}] * 3
    assert environments(loaded(5, device="cpu"), {}, folder) == [{"OMP_NUM_THREADS": "1"}] * 5
    assert environments(loaded(2), {"OMP_NUM_THREADS": "3"}, str(tmp_path / "none")) == [{}, {}]


@pytest.mark.parametrize(
    ("server", "engine", "words"),
    [
        ({"replicas": 1, "router": "prefix"}, {}, "router without server.replicas above 1"),
        ({"replicas": 2, "restart": 3}, {}, "restart together with server.replicas above 1"),
        ({"replicas": 0}, {}, "replicas"),
        ({"replicas": 2}, {"hooks": ["step_log"]}, "hooks=step_log with server.replicas=2: the replicas would share"),
        ({"replicas": 2, "router": "prefx"}, {}, "router='prefx': there are .*prefix.*Did you mean 'prefix'"),
        ({"replicas": 2, "router": "prefix", "router_options": {"balanc": 1}}, {}, "balanc"),
        ({}, {"tokenizer_pool": "threads"}, "tokenizer_pool: the server converts text in worker processes of its own"),
        ({"replicas": 2, "router_options": {"balance": 1}}, {}, "takes no options"),
    ],
)
def test_wrong_options_are_refused_before_an_engine_starts(server, engine, words):
    with pytest.raises(ConfigError, match=words):
        check_config(loaded(server=server, **engine))


def test_one_replica_is_the_server_as_it_was():
    assert not isinstance(make_client(loaded(1)), ReplicaClient) and package.__doc__


# ---- figures -------------------------------------------------------------------------------------------------------


def test_figures_of_replicas_are_added_or_averaged_by_their_kind():
    a = {
        "running": 1,
        "plan_ms": 2.0,
        "energy": {"busy_joules": 1.5, "name": "x"},
        "depth": [1, 2],
        "only": 3,
        "none": None,
    }
    b = {"running": 2, "plan_ms": 4.0, "energy": {"busy_joules": 2.0, "name": "x"}, "depth": [5], "none": None}
    assert merged([a, b]) == {
        "running": 3,
        "plan_ms": 3.0,
        "energy": {"busy_joules": 3.5, "name": "x"},
        "depth": [6, 2],
        "only": 3,
        "none": None,
    }


def test_totals_of_a_replica_go_on_when_its_engine_is_started_again():
    life = LifeTotals()
    assert life.read({"finished": 5, "running": 1})["finished"] == 5
    life.ended()
    assert life.totals()["finished"] == 5
    again = life.read({"finished": 2, "running": 7})
    assert again["finished"] == 7 and again["running"] == 7


# ---- routing -------------------------------------------------------------------------------------------------------


def test_block_keys_are_equal_for_equal_prefixes_of_whole_blocks():
    a, b = np.arange(70), np.concatenate([np.arange(40), np.arange(9, 39)])
    first, second = block_keys(a, (), 16), block_keys(b, (), 16)
    assert len(first) == len(second) == 4
    assert first[:2] == second[:2] and first[2] != second[2] and first[3] != second[3]
    assert not set(block_keys(a, ("tenant",), 16)) & set(first)
    assert block_keys(a[:15], (), 16) == []


def test_prefix_follows_cached_blocks_until_the_load_outweighs_them():
    router = Prefix(PrefixOptions(balance=0.5, spread=0), RouterContext(2, 16, 100))
    request = RoutedRequest(160, "", lambda: list(range(1, 11)))
    router.sent(request, 1)
    assert router.choose(request, [ReplicaLoad(0), ReplicaLoad(1, waiting=300)]) == 1
    assert router.choose(request, [ReplicaLoad(0), ReplicaLoad(1, waiting=400)]) == 0
    router.emptied(1)
    assert router.choose(request, [ReplicaLoad(0), ReplicaLoad(1, waiting=1)]) == 0
    spread = Prefix(PrefixOptions(balance=0, spread=10), RouterContext(2, 16, 100))
    spread.sent(request, 1)
    assert spread.choose(request, [ReplicaLoad(0), ReplicaLoad(1, requests=15)]) == 1
    assert spread.choose(request, [ReplicaLoad(0), ReplicaLoad(1, requests=17)]) == 0


def test_prefix_remembers_no_more_keys_than_a_cache_has_blocks_and_the_ends_of_prompts_go_first():
    router = Prefix(PrefixOptions(), RouterContext(1, 16, 4))
    for start in (0, 100):
        router.sent(RoutedRequest(48, "", lambda start=start: [start + 1, start + 2, start + 3]), 0)
    assert router.matched([101, 102, 103], 0) == 3 and router.matched([1, 2, 3], 0) == 1


class Wild(ReplicaRouter):
    """A router that returns the next of ``answers``, or raises it if it is an exception."""

    answers: list = []

    def choose(self, request, loads):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Mute(ReplicaRouter):
    def choose(self, request, loads):
        return 0

    def sent(self, request, number):
        raise RuntimeError("sent")

    def emptied(self, number):
        raise RuntimeError("emptied")


def test_nonsense_of_a_router_is_counted_and_the_least_loaded_replica_serves():
    routing = Routing(loaded(server={"router": f"{HERE}:Wild"}, allow_targets=[HERE]))
    routing.start(RouterContext(3))
    loads = [ReplicaLoad(0, 1, 10), ReplicaLoad(2, 1, 5)]
    wrong = [1, -1, 7, None, "0", 0.0, True, RuntimeError("boom")]
    Wild.answers[:] = [*wrong, 0]
    assert [routing.choose(RoutedRequest(3), loads) for _ in wrong] == [2] * len(wrong)
    assert routing.choose(RoutedRequest(3), loads) == 0 and routing.faults == len(wrong)
    routing = Routing(loaded(server={"router": f"{HERE}:Mute"}, allow_targets=[HERE]))
    routing.start(RouterContext(3))
    routing.sent(RoutedRequest(3), 0)
    routing.emptied(1)
    assert routing.faults == 2


def test_prefix_on_a_trace_has_most_of_the_hits_of_one_cache():
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import routers

    from minivllm.lab.traces.read import read_trace

    trace = read_trace("synthetic:like=mooncake-conversation,requests=200,seed=1")
    large = routers.one_cache(trace, 4 * 2000)
    shares = {}
    for name in ("prefix", "round-robin"):
        found = routers.simulate(trace, routers.routing_of(name), 4, 2000, 16000, 0.03)
        assert sum(found.requests) == len(trace) and min(found.requests) > 0
        shares[name] = found.rate / large
    assert shares["prefix"] > 0.9 and shares["prefix"] > shares["round-robin"] + 0.05, shares


def test_named_prefixes_are_refused():
    async def main():
        client = ReplicaClient(loaded(3, device="cpu"))
        for call in (client.prefixes(), client.save_prefix("n", [1], "", None), client.drop_prefix("n")):
            with pytest.raises(RequestError, match="named prefixes need one engine"):
                await call

    asyncio.run(main())


# ---- engines -------------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)


def prompt_of(i):
    return [1, 2, 3 + i % 50, i // 50 + 1] * 8


async def ask(client, number, request_id, pieces=True, **how):
    """The tokens of prompt ``number``, and the error that ended it."""
    out = []
    try:
        stream = await client.stream(prompt_of(number), PARAMS, request_id, pieces=pieces, **how)
        async for piece in stream:
            out += piece.token_ids
    except EngineDeadError as error:
        return out, error
    return out, None


async def until(condition, seconds=90):
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not happen in time"
        await asyncio.sleep(0.05)


def running(main, seconds=300, **server):
    """Run ``main(client)`` with the client of two or more engines without a model."""

    async def run():
        client = ReplicaClient(loaded(server.pop("replicas", 2), server, **SIM))
        await client.open()
        try:
            await main(client)
            await until(lambda: not any(client.tables().values()), 10)
        finally:
            await client.close()
        assert all(one.pid is None for one in client.replicas)

    asyncio.run(asyncio.wait_for(run(), seconds))


@pytest.mark.slow
def test_killed_replicas_under_load_lose_repeat_and_change_no_answer():
    """A request without a token moves to another replica.

    A request with tokens ends with an error after correct tokens.
    """

    async def main(client):
        expected = [(await ask(client, i, f"w{i}"))[0] for i in range(20)]
        assert all(len(tokens) == 20 for tokens in expected)
        rng = random.Random(0)
        kills, results, end = 0, Counter(), False

        async def user(name):
            for turn in range(10**6):
                if end:
                    return
                number, pieces = rng.randrange(20), bool(turn % 2)
                got, error = await ask(client, number, f"{name}-{turn}", pieces)
                assert got == expected[number][: len(got)], "a wrong answer"
                if error is None:
                    assert len(got) == 20, "a short answer without an error"
                else:
                    assert got, f"a request without a token was lost: {error}"
                    assert "signal 9" in str(error)
                results["error" if error else "answer"] += 1

        users = [asyncio.create_task(user(f"u{k}")) for k in range(16)]
        for _ in range(4):
            await until(lambda: sum(one.accepts for one in client.replicas) > 1)
            await asyncio.sleep(rng.uniform(0.05, 0.4))
            victim = rng.choice([one for one in client.replicas if one.accepts])
            os.kill(victim.pid, signal.SIGKILL)
            await until(lambda victim=victim: not victim.accepts)
            kills += 1
        end = True
        await asyncio.gather(*users)
        assert kills == 4 and results["answer"] > 100, results
        assert client.moved > 0 and client.restarted >= 2
        await until(lambda: all(one.accepts for one in client.replicas))
        stats = await client.stats()
        assert [one["state"] for one in stats["replicas"]] == ["serving"] * 3

    running(main, replicas=3, replica_retries=20, router="round-robin")


@pytest.mark.slow
def test_requests_wait_while_no_replica_runs_and_one_that_kills_engines_ends():
    async def main(client):
        async def kill_all():
            for one in client.replicas:
                os.kill(one.pid, signal.SIGKILL)

        slow = SamplingParams(max_tokens=100, ignore_eos=True)
        waiting = asyncio.create_task(ask(client, 1, "waits", pieces=False))
        await asyncio.sleep(0)
        await kill_all()
        await until(lambda: not client.healthy()[0])
        assert client.restarting
        with pytest.raises(EngineDeadError):
            await client.stream(prompt_of(2), slow, "new")
        got, error = await asyncio.wait_for(waiting, 120)
        assert error is None and len(got) == 20 and 1 <= client.moved <= 2, (
            "it was sent to an engine that started again"
        )
        # a request that "kills" each engine on which it runs moves twice, and then ends
        await until(lambda: all(one.accepts for one in client.replicas))
        slow = SamplingParams(max_tokens=450, ignore_eos=True)
        stream = await client.stream(prompt_of(3), slow, "poison", pieces=False)
        for _ in range(3):
            await until(lambda: any("poison" in one.ids for one in client.replicas))
            victim = next(one for one in client.replicas if "poison" in one.ids)
            os.kill(victim.pid, signal.SIGKILL)
            await until(lambda victim=victim: "poison" not in victim.ids)
        with pytest.raises(EngineDeadError, match="moved 2 times"):
            async for _ in stream:
                pass
        await until(lambda: all(one.accepts for one in client.replicas))
        # a waiting request that is aborted, and a request whose reader leaves
        held = [asyncio.create_task(ask(client, i, f"h{i}", pieces=False)) for i in range(2)]
        await asyncio.sleep(0)
        await kill_all()
        await until(lambda: client.tables()["unplaced"] == 2)
        await client.abort("h0")
        with pytest.raises(RequestError, match="aborted"):
            await held[0]
        held[1].cancel()
        await asyncio.gather(held[1], return_exceptions=True)
        assert client.tables()["unplaced"] == 0

    running(main, replica_retries=2)


@pytest.mark.slow
def test_sessions_stay_drained_replicas_get_nothing_and_an_update_has_no_error():
    async def main(client):
        async def home(session):
            before = [one.requests for one in client.replicas]
            assert (await ask(client, 1, f"{session}-{sum(before)}", session=session))[1] is None
            return [one.requests - was for one, was in zip(client.replicas, before, strict=True)].index(1)

        first = await home("a")
        assert [await home("a") for _ in range(6)] == [first] * 6
        client.hold(first, True)
        other = 1 - first
        assert [await home("a") for _ in range(3)] == [other] * 3
        with pytest.raises(RequestError, match="the only one that serves"):
            client.hold(other, True)
        with pytest.raises(RequestError, match="expected a number from 0 to 1"):
            client.hold(2, True)
        client.hold(first, False)
        assert await home("a") == other, "a session does not move back"

        # a rolling update under load: new options, new processes, no error
        pids = [one.pid for one in client.replicas]
        stop = False
        answers = 0

        async def user(name):
            nonlocal answers
            turn = 0
            while not stop:
                turn += 1
                got, error = await ask(client, turn % 20, f"{name}-{turn}", bool(turn % 2))
                assert error is None and len(got) == 20
                answers += 1

        users = [asyncio.create_task(user(f"u{k}")) for k in range(8)]
        config = loaded(2, {"router": "session"}, **{**SIM, "max_num_seqs": 8})
        updating = asyncio.create_task(client.update(config))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="already running"):
            await client.update(config)
        await updating
        stop = True
        await asyncio.gather(*users)
        assert answers > 20 and client.info.max_num_seqs == 16
        assert not set(pids) & {one.pid for one in client.replicas} and client.restarted == 0

        # an engine of another size, and one that cannot start: the update stops, and all replicas serve on
        for wrong, words in (
            ({"max_model_len": 256}, "max_model_len is 256, expected 512"),
            ({"attention": "triton"}, "triton"),
        ):
            with pytest.raises(MinivllmError, match=words):
                await client.update(loaded(2, {"router": "session"}, **{**SIM, **wrong}))
            await until(lambda: all(one.accepts for one in client.replicas))
            assert (await ask(client, 1, f"after-{words}"))[1] is None
        with pytest.raises(ConfigError, match=r"the \[server\] table differs"):
            await client.update(loaded(2, {"router": "session", "max_queue": 3}, **SIM))

    running(main, router="session")


@pytest.mark.slow
def test_a_replica_whose_model_has_changed_does_not_join_the_others(tmp_path):
    import shutil

    from minivllm.pocket import checkpoint

    folder = tmp_path / "model"
    shutil.copytree(Path(checkpoint.__file__).parent / "model", folder)

    async def run():
        client = ReplicaClient(loaded(2, {}, **{**SIM, "model": str(folder)}))
        await client.open()
        try:
            (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
            os.kill(client.replicas[1].pid, signal.SIGKILL)
            await until(lambda: client.replicas[1].restarted >= 2)  # the first new engine was refused
            assert client.replicas[1].condition == "starting" and client.healthy()[0]
            for i in range(4):
                assert (await ask(client, i, f"r{i}"))[1] is None
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(run(), 200))


PROTOCOLS = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "temperature": 0,
        "max_tokens": 8,
    },
    "/v1/completions": {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8},
    "/v1/responses": {"input": "What is 2 + 3?", "temperature": 0, "max_output_tokens": 8},
    "/v1/messages": {
        "model": "pocket",
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "max_tokens": 8,
        "temperature": 0,
    },
    "/api/chat": {
        "model": "pocket",
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "options": {"temperature": 0, "num_predict": 8},
    },
    "/api/generate": {"model": "pocket", "prompt": "What is 2 + 3?", "options": {"temperature": 0, "num_predict": 8}},
}
TEXTS = ("content", "text", "delta", "response", "arguments")


def text_of(value):
    """Join the texts of an answer.  The division into events depends on time."""
    if isinstance(value, list):
        return "".join(map(text_of, value))
    if not isinstance(value, dict):
        return ""
    return "".join(one if key in TEXTS and isinstance(one, str) else text_of(one) for key, one in value.items())


def events(text):
    """Return the objects of an answer, whole or as events."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.slow
def test_every_protocol_answers_as_with_one_engine_and_operators_see_the_replicas():
    one = Running(admin=True)
    two = Running(admin=True, replicas=2, router="round-robin")
    try:
        for path, body in PROTOCOLS.items():
            for stream in (False, True):
                for _ in range(2):  # each replica once
                    answers = [server.client.post(path, json={**body, "stream": stream}) for server in (one, two)]
                    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
                    texts = [text_of(events(answer.text)) for answer in answers]
                    assert texts[1] == texts[0] and len(texts[0]) > 3, path
        token = {"Authorization": f"Bearer {two.app.admin_token}"}
        shown = two.client.get("/replicas", headers=token).json()
        assert shown["router"] == "round-robin" and [r["state"] for r in shown["replicas"]] == ["serving"] * 2
        assert min(r["sent"] for r in shown["replicas"]) >= len(PROTOCOLS)
        assert two.client.get("/replicas").status_code == 401
        assert (
            one.client.get("/replicas", headers={"Authorization": f"Bearer {one.app.admin_token}"}).status_code == 400
        )
        drained = two.client.post("/replicas/1/drain", headers=token, json={}).json()["replicas"]
        assert [r["state"] for r in drained] == ["serving", "draining"]
        assert two.client.get("/health").json()["replicas"] == {"serving": 1, "all": 2}
        assert two.client.post("/replicas/0/drain", headers=token, json={}).status_code == 400
        for number in ("2", "x", "9" * 5000, "%D9%A1"):
            answer = two.client.post(f"/replicas/{number}/drain", headers=token, json={})
            assert answer.status_code == 400 and "expected" in answer.json()["error"]["message"]
        assert two.client.post("/replicas/1/resume", headers=token, json={}).status_code == 200
        metrics = two.client.get("/metrics").text
        sent = [r["sent"] for r in shown["replicas"]]
        for number in (0, 1):
            assert (
                f'minivllm:replica_sent_total{{engine="0",model_name="pocket",replica="{number}"}} {sent[number]}.0'
                in metrics
            )
            assert f'minivllm:replica_up{{engine="0",model_name="pocket",replica="{number}"}} 1.0' in metrics
        parts = [line for line in metrics.splitlines() if line.startswith("minivllm:replica_prefix_queries_total")]
        total = next(line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_queries_total"))
        assert sum(float(line.split()[-1]) for line in parts) == float(total.split()[-1]) > 0
        client = two.app.service.client
        os.kill(client.replicas[0].pid, signal.SIGKILL)
        for _ in range(4):
            answer = two.client.post("/v1/completions", json=PROTOCOLS["/v1/completions"])
            assert answer.status_code == 200
        assert two.client.get("/health").status_code == 200
    finally:
        one.close()
        two.close()
