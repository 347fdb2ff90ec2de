"""An engine that is started again, its log, and the operator's additions to the routes and to the log."""

import asyncio
import logging
import os
import signal
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from http_helpers import Running

from minivllm.config import load_config
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.server import middleware, throughput
from minivllm.server.link.child_log import LineFormatter, PrintedLog
from minivllm.server.link.process_client import ProcessClient
from minivllm.server.serve import fair_to, in_time

HELD = {"executor": {"name": "sim", "options": {"step_ms": 200}}, "max_num_seqs": 1, "max_model_len": 256}


@pytest.mark.slow
def test_an_engine_that_is_killed_is_started_again_and_requests_without_a_token_are_served():
    from minivllm import SamplingParams

    async def main():
        client = ProcessClient(load_config([], [], flags={"model": "pocket", **HELD}), restarts=1)
        await client.open()
        try:
            params = SamplingParams(max_tokens=5, ignore_eos=True)
            first = await client.stream([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True), "first")
            assert (await anext(aiter(first))).token_ids
            others = [asyncio.create_task(client.stream([4, i], params, f"r{i}")) for i in range(3)]
            await asyncio.sleep(0.3)
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                async for _ in first:
                    pass
            assert client.restarting and not client.healthy()[0]
            with pytest.raises(EngineDeadError, match="started again"):
                await client.stream([1], params, "new")
            for other in others:
                assert sum([len(piece.token_ids) async for piece in await asyncio.wait_for(other, 60)]) == 5
            assert client.healthy()[0] and client.restarted == 1 and not client._untouched
            os.kill(client.pid, signal.SIGKILL)
            while client.healthy()[0]:
                await asyncio.sleep(0.05)
            assert not client.restarting, "it was allowed once"
        finally:
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 150))


def records(text, pieces=(10**9,)):
    """Return (level, message, traceback) of each entry that ``PrintedLog`` logs for a text in pieces."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelno, record.getMessage(), record.event.get("traceback", "")))
    logger = logging.getLogger("minivllm.engine")
    logger.addHandler(handler)
    try:
        reader = PrintedLog(2000)
        while text:
            size = pieces[len(found) % len(pieces)]
            reader.feed(text[:size])
            text = text[size:]
        reader.end()
    finally:
        logger.removeHandler(handler)
    return found, reader.last_output


def chain():
    try:
        try:
            raise ValueError("inner")
        except ValueError as exc:
            raise RuntimeError("outer") from exc
    except RuntimeError:
        return sys.exc_info()


@pytest.mark.parametrize("pieces", [(10**9,), (1,), (7, 100)])
def test_a_traceback_of_the_engines_process_is_one_message(pieces):
    record = logging.LogRecord("minivllm", logging.ERROR, "", 0, "the engine ends", (), chain())
    printed = "".join(logging.Formatter().formatException(chain()))
    text = f"a line\n{LineFormatter().format(record)}\nminivllm: x\n{printed}\nanother\n"
    found, reported = records(text, pieces)
    assert [(level, message) for level, message, _ in found] == [
        (logging.WARNING, "a line"),
        (logging.ERROR, "the engine ends"),
        (logging.WARNING, "minivllm: x"),
        (logging.WARNING, found[3][1]),
        (logging.WARNING, "another"),
    ]
    assert "RuntimeError: outer" in found[1][2] and "inner" in found[1][2]
    assert "RuntimeError: outer" in found[3][1] + found[3][2] and found[3][2].startswith("Traceback")
    assert "Traceback" not in reported and reported.endswith("another\n")


def test_several_keys_are_served_by_the_policy_fair_unless_another_is_named():
    def policy(keys, **flags):
        return fair_to(keys, load_config([], [], flags={"model": "pocket", **flags})).engine.scheduler

    plain = policy(["a"])
    assert policy([]) == plain and policy(["a", "a"]) == plain and "fair" in str(policy(["a", "b"]))
    assert "fcfs" in str(policy(["a", "b"], scheduler="fcfs"))


def test_a_server_bounds_its_steps_automatically_unless_the_option_is_set():
    def target(**flags):
        return in_time(load_config([], [], flags={"model": "pocket", **flags})).engine.tpot_target_ms

    assert target() == "auto" and target(tpot_target_ms="off") == "off" and target(tpot_target_ms=30) == 30.0


def test_a_request_that_may_cost_too_much_is_refused_with_the_estimate_the_limit_and_what_to_do():
    running = Running(max_request_cost=1000)
    try:

        def ask(**body):
            answer = running.post("/v1/completions", {"prompt": "a b c", "ignore_eos": True, **body})
            return answer.status_code, answer.json().get("error", {}).get("message", "")

        assert ask(n=4, max_tokens=4)[0] == 200
        for body in ({"n": 100, "max_tokens": 10}, {"best_of": 100, "max_tokens": 10}, {"max_tokens": 1010}):
            status, why = ask(**body)
            assert status == 400 and "1,000 (max_request_cost)" in why and "max_tokens" in why, why
        assert ask(n=60, max_tokens=10)[0] == 200 and ask(n=60, max_tokens=10, logprobs=20)[0] == 400
        assert ask(prompt=["a b c"] * 30, max_tokens=40)[0] == 400
        chat = {"messages": [{"role": "user", "content": "hi"}], "n": 3}
        assert running.post("/v1/chat/completions", chat).status_code == 400, "512 tokens each are taken for granted"
    finally:
        running.close()


@pytest.mark.parametrize("name", ["nowhere:X", "os:nothing", "os:sep", "plain", ":x", "x:", "os:getcwd"])
def test_middleware_that_cannot_be_used_is_refused_by_name(name):
    with pytest.raises(ConfigError, match="--middleware"):
        middleware.load([name])


def test_middleware_sees_what_is_sent_and_only_requests_that_may_ask():
    from minivllm.server.app import Application

    seen = []

    class Stamp:
        def __init__(self, app):
            self.app = app

        async def __call__(self, scope, receive, send):
            seen.append(scope["path"])
            assert "direct" in scope["state"]

            async def answer(message):
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-stamp", b"1")]
                await send(message)

            await self.app(scope, receive, answer)

    async def timed(request, call_next):
        answer = await call_next(request)
        answer.headers["x-timed"] = "1"
        return answer

    async def main():
        from minivllm.config.server import ServerConfig

        app = Application(ServerConfig(), ["k"], middleware=[Stamp, timed])

        async def ask(path, *headers):
            sent = []
            scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
            scope |= {"headers": [(b"host", b"localhost"), *headers], "http_version": "1.1", "root_path": ""}
            scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000), "scheme": "http"}
            scope["state"] = {"direct": object()}

            async def receive():
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message):
                sent.append(message)

            await app(scope, receive, send)
            return sent[0]["status"], dict(sent[0]["headers"])

        assert (await ask("/version"))[0] == 401 and not seen
        status, headers = await ask("/version", (b"x-api-key", b"k"))
        assert status == 503 and headers[b"x-stamp"] == headers[b"x-timed"] == b"1" and seen == ["/version"]

    asyncio.run(main())


def test_throughput_is_told_for_the_time_in_which_something_was_done():
    first = {"prompt_tokens": 100, "generated_tokens": 10, "running": 2, "waiting": 1, "blocks_total": 10}
    first |= {"blocks_free": 6, "blocks_cached": 2, "prefix_queries": 4, "prefix_hits": 1}
    line = throughput.figures(first, {}, 2.0)
    assert (line["prompt_tokens_per_s"], line["generation_tokens_per_s"], line["kv_usage"]) == (50.0, 5.0, 0.2)
    assert line["prefix_hit_rate"] == 0.25 and "50.0 prompt and 5.0 generated tokens/s" in throughput.sentence(line)
    idle = {**first, "running": 0, "waiting": 0}
    assert throughput.figures(idle, first, 2.0) == {} and throughput.figures(first, first, 1.0)["running"] == 2
    again = throughput.figures({**first, "generated_tokens": 3}, first, 1.0)  # of an engine that was started again
    assert again["generation_tokens_per_s"] == 0.0

    async def main():
        received = asyncio.create_task(throughput.report(SimpleNamespace(stats=None), 0))
        await asyncio.wait_for(received, 1)  # never

    asyncio.run(main())


def test_the_module_of_the_server_is_the_command():
    import subprocess

    done = subprocess.run(
        [sys.executable, "-m", "minivllm.server", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "--middleware" in done.stdout and "--restart" in done.stdout
